"""What an operator's tools ask a running server: `/metrics` for Prometheus, and `/health`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homebody.database import connect
from homebody.errors import HomebodyError
from homebody.federation.server.records import Records, why_ended
from homebody.federation.service import web
from homebody.federation.service.logs import counts, quoted, samples

if TYPE_CHECKING:
    import uvicorn

    from homebody.federation.server.plan import ServerPlan
    from homebody.privacy import Budget

__all__ = ["Monitor", "RoundSums", "counters", "exposition", "health"]

_PAGE = 1000
"""RoundSums that are read at one time."""


@dataclass(frozen=True)
class _Sum:
    """Totals of some rounds."""

    rounds: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    last: dict[str, Any] | None = None
    measured: dict[str, Any] | None = None
    """The last round that was measured."""

    def plus(self, line: dict[str, Any]) -> _Sum:
        up, down = self.bytes_up + line["bytes_up"], self.bytes_down + line["bytes_down"]
        return _Sum(self.rounds + 1, up, down, line, line if line["metrics"] else self.measured)


class RoundSums:
    """Totals of all recorded rounds. Each is read once: an answer costs the same however many there are. The last is
    read every time, since it may be measured after it is recorded."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self._settled = _Sum()
        """All but the last."""

    def sum(self) -> _Sum:
        while True:
            since = self._settled.last["step"] if self._settled.last else 0
            lines = self.records.rounds(since=since, most=_PAGE)
            if not lines and since:  # they were taken back
                self._settled = _Sum()
                continue
            for line in lines[:-1]:
                self._settled = self._settled.plus(line)
            if len(lines) < 2:
                return self._settled.plus(lines[0]) if lines else self._settled


class Monitor:
    """Answers over HTTP while the server trains; nothing where the plan names no address."""

    def __init__(self, plan: ServerPlan, folder: Path) -> None:
        self._server: uvicorn.Server | None = None
        if not plan.metrics:
            return
        host, _, port = plan.metrics.rpartition(":")
        # A connection of its own, which its threads take turns with: the trainer's is busy.
        self._records = Records(connect(plan.database_in(folder), what="server's database"))
        try:
            self._listening = web.listen(host.strip("[]"), int(port))
        except HomebodyError as error:
            self._records.database.close()
            reason = web.why_not_bound(error.__cause__ or error)
            other = plan.elsewhere(folder, "metrics")
            raise HomebodyError(f"/metrics cannot be served on {plan.metrics}: {reason}; {other}.") from error
        self._server = web.server(
            _app(self._records, plan.recipe.allowed()), self._listening, limits=web.Limits(in_all=64, of_an_address=32)
        )
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


def _app(records: Records, budget: Budget | None) -> web.Starlette:
    rounds, turn = RoundSums(records), threading.Lock()

    def respond(make: Callable[[], str], kind: str) -> web.Response:
        try:
            with turn:  # what an answer takes while it is made does not add up
                text = make()
            return web.Response(text, headers={"content-type": kind})
        except Exception as error:
            # Whoever asks must hear that something is wrong, whatever it is; what it is, is for the operator.
            why = str(error) if isinstance(error, HomebodyError) else type(error).__name__
            return web.answer(503, {"status": "failing", "why": why})

    def metrics(_: web.Request) -> web.Response:
        return respond(lambda: exposition(rounds, budget), "text/plain; version=0.0.4; charset=utf-8")

    def healthy(_: web.Request) -> web.Response:
        return respond(lambda: json.dumps(health(rounds)) + "\n", "application/json")

    routes = [web.Route("/metrics", metrics), web.Route("/health", healthy)]
    return web.refusals(web.Starlette(routes=routes), lambda _: None)


