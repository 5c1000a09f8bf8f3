"""How a device is served: it asks a service turn by turn, writes down what comes, and ranks at home.

    ask what is offered → fetch the model and the rows that everyone gets → for each person: draw, write down
    → wait → for each person: charge, send, write the answer down

A turn asks for everyone who takes part, whether or not they have a history or use what comes, and at a time that
depends on nobody. What a person tells is written down before it is charged, and charged before it leaves (`queries`).
So a device may be killed at any moment: it goes on with the same query, and its charge is the same release.

Between two turns, or past the budget, the last answer is used again; without one, the rows that everyone gets. A device
never asks for a row because it is in a history: rows of what people have are those that came anyway.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from homebody import __version__
from homebody.core import Rows, Tree
from homebody.errors import HomebodyError, several
from homebody.federation import LONGEST, wire
from homebody.federation.device.history import Interaction
from homebody.federation.device.home import Home
from homebody.federation.device.household import TOY_ITEMS, RankedItem
from homebody.federation.device.limits import TooLarge, estimate, refuse_larger
from homebody.federation.device.people import OptedOut, Person
from homebody.federation.device.queries import ASKING, EACH_TURN, DrawnQuery, Overtaken, Turn
from homebody.federation.device.received import ReceivedPart
from homebody.federation.device.settings import HomeSettings
from homebody.federation.service.text import ago
from homebody.privacy import Budget, Charge, Ledger
from homebody.privacy.events import event_from_json
from homebody.report.statement import figure
from homebody.rng import SystemRng
from homebody.serving import model as serving
from homebody.serving.client import (
    LETTER,
    Client,
    Offer,
    RefusedRequest,
    ServedTable,
    head_path,
    list_path,
    query_body,
    ranking,
    shelf_path,
    table_path,
)
from homebody.serving.model import Head
from homebody.serving.rows import Part, join
from homebody.settings import DELTA

__all__ = ["Asker", "Recommendation", "recommend"]

AUTO_BYTES = 64 << 20
"""The largest table that a device takes whole if it may choose."""
DRAWING = 2.0
"""Seconds for each person between the start of drawing and the moment at which queries leave; 0: no wait and no limit.
Whose interest takes more than half of that tells a random one: the service says how it is computed, and could make that
take the longer, the longer a history is."""
GONE = (404, 410)
"""How a service says that it has another model."""
LATER = (401, 403, 408, 429)
"""What a service may say of a query that it takes at another time."""


class Asker:
    """Asks the service of a home for everyone who takes part.

    silent: whether nothing may leave any more, asked before each query. wait: waits so many seconds.
    log: told of events, never of what is in a query.
    """

    def __init__(
        self,
        home: Home,
        log: Callable[..., None] = lambda event, **facts: None,
        *,
        client: Client | None = None,
        silent: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.time,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self.home, self._log, self._silent, self._clock, self._wait = home, log, silent, clock, wait
        self._failed: list[HomebodyError] = []
        if not home.settings.serving:
            raise HomebodyError(
                f"The device in {home.path} has no service: give it one with `homebody client serving {home.path} "
                "--url https://HOST:PORT --ca ca.pem`."
            )
        self._given = client

    @cached_property
    def _client(self) -> Client:
        """The client of the service. It is made when something is asked, not to see whether something is to be."""
        settings, token = self.home.settings, self.home.serving_token
        return self._given or Client(settings.serving, ca=self.home.serving_ca, token=token or "")

    def close(self) -> None:
        if "_client" in vars(self):
            self._client.close()

    @property
    def wanted(self) -> bool:
        """Whether a turn has come, or one is not done with."""
        settings, model = self.home.settings, self.home.received.model
        about = model if settings.serving_mode in ASKING else ""
        return self._outdated or self.home.queries.wanted(int(self._clock()), settings.serving_every, about)

    @property
    def _outdated(self) -> bool:
        """Whether what is here did not come for the way that the settings ask for."""
        way, mode = self.home.received.way, self.home.settings.serving_mode
        return way not in (("table", "shelf") if mode == "auto" else (mode,))

    def take_turn(self) -> int:
        """Do what the present turn has left to do; its number. Raises `HomebodyError` if the service cannot be asked:
        what was written down stays, and the next call goes on with it."""
        queries, settings = self.home.queries, self.home.settings
        now, held = int(self._clock()), self.home.received.get("head")
        self._failed.clear()
        with _understood():
            due = self._outdated or queries.due(now, settings.serving_every)
            head = self._fetch(now) if held is None or due else Head.read(held.bytes)
            turn = queries.turn()
            assert turn is not None
            for _ in range(EACH_TURN if settings.serving_mode in ASKING else 0):
                self._draw(turn, head)
                if self._send(head):
                    break
                before, head = head, self._fetch(now)
                if head.digest == before.digest:  # it has the model, and not what was asked of it
                    queries.give_up("")
        if self._failed:
            raise self._failed[0]
        return turn.number

    def _fetch(self, now: int) -> Head:
        """Bring the model and the rows that everyone gets up to date, which begins a turn that is due. Nothing of
        anybody is in what is asked."""
        received, offer = self.home.received, self._client.model()
        way = self._way(offer)
        known = received.get("head", offer.model)
        content = self._client.get(head_path(offer.model)) if known is None else known.bytes
        head = Head.read(content)
        part = self._table(offer) if way == "table" else Part.read(self._client.get(shelf_path()))
        if not head.digest == part.model == offer.model:
            raise HomebodyError("The service changed its model while it was asked: ask again.")
        self._refuse_larger(head, part)
        if way in ASKING and head.mechanism is None:
            raise HomebodyError("The service offers queries without saying how to draw them: update the older side.")
        with self.home.store.writing():
            came = {"head": content, way: part.content}
            received.put({name: ReceivedPart(offer.model, part.version, one) for name, one in came.items()})
            self.home.queries.give_up(offer.model)
            self.home.queries.begin_turn(now, self.home.settings.serving_every)
        return head

    def _refuse_larger(self, head: Head, part: Part) -> None:
        """Refuse a model that would have the device make something too large for itself; its rows are here already."""
        none = head.catalogue(part.only(torch.empty(0, dtype=torch.int64)))
        try:
            work = estimate(head.method, replace(none, n_items=TOY_ITEMS), LONGEST, 1)
        except TooLarge:
            raise
        except HomebodyError:  # to train it takes the texts of news, which are not here: nothing is made to rank
            return
        refuse_larger(replace(work, bytes=0), self.home.settings)

    def _way(self, offer: Offer) -> str:
        """How to be served, by the device's settings and what is offered."""
        mode = self.home.settings.serving_mode
        if mode == "auto":
            small = 0 < offer.table_bytes <= AUTO_BYTES
            mode = "table" if "table" in offer.ways and (small or "shelf" not in offer.ways) else "shelf"
        if mode not in offer.ways:
            raise HomebodyError(
                f"The service does not serve this model by --mode {mode}: it offers {', '.join(offer.ways)}."
            )
        return mode

    def _table(self, offer: Offer) -> Part:
        """Every row: those that are here, with what changed since."""
        held = self.home.received.get("table", offer.model)
        if held is not None and held.version == offer.version:
            return Part.read(held.bytes)
        table = ServedTable.read(self._client.get(table_path(None if held is None else held.version)))
        if held is None or table.since is None:
            return table.part
        if table.since != held.version:
            raise HomebodyError("The service sent what changed since another version than was asked for.")
        before, gone = Part.read(held.bytes), {*table.removed, *table.part.ids}
        kept = [place for place, item in enumerate(before.ids) if item not in gone]
        return join(table.part, before.only(torch.tensor(kept, dtype=torch.int64)))

    def _draw(self, turn: Turn, head: Head) -> None:
        """Draw what everyone who wants a query tells, and wait: when it leaves says nothing of histories."""
        wanting = self.home.queries.wanting(turn.number, head.digest)
        if wanting and not _too_dear(self.home.settings, _charge(head)):
            self._rehearse(head)
        began = time.monotonic()
        for slot in wanting:
            with self._alone():
                self._draw_for(slot, turn, head)
        if seconds := DRAWING * len(wanting):
            end = began + seconds * max(1, math.ceil((time.monotonic() - began) / seconds))
            while (left := end - time.monotonic()) > 0 and not self._silent():
                self._wait(left)

    def _rehearse(self, head: Head) -> None:
        """Compile what an interest takes, by the first row: that takes as long as it takes, whoever asks."""
        rows = self.home.received.get(self.home.received.way, head.digest)
        with suppress(Exception), torch.no_grad():
            part = Part.read(rows.bytes if rows else b"")
            serving.interest_of(head, part, serving.AtHome(part.ids[:1]))

    def _draw_for(self, slot: int, turn: Turn, head: Head) -> None:
        assert head.query is not None
        charge, told = _charge(head), None
        if self._allows(slot, charge):
            told = wire.encode_tree({"told": head.tell(self._interest(slot, head), SystemRng())})
        about = (slot, turn.number, head.query.kind, head.digest, charge.as_json())
        self.home.queries.draw(*about, told=told, at=int(self._clock()))

    def _interest(self, slot: int, head: Head) -> Tensor:
        """Where a person looks; zeros if nothing can be said of it, so that nobody learns of a failure."""
        try:
            part, known = _at_home(self.home, slot, head)
            interest = _in_time(lambda: serving.interest_of(head, part, known))
            if interest.shape != (head.size,):  # told or not, that would say whether rows of theirs are in the part
                raise HomebodyError(f"The model's interests have {head.size} numbers, and its rows have others.")
            return interest
        except Exception as error:
            self._log("nothing", reason=str(error) if isinstance(error, HomebodyError) else type(error).__name__)
            return torch.zeros(head.size)

    def _allows(self, slot: int, charge: Charge) -> bool:
        budget = self.home.settings.budget
        if _too_dear(self.home.settings, charge):
            return False
        return not budget or Budget.parse(budget).allows(self.home.ledger(slot), [charge])

    def _send(self, head: Head) -> bool:
        """Charge and send what is open; False: the service has another model."""
        for query in self.home.queries.open(head.digest):
            if self._silent():
                return True
            left = None
            with self._alone():
                left = self._leaving(query)
            if left is None:
                continue
            try:
                self._ask(left)
            except (OptedOut, Overtaken):
                continue
            except RefusedRequest as error:
                if error.status in GONE:
                    return False
                if error.status in LATER or error.status >= 500:
                    raise
                self.home.queries.move(query, "gone")
                self._log("query refused", reason=str(error))
        return True

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let what fails for one person, such as a damaged ledger, hold up nobody else: the turn says it at its end."""
        try:
            yield
        except (OptedOut, Overtaken):
            pass
        except HomebodyError as error:
            self._failed.append(error)

    def _leaving(self, query: DrawnQuery) -> DrawnQuery | None:
        """A query that is charged and may leave; None: the budget refuses it."""
        if query.state == "drawn" and (query := self._charge(query)).state == "refused":
            return None
        return self.home.queries.move(query, "sent", int(self._clock()))

    def _ask(self, query: DrawnQuery) -> None:
        """Send a query, and write its answer down."""
        assert query.told is not None
        told = wire.decode_tree(query.told)["told"]
        if self.home.settings.serving_mode == "server":
            answer = self._client.post(query_body(query.model, told))
            ranking(answer)
        else:
            if query.kind == "choice":
                answer = self._client.get(list_path(query.model, int(told)))
            else:
                answer = self._client.post(query_body(query.model, told), accept=LETTER)
            part, rows = Part.read(answer), self.home.received.get(self.home.received.way, query.model)
            if part.model != query.model:
                raise HomebodyError("The service sent rows of another model: ask again.")
            if rows is not None:  # refused before it is kept, if it does not go with these
                join(Part.read(rows.bytes), part)
        self.home.queries.answer(query, answer)

    def _charge(self, query: DrawnQuery) -> DrawnQuery:
        """Charge a query that was drawn; one that was charged before a kill is the same release."""
        ledger, charge = self.home.ledger(query.person), Charge("server", "user", event_from_json(query.event))
        name = f"query/{query.kind}/{query.turn}"
        with self.home.charging(query.person):
            self.home.people.participant(query.person)
            if not ledger.repeats(name, query.nonce) and not self._allows(query.person, charge):
                return self.home.queries.move(query, "refused")
            code = f"homebody {__version__}"
            ledger.charge(name, [charge], repeat=True, number=query.turn, code=code, digest=query.nonce)
        return self.home.queries.move(query, "charged")


class Recommendation(NamedTuple):
    """Recommendations by what a service sent, and how they came about."""

    items: list[RankedItem]
    way: str
    """table, shelf, query or server."""
    epsilon: float
    """ε of the query that was answered; 0: none was used."""
    spent: float
    """ε of everything that the person's ledger has, against the server."""
    delta: float
    asked: int
    """When that query left, or else the turn began, in seconds since 1970."""
    left_out: int
    """Items of the person whose rows are not here."""
    notes: tuple[str, ...]
    listed: tuple[str, ...] = ()
    """The list as the service ranked it, the person's own items among them; empty where the device ranked."""


