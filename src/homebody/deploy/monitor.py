"""What an operator's tools ask a running server: `/metrics` for Prometheus, and `/health`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homebody.database import connect
from homebody.deploy.records import Records
from homebody.errors import HomebodyError
from homebody.runtime.web import Limits, answer, listen, refusals, server

try:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as error:
    raise HomebodyError("Answering over HTTP needs the extra: pip install 'homebody[deploy]'.") from error

if TYPE_CHECKING:
    import uvicorn

    from homebody.deploy.plan import Plan

__all__ = ["Monitor", "counters", "exposition", "health"]


class Monitor:
    """Answers over HTTP while the server trains; nothing where the plan names no address."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._server: uvicorn.Server | None = None
        if not plan.metrics:
            return
        host, _, port = plan.metrics.rpartition(":")
        # A connection of its own, which its threads take turns with: the trainer's is busy.
        self._records = Records(connect(plan.database_in(folder), what="server's database"))
        try:
            self._listening = listen(host.strip("[]"), int(port))
        except HomebodyError as error:
            self._records.database.close()
            reason = getattr(error.__cause__, "strerror", None) or error
            raise HomebodyError(
                f"/metrics cannot be served on {plan.metrics}: {reason}; choose another with --metrics."
            ) from error
        self._server = server(_app(self._records), self._listening, limits=Limits(in_all=64, of_an_address=32))
        self._thread = threading.Thread(target=self._server.run, args=([self._listening],), daemon=True)

    def __enter__(self) -> Monitor:
        if self._server:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server:
            self._server.should_exit = True
            self._thread.join()
            self._listening.close()
            self._records.database.close()


def _app(records: Records) -> Starlette:
    def told(make: Callable[[], str], kind: str) -> Response:
        try:
            return Response(make(), headers={"content-type": kind})
        except Exception as error:
            # Whoever asks must hear that something is wrong, whatever it is; what it is, is for the operator.
            why = str(error) if isinstance(error, HomebodyError) else type(error).__name__
            return answer(503, {"status": "failing", "why": why})

    def metrics(_: Request) -> Response:
        return told(lambda: exposition(records), "text/plain; version=0.0.4; charset=utf-8")

    def healthy(_: Request) -> Response:
        return told(lambda: json.dumps(health(records)) + "\n", "application/json")

    return refusals(Starlette(routes=[Route("/metrics", metrics), Route("/health", healthy)]), lambda _: None)


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
    if asked := [line for line in lines if line["metrics"]]:
        for name, helped, values in (
            ("measured", "What devices measured last, within its range.", asked[-1]["metrics"]),
            ("measured_error", "The standard error of the noise in it.", asked[-1].get("errors", {})),
        ):
            tell(name, "gauge", helped, {f'{{metric="{_quoted(metric)}"}}': _number(v) for metric, v in values.items()})
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
