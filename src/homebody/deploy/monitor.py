"""What an operator's tools ask a running server: `/metrics` for Prometheus, and `/health`."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homebody.database import connect
from homebody.deploy.records import Records
from homebody.errors import HomebodyError

if TYPE_CHECKING:
    from homebody.deploy.plan import Plan

__all__ = ["Monitor", "counters", "exposition", "health"]


class Monitor:
    """Answers over HTTP while the server trains; nothing where the plan names no address."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._server: ThreadingHTTPServer | None = None
        if not plan.metrics:
            return
        host, _, port = plan.metrics.rpartition(":")
        # A connection of its own, which its threads take turns with: the trainer's is busy.
        records = self._records = Records(connect(plan.database_in(folder), what="server's database"))

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                try:
                    status, kind, text = _answer(self.path.partition("?")[0], records)
                except Exception as error:
                    # Whoever asks must hear that something is wrong, whatever it is; what it is, is for the operator.
                    why = str(error) if isinstance(error, HomebodyError) else type(error).__name__
                    status, kind, text = 503, "application/json", json.dumps({"status": "failing", "why": why})
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Nobody's address is written down."""

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Whoever hangs up before the answer is nobody's concern."""

        try:
            self._server = Server((host.strip("[]"), int(port)), Handler)
        except OSError as error:
            records.database.close()
            raise HomebodyError(
                f"/metrics cannot be served on {plan.metrics}: {error.strerror}; choose another with --metrics."
            ) from error
        self._server.daemon_threads = True

    def __enter__(self) -> Monitor:
        if self._server:
            threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server:
            self._server.shutdown()
            self._server.server_close()
            self._records.database.close()


def _answer(path: str, records: Records) -> tuple[int, str, str]:
    if path == "/metrics":
        return 200, "text/plain; version=0.0.4; charset=utf-8", exposition(records)
    if path == "/health":
        return 200, "application/json", json.dumps(health(records)) + "\n"
    return 404, "text/plain", "There are /metrics and /health here.\n"


def health(records: Records) -> dict[str, Any]:
    """That it is there, and what it does."""
    lines = records.rounds()
    return {"status": "ok", "doing": records.notes().get("doing", "starting"), "rounds": len(lines)}


def exposition(records: Records) -> str:
    """Counts and the last round's figures, as Prometheus reads them."""
    lines, out = records.rounds(), list[str]()

    def tell(name: str, kind: str, helped: str, values: dict[str, float]) -> None:
        out.extend(_lines(name, kind, helped, values))

    devices = [one for one in records.devices() if not one.removed]
    tell("rounds_total", "counter", "Rounds done.", {"": len(lines)})
    aside = sum(one.set_aside is not None for one in devices)
    tell("devices", "gauge", "Devices that may take part.", {"": len(devices) - aside})
    tell("devices_aside", "gauge", "Devices that are set aside for broken answers.", {"": aside})
    tell("people", "gauge", "People of those devices.", {"": sum(one.people for one in devices)})
    tell("items", "gauge", "Items of the catalogue.", {"": records.n_items()})
    for way, said in (("up", "came from devices"), ("down", "went to devices")):
        total = sum(line[f"bytes_{way}"] for line in lines)
        tell(f"bytes_{way}_total", "counter", f"Bytes that {said}, in rounds.", {"": total})
    if lines:
        last = lines[-1]
        tell("round_clients", "gauge", "Clients that answered the last round.", {"": last["clients"]})
        tell("round_seconds", "gauge", "Seconds that the last round took.", {"": last["seconds"]})
        epsilon = {f'{{observer="{who}"}}': _number(value) for who, value in last["epsilon"].items()}
        tell("epsilon", "gauge", "Certified epsilon of one person.", epsilon)
    return "\n".join(out) + "\n" + counters(records)


def counters(records: Records) -> str:
    """What was counted since the server was made, as Prometheus reads it."""
    counted: dict[str, dict[str, float]] = {}
    for name, amount in records.counters().items():
        what, _, reason = name.partition(": ")
        labels = f'{{reason="{_quoted(reason)}"}}' if reason else ""
        counted.setdefault(what.replace(" ", "_"), {})[labels] = amount
    out: list[str] = []
    for what, values in counted.items():
        out += _lines(f"{what}_total", "counter", f"Counted since the server was made: {what}.", values)
    return "".join(f"{line}\n" for line in out)


def _lines(name: str, kind: str, helped: str, values: dict[str, float]) -> list[str]:
    told = [f"homebody_{name}{labels} {value}" for labels, value in values.items()]
    return [f"# HELP homebody_{name} {helped}", f"# TYPE homebody_{name} {kind}", *told]


def _number(value: float | str) -> Any:
    return "+Inf" if str(value) == "inf" else value


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