def recommend(home: Home, person: Person, k: int = 10, *, asker: Asker | None = None) -> Recommendation:
    """A person's best new items, by what the service sent. Where no client runs, the service is asked first if its turn
    has come; otherwise nothing leaves the device."""
    asker, notes = asker or Asker(home), list[str]()
    try:
        if not home.received.model or (asker.wanted and not home.store.client_runs()):
            asker.take_turn()
    except HomebodyError as error:
        if not home.received.model:
            raise
        notes.append(f"{error} What came before is used again.")
    finally:
        asker.close()
    with _understood():
        return _ranked(home, person, k, notes)


def _ranked(home: Home, person: Person, k: int, notes: list[str]) -> Recommendation:
    mode, turn, held = home.settings.serving_mode, home.queries.turn(), home.received.get("head")
    assert held is not None
    assert turn is not None
    head = Head.read(held.bytes)
    part, known = _at_home(home, person, head)
    there, delta = set(part.ids), _delta(home.settings)
    query = next(iter(home.queries.answers(person, head.digest)), None) if mode in ASKING else None
    way, epsilon, asked = "table" if home.received.way == "table" else "shelf", 0.0, turn.at
    ranked, listed = None, list[tuple[str, float]]()
    if query is not None and query.answer is not None:
        charge = Charge("server", "user", event_from_json(query.event))
        epsilon, asked = _cost(home.settings, charge), query.left or query.at
        way = "query" if _is_list(query.answer) else "server"
        own, listed = set(known.items), [] if way == "query" else ranking(query.answer)
        ranked = None if way == "query" else [pair for pair in listed if pair[0] not in own][:k]
    if ranked is None:
        with torch.no_grad():
            best = serving.rank(head, part, known, k)
        ranked, notes = best.items, [*notes, *best.notes]
    spent = home.ledger(person).epsilon("server", delta=delta).epsilon if home.ledger_file(person).exists() else 0.0
    if mode in ASKING and query is None:
        notes.append(_unanswered(home.settings, home.queries.of(person)[-1:]))
    names = {**dict(home.items.all()), **part.names}
    return Recommendation(
        [RankedItem(item, names.get(item, item), score) for item, score in ranked],
        way,
        epsilon,
        spent,
        delta,
        asked,
        sum(item not in there for item in known.items),
        (*notes, _how(way, len(part), epsilon, asked), *([_in_all(spent, delta)] if spent else [])),
        tuple(item for item, _ in listed),
    )