def health(rounds: RoundSums) -> dict[str, Any]:
    """Whether the server runs, and what it does."""
    notes = rounds.records.notes()
    there = [seen for seen in rounds.records.presence().values() if seen.connected]
    said = {"waiting": json.loads(notes.get("waiting") or "null"), "ended": why_ended(notes)}
    return {
        "status": "ok",
        "doing": notes.get("doing", "starting"),
        "rounds": rounds.sum().rounds,
        "connected": len(there),
        **{name: value for name, value in said.items() if value is not None},
    }


def exposition(rounds: RoundSums, budget: Budget | None = None) -> str:
    """Counts and the last round's figures, as Prometheus reads them. budget: the plan's, if it has one."""
    records, done, out = rounds.records, rounds.sum(), list[str]()

    def tell(name: str, kind: str, helped: str, values: dict[str, float]) -> None:
        out.extend(samples(name, kind, helped, values))

    devices = [device for device in records.devices() if not device.removed]
    tell("rounds_total", "counter", "RoundSums done.", {"": done.rounds})
    aside = sum(device.set_aside is not None for device in devices)
    tell("devices", "gauge", "Devices that may take part.", {"": len(devices) - aside})
    tell("devices_aside", "gauge", "Devices that are set aside for broken answers.", {"": aside})
    tell("people", "gauge", "People of those devices.", {"": sum(device.people for device in devices)})
    presence, names = records.presence(), {device.fingerprint: device.name for device in devices}
    there = [seen for mark, seen in presence.items() if seen.connected and mark in names]
    tell("devices_connected", "gauge", "Devices that are connected.", {"": len(there)})
    tell("people_connected", "gauge", "People who take part on those devices.", {"": sum(one.people for one in there)})
    tell("devices_refusing", "gauge", "Connected devices that refuse.", {"": sum(bool(one.refuses) for one in there)})
    seen = {
        f'{{device="{quoted(names[mark])}"}}': datetime.fromisoformat(one.seen).timestamp()
        for mark, one in presence.items()
        if mark in names
    }
    tell("device_seen_timestamp_seconds", "gauge", "When a device was last connected.", seen)
    tell("training_ended", "gauge", "Whether training has ended.", {"": int(why_ended(records.notes()) is not None)})
    if budget is not None:
        labels = f'{{observer="{budget.observer}"}}'
        tell("budget_epsilon", "gauge", "The privacy budget of one person.", {labels: budget.epsilon})
        if budget.unit == "user":  # as rounds state it, at the same δ
            spent = 0.0 if done.last is None else done.last["epsilon"].get(budget.observer, 0.0)
            tell("budget_spent_epsilon", "gauge", "How much of it is spent.", {labels: _number(spent)})
    tell("items", "gauge", "Items of the catalogue.", {"": records.n_items()})
    tell("bytes_up_total", "counter", "Bytes that came from devices, in rounds.", {"": done.bytes_up})
    tell("bytes_down_total", "counter", "Bytes that went to devices, in rounds.", {"": done.bytes_down})
    if (last := done.last) is not None:
        tell("round_clients", "gauge", "Clients that answered the last round.", {"": last["clients"]})
        tell("round_seconds", "gauge", "Seconds that the last round took.", {"": last["seconds"]})
        epsilon = {f'{{observer="{who}"}}': _number(value) for who, value in last["epsilon"].items()}
        tell("epsilon", "gauge", "Certified epsilon of one person.", epsilon)
    if (asked := done.measured) is not None:
        for name, helped, values in (
            ("measured", "What devices measured last, within its range.", asked["metrics"]),
            ("measured_error", "The standard error of the noise in it.", asked.get("errors", {})),
        ):
            tell(name, "gauge", helped, {f'{{metric="{quoted(metric)}"}}': _number(v) for metric, v in values.items()})
    return "\n".join(out) + "\n" + counters(records)


def counters(records: Records) -> str:
    """What was counted since the server was made, as Prometheus reads it."""
    lines = counts(records.counters(), "", lambda what: f"Counted since the server was made: {what}.")
    return "".join(f"{line}\n" for line in lines)


def _number(value: float | str) -> Any:
    return "+Inf" if str(value) == "inf" else value