def _charge(head: Head) -> Charge:
    """What a query of this model costs its person."""
    assert head.mechanism is not None
    return Charge("server", "user", head.mechanism.event)


def _in_time(work: Callable[[], Tensor]) -> Tensor:
    """The result of the work, within half of the time for drawing: the rest is for what nobody else can make slow. A
    thread cannot be stopped: one that takes longer goes on to its end, for nobody."""
    done: list[Tensor] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            with torch.no_grad():
                done.append(work())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="interest", daemon=True)
    thread.start()
    thread.join(0.5 * DRAWING or None)
    if failed:
        raise failed[0]
    if not done:
        raise HomebodyError("The interest took longer than this device allows.")
    return done[0]


def _delta(settings: HomeSettings) -> float:
    return Budget.parse(settings.budget).delta if settings.budget else DELTA


def _cost(settings: HomeSettings, charge: Charge) -> float:
    """ε of a charge alone."""
    return Ledger().epsilon("server", delta=_delta(settings), also=[charge]).epsilon


def _too_dear(settings: HomeSettings, charge: Charge) -> str:
    """Why a query costs more than this device's owner agreed to, whatever budget is left; empty: it does not."""
    cost, most = _cost(settings, charge), settings.query_epsilon
    if cost <= most * (1 + 1e-6):
        return ""
    return f"The service asks for queries at ε = {figure(cost)}, and this device allows {figure(most)} (--epsilon)."


def _unanswered(settings: HomeSettings, last: Sequence[DrawnQuery]) -> str:
    """Why there is no answer, by a person's last query if there is one."""
    if not last or last[0].state != "refused":
        return "No query of theirs was answered yet."
    charge = Charge("server", "user", event_from_json(last[0].event))
    return _too_dear(settings, charge) or "The budget allows no query."


def _how(way: str, rows: int, epsilon: float, asked: int) -> str:
    """How a ranking came about."""
    when = f"{ago(time.time() - asked)} ago"
    if way == "server":
        return f"Ranked by the service for what was told {when}, at ε = {figure(epsilon)}."
    if way == "query":
        told = f"a list for what was told {when}, at ε = {figure(epsilon)}"
        return f"Ranked here on {several(rows, 'row')}: those that everyone gets, and {told}."
    which = "all" if way == "table" else "those that everyone gets"
    return f"Ranked here on {several(rows, 'row')}, {which}, as of {when}: nothing was told, ε = 0."


def _in_all(spent: float, delta: float) -> str:
    return f"ε against the server is {figure(spent)} in all, training and queries together, at δ = {delta:g}."


def _at_home(home: Home, who: Person | int, head: Head) -> tuple[Part, serving.AtHome]:
    """The rows that are here, and what the device knows of a person. Of several interactions with an item, the first
    counts."""
    first: dict[str, Interaction] = {}
    for one in home.history.of(who):
        first.setdefault(one.item, one)
    ratings = [one.rating for one in first.values() if one.rating is not None]
    given = ratings if len(ratings) == len(first) else None
    part = _rows(home, head, who, list(first))
    local = _private_state(home, who, head, part)
    return part, serving.AtHome(list(first), given, home.people.profile(who), local=local)


def _private_state(home: Home, who: Person | int, head: Head, part: Part) -> Tree | None:
    """A person's private state, if the device took part in training this model; items are numbered as in the part."""
    model = home.models.ranking()
    if model is None or not head.run or json.loads(model.description)["run"] != head.run:
        return None
    state = home.models.state(who, head.run, model.step + 1)
    if state is None:
        return None
    header, parts = wire.decode_letter(state.bytes)
    if header["phase"] != model.release.rpartition("/")[0]:
        return None
    number, ids = dict(zip(part.ids, part.items.tolist(), strict=True)), [item for item, _ in home.items.all()]

    def renumbered(rows: Rows) -> Rows:
        index = [number.get(ids[place], -1) if 0 <= place < len(ids) else -1 for place in rows.index.tolist()]
        return Rows(torch.tensor(index, dtype=torch.int64), rows.value, 1 + max(number.values(), default=-1))

    local = wire.decode_tree(parts["state"])
    return {name: renumbered(value) if isinstance(value, Rows) else value for name, value in local.items()}


def _rows(home: Home, head: Head, who: Person | int, own: Sequence[str]) -> Part:
    """The rows that everyone gets and the person's last list; of their earlier lists, those of their own items."""
    rows = home.received.get(home.received.way, head.digest)
    assert rows is not None
    answers = [query.answer for query in home.queries.answers(who, head.digest) if query.answer is not None]
    lists, wanted = [Part.read(answer) for answer in answers if _is_list(answer)], set(own)
    latest = 1 if home.settings.serving_mode in ASKING else 0
    for number, part in enumerate(lists[latest:], latest):
        places = [place for place, item in enumerate(part.ids) if item in wanted]
        lists[number] = part.only(torch.tensor(places, dtype=torch.int64))
    return join(Part.read(rows.bytes), *lists)


def _is_list(answer: bytes) -> bool:
    """Whether an answer is rows, not a ranking."""
    return answer.startswith(wire.MAGIC)


@contextmanager
def _understood() -> Iterator[None]:
    """Say in a sentence that what a service sent cannot be read."""
    try:
        yield
    except wire.Malformed as error:
        raise HomebodyError(f"The service sent something that this device cannot read: {error}") from error
