"""The exact message a device would send, and who sees what of it.

One-bit reports are shown bit by bit: what a device draws and sends, and what each party on the way sees. All of it
comes from the code that runs: the message is the simulator's, the values are those of the same client before `OneBit`,
and `homebody.federation.envelopes` seals, signs and opens the reports, with keys that nobody keeps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from torch import Tensor

from homebody.adversary.impressions import exact, report_stage
from homebody.adversary.interactions import read_requests
from homebody.adversary.words import TABLES, drawn, named
from homebody.core import Cohort, Method, Rows, Tree, Update, releases
from homebody.errors import HomebodyError, several
from homebody.federation.wire import encode_tree, report_numbers
from homebody.markup import html
from homebody.methods.fedrec import FedRec
from homebody.methods.privaterec import PrivateRec
from homebody.privacy import Channel
from homebody.privacy.assumptions import assumptions
from homebody.privacy.queries import Attention, Mechanism, truth
from homebody.privacy.reports import parse_counts_name
from homebody.privacy.ring import entries_of
from homebody.privacy.stages import VectorLaplace, summable
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.simulation.simulator import bits_of

__all__ = ["ClientReports", "Inspection", "Report", "Request", "Sealed", "ToldImpression", "encode", "inspect"]

EXCERPT = 24
"""Bytes of each part that are shown."""
NAMED = 8
"""Words of a history that are shown."""


@dataclass(frozen=True)
class MessagePart:
    """One tensor of a message."""

    name: str
    shape: tuple[int, ...]
    """The shape of the tensor, or of the rows that are sent of it."""
    dtype: str
    rows_of: int | None
    """How many rows the table has, if some of them are sent; None: it is sent whole."""
    bytes: int
    hex: str
    """Its first bytes."""


@dataclass(frozen=True)
class Request:
    """The rows of one table that a device asks for before it works."""

    table: str
    rows: int
    rows_of: int
    """How many rows the table has."""
    own: int | None
    """How many are items that this person trains on; None where the table has no row for each item."""
    always: tuple[dict[str, Any], ...]
    """After 1, 2, … rounds: the rows requested in all of them, how many are own items, precision and recall."""


@dataclass(frozen=True)
class View:
    """One observer's view of the message."""

    sees: str
    """In a sentence."""
    charged: tuple[str, ...]
    """What the ledger writes down for it in each round, by unit."""


@dataclass(frozen=True, repr=False)
class Inspection:
    """A message, taken apart."""

    user: str
    """The user's name in the data."""
    parts: tuple[MessagePart, ...]
    """What leaves the device, requests first."""
    bytes: int
    observers: dict[str, View]
    tells: tuple[str, ...]
    """What anyone can read from the message itself."""
    requests: tuple[Request, ...] = ()
    """Empty unless devices ask for rows."""
    reports: ClientReports | None = None
    """Each one-bit report of the message; None: it has none."""
    impression: ToldImpression | None = None
    """The report on an impression that the message is; None: it is none."""
    assumes: tuple[str, ...] = ()
    """What a secure sum shows to whom, and what that rests on; empty without one."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "reports": self.reports.as_dict() if self.reports else None}

    @property
    def frame(self) -> pl.DataFrame:
        """A row for each part of the message."""
        names = [field.name for field in fields(MessagePart)]
        columns = {name: [getattr(part, name) for part in self.parts] for name in names}
        columns["shape"] = [list(part.shape) for part in self.parts]
        frame = pl.DataFrame({"part": columns.pop("name"), **columns})
        return frame.with_columns(pl.col("rows_of").cast(pl.Int64))

    def __repr__(self) -> str:
        parts = ", ".join(part.name for part in self.parts)
        return f"<Inspection: one message of user {self.user}, {self.bytes:,} bytes: {parts}>"

    def _repr_html_(self) -> str:
        parts = [
            (part.name, " × ".join(f"{side:,}" for side in part.shape) or "1", part.dtype, part.bytes, part.hex)
            for part in self.parts
        ]
        title = f"one message of user {self.user}, {self.bytes:,} bytes"
        seen = [(who, view.sees, "; ".join(view.charged)) for who, view in self.observers.items()]
        return html(title, ("part", "shape", "type", "bytes", "begins"), parts) + html(
            "who sees what of it", ("observer", "sees", "is charged each round"), seen, (*self.tells, *self.assumes)
        )


def inspect(method: Method, simulator: Simulator, user: int, *, cohort: int | None = None, seed: int = 0) -> Inspection:
    """What this client sends in the first round of a run with this seed: bit by bit what the run would sum.

    The one exception is noise that devices add: a simulation draws its sum over the cohort at once, unless it is told
    to run plainly. The noise shown is what this device would draw by itself.
    """
    ids = simulator.split.population.user_ids
    called = str(user if ids is None else ids[user])
    phase = next(phase for phase in method.phases if not phase.public)
    acting = phase.method or method
    rng = Rng.of(seed, phase.name)
    simulator.begin(acting, rng.fold("clients"))  # who takes part depends on what the method needs
    if user not in simulator.available():
        raise HomebodyError(f"User {called} takes no part in training with this split: there is nothing to send.")
    shared = acting.init_shared(simulator.catalogue, rng.fold("shared"))
    shared = {name: value.to(simulator.device) for name, value in shared.items()}
    everyone = simulator.available()
    drawn = len(everyone) if cohort is None else cohort
    if (fitted := acting.uplink.among(drawn)) is not acting.uplink:
        acting = replace(acting, uplink=fitted)  # type: ignore[type-var]
    update = simulator.message(acting, shared, user, rng.fold("round", 1))
    requests = tuple(_requests(acting, simulator, shared, user, rng)) if acting.uplink.asks_rows else ()
    sent = {**{f"request for {request.table}": rows for request, rows in requests}, **update}
    sampling: Literal["all", "fixed"] = "all" if cohort is None else "fixed"
    planned = Cohort(everyone[:drawn], sampling, drawn, len(everyone), simulator.catalogue.n_items)
    charged: dict[str, list[str]] = {}
    for charge in releases(acting, planned):
        charged.setdefault(charge.observer, []).append(f"one {charge.unit}: {charge.event}")
    seen = _sees(acting, planned)
    told = _told_impression(acting, simulator, shared, user, rng.fold("round", 1), update)
    size = -(-sum(map(bits_of, sent.values())) // 8)
    if acting.uplink.facts.skellam or (acting.uplink.facts.helped and acting.uplink.facts.grid):
        size = entries_of(update) * acting.uplink.ring(entries_of(update), drawn).width
    return Inspection(
        called,
        tuple(_part(name, value) for name, value in sent.items()),
        size,
        {who: View(seen[who], tuple(events)) for who, events in charged.items()},
        (
            *(_told_by(request) for request, _ in requests),
            *_given_away(update, acting.uplink),
            *(_read_off(acting, simulator, shared, user, rng.fold("round", 1), update) if told is None else told.says),
        ),
        tuple(request for request, _ in requests),
        take_apart(acting, simulator, shared, user, rng.fold("round", 1), update),
        told,
        assumptions(acting.uplink, drawn),
    )


def _sees(method: Method, cohort: Cohort) -> dict[str, str]:
    """For each observer, what it sees of one client's message."""
    channel = method.uplink
    people = f"the {several(cohort.size, 'person', 'people')} of the round"
    if cohort.sampling == "fixed":
        people = f"{people}, drawn from {cohort.population:,}"
    summed = "the noised sum" if channel.facts.noise_on_sum or channel.facts.skellam else "the sum"
    texts = {
        "server": _server(channel, cohort, people),
        "clients": f"the shared parameters of the next round, computed from {summed} over {people}; no one's message",
        "public": f"the final model alone, computed from every round's {summed.removeprefix('the ')}; no one's message",
    }
    if report_stage(channel) is not None:
        texts["clients"] = f"the shared parameters of the next round, computed from the reports of {people}; not these"
        texts["public"] = "the final model alone, computed from the reports of all rounds; no report"
    if (noise := channel.facts.view_noise) is not None:
        texts["views"] = (
            f"the samples, its own gradient, and the mean over this person's views with noise of {noise.scale:g} in "
            "every number; no other view's features, tower or gradient"
        )
    else:
        texts["views"] = (
            "the samples, and the exact mean over this person's views: who subtracts their own part reads the others'"
        )
    sentences = {name: f"{text[0].upper()}{text[1:]}." for name, text in texts.items()}
    if channel.asks_rows:
        sentences["server"] += " And before that, which rows this device asks for."
    return sentences


def _server(channel: Channel, cohort: Cohort, people: str) -> str:
    facts = channel.facts
    without = ", without the noise, which it adds itself" if facts.noise_on_sum and not facts.helped else ""
    if facts.shuffle is not None:
        among = cohort.size if facts.shuffle.users is None else facts.shuffle.users
        whose = several(among, "person", "people")
        return f"single randomised reports without a sender, among those of {whose}, if the proxy is honest"
    if facts.secret:
        noised = " with the noise that all of them added" if facts.skellam else ""
        if facts.helped:
            noised = f"{' with the noise that the helper added' if facts.noise else ''}, if the helper is honest"
        return f"only the sum over {people}{noised}{without}, and who they are; not this message"
    if facts.reports is not None:
        return f"this message of {several(facts.reports.k, 'randomised bit')}, and whose it is"
    if facts.responses is not None:
        return f"this message of {cohort.items:,} randomised bits, one for each item, and whose it is"
    if report_stage(channel) is not None:
        return "this report, in which interest and click are randomised, and whose it is"
    if facts.noise_on_device:
        return "this message, with the noise that was added on the device, and whose it is"
    return f"this message, every number of it, and whose it is{without}"


def _requests(
    method: Method, simulator: Simulator, shared: Tree, user: int, rng: Rng
) -> Iterator[tuple[Request, Tensor]]:
    """What this client asks for in the first round, table by table, and the row numbers, in 32 bits."""
    alone = np.array([user])
    read = read_requests(method, simulator, shared, alone, rng)
    for _, asked in simulator.requests(method, alone, rng.fold("round", 1)):
        for name, index in asked.items():
            rows, always = index[0][index[0] >= 0].to(torch.int32), read.get(name, [])
            count = int(always[0].own[0]) if always else None
            yield Request(name, len(rows), len(shared[name]), count, tuple(line.as_dict() for line in always)), rows


def _told_by(request: Request) -> str:
    line = f"The device asks for {request.rows:,} of {request.rows_of:,} rows of '{request.table}'"
    if not request.own:
        return f"{line}: the server knows which they are."
    share = f"{request.own:,} are this person's own items, 1 in {request.rows / request.own:.1f}"
    return f"{line}: {share}. Those come back in every request, the others come and go."


def encode(value: Tensor | Rows) -> bytes:
    """A tensor as it is counted: row numbers in 32 bits, numbers as they are, truths as single bits.

    >>> encode(Rows(torch.tensor([2, -1]), torch.tensor([[1.0], [9.0]]), size=3)).hex()
    '020000000000803f'
    >>> encode(torch.tensor([True, False, True])).hex()
    'a0'
    """
    if isinstance(value, Rows):
        real = value.index >= 0
        return value.index[real].to(torch.int32).cpu().numpy().tobytes() + encode(value.value[real])
    array: npt.NDArray[Any] = value.detach().cpu().numpy()
    return np.packbits(array).tobytes() if array.dtype == np.bool_ else array.tobytes()


def _part(name: str, value: Tensor | Rows) -> MessagePart:
    data = encode(value)
    numbers = value.value[value.index >= 0] if isinstance(value, Rows) else value
    rows_of, dtype = value.size if isinstance(value, Rows) else None, str(numbers.dtype).removeprefix("torch.")
    return MessagePart(name, tuple(numbers.shape), dtype, rows_of, len(data), data[:EXCERPT].hex(" ", 4))


def _given_away(update: Update, channel: Channel) -> list[str]:
    """What a message gives away by its form alone, and how its numbers are to be read."""
    facts, lines = channel.facts, []
    if facts.secret:
        lines.append("Behind the secure sum nobody reads this message alone; a simulation just sums it.")
    elif facts.reports:
        entries = "Each report is the number of an entry, drawn without looking at the data, and a randomised bit of it"
        lines.append(f"{entries}{'; the proxy sends them on one by one.' if facts.hides_senders else '.'}")
    elif facts.responses:
        truth = facts.responses.truth
        lines.append(f"Each bit says whether an entry is there, and is true with probability {truth:.3f}.")
    elif report_stage(channel) is None:
        for name, value in update.items():
            if isinstance(value, Rows):
                count = len(torch.unique(value.index[value.index >= 0]))
                lines.append(f"'{name}' names {count:,} of {value.size:,} rows: whoever reads it knows which they are.")
            elif value.ndim and (idle := int((value.reshape(len(value), -1) == 0).all(1).sum())):
                worked = "the others were worked on" if idle < len(value) else "nothing of it was worked on"
                lines.append(f"'{name}' is zero in {idle:,} of {len(value):,} rows: {worked}.")
    if facts.skellam:
        step, noise = facts.skellam.step(entries_of(update)), facts.skellam.deviation(entries_of(update), 1)
        width = channel.ring(entries_of(update), facts.skellam.parties).width
        lines.append(
            f"Its numbers are whole steps of {step:.3g}, with this device's share of the noise, {noise:.3g}. Each is "
            f"sent in {several(width, 'byte')}."
        )
    return [*lines, f"Its numbers are whole steps of {facts.grid.step:.3g}."] if facts.grid else lines


def _read_off(method: Method, simulator: Simulator, shared: Tree, user: int, rng: Rng, sent: Update) -> Iterator[str]:
    """What a gradient of a news encoder tells of a person's history, and what noise does about it."""
    noise = next((stage for stage in method.uplink.stages if isinstance(stage, VectorLaplace)), None)
    if noise is not None:
        entries = entries_of(sent)
        yield (
            f"Each of its {entries:,} numbers has Laplace noise of scale {noise.scale(entries):.3g}; before that, the "
            f"whole gradient is clipped to an ℓ2 norm of {noise.norm:g}."
        )
    table = next((name for name in TABLES if name in shared), None)
    if not isinstance(method, FedRec) or table is None or method.uplink.facts.hides_senders:
        return
    if words := named(method, simulator, shared, user, rng, sent):
        kind = "news" if TABLES[table] == "items" else "words"
        more = f" and {len(words) - NAMED:,} more" if len(words) > NAMED else ""
        yield (
            f"Whoever knows what was shown reads {len(words):,} {kind} of this person's history off the rows that "
            f"are not zero: {', '.join(words[:NAMED])}{more}."
        )


@dataclass(frozen=True)
class ToldImpression:
    """A report on an impression: what the device found, and what it tells."""

    mechanism: str
    epsilon: float
    """ε of the click, and of one news item of the history."""
    history_epsilon: float
    """ε of the whole history; larger where padding hides news."""
    history_delta: float
    """Its δ: 0 but for Gaussian noise."""
    basis: int
    found: tuple[float, ...]
    """The weights that the device found, without noise; of a choice, the number of the basis vector, from 1."""
    told: tuple[float, ...]
    """The same as told."""
    how: str
    """How the interest is randomised, in a few words."""
    click: str | None
    """The news that was clicked; None: none was."""
    pseudo_click: str | None
    negatives: tuple[str, ...]
    shown: int
    """How many news the pseudo-click is drawn from."""
    candidates: bool
    """Whether the server drew these; otherwise they were shown."""
    chance: float
    """The probability that the pseudo-click is the click, where that is one of them."""
    wire_bytes: int
    """The size of the report as devices send it, with its names and shapes."""

    @property
    def says(self) -> tuple[str, ...]:
        """What the message says, in sentences."""
        if self.mechanism == "choice":
            interest = f"It says: of {self.basis} basis vectors, number {self.told[0]:g} fits this person best"
        else:
            weights = " ".join(f"{weight:.2f}" for weight in self.told)
            interest = f"It says: the weights of {self.basis} basis vectors are {weights}"
        delta = f" at δ = {self.history_delta:.4g}" if self.history_delta else ""
        which = "the server drew for everyone" if self.candidates else "were shown"
        click = f"It says: of {self.shown:,} news that {which}, '{self.pseudo_click}' was clicked"
        honest = f"true with probability {self.chance:.3f}, otherwise any other of them"
        if self.candidates:
            honest = f"if the click is one of them, {honest}; if not, any of them"
        was = "was" if len(self.negatives) == 1 else "were"
        others = (
            f"It names {several(len(self.negatives), 'other')} that {was} {'drawn' if self.candidates else 'shown'}"
        )
        about = (
            "It does not tell which impression it is about, nor whether anything in it was clicked."
            if self.candidates
            else "It does tell which impression it is about, and that something in that impression was clicked."
        )
        return (
            f"{interest} ({self.how}; ε = {self.history_epsilon:.4g}{delta} whatever the history is).",
            f"{click} ({honest}; ε = {self.epsilon:g}).",
            f"{others}: taken evenly, and the true click may be among them.",
            f"Nothing else is in it. As devices send it, it takes {self.wire_bytes:,} bytes, whatever the history is.",
            about,
        )


def _told_impression(
    method: Method, simulator: Simulator, shared: Tree, user: int, rng: Rng, sent: Update
) -> ToldImpression | None:
    """What is in this message of a round; None where it is no report on an impression."""
    stage = report_stage(method.uplink)
    if stage is None or not isinstance(method, PrivateRec):
        return None
    about, query, n_items = drawn(method, simulator, shared, user, rng), stage.query, simulator.catalogue.n_items
    history, real = about.history.to(simulator.device), (about.history < n_items).to(simulator.device)
    news = method.vectors(shared, simulator.catalogue, history)
    interest = method.interest(shared, news, real, real & ~about.read.to(simulator.device))
    without, told = exact(query, interest), summable(sent[stage.told])
    count = int((shared["candidates"] >= 0).sum() if method.candidates else (about.shown < n_items).sum())

    def called(item: int) -> str | None:
        return simulator.split.population.item_name(item) if 0 <= item < n_items else None

    clicks = about.shown[about.clicked].tolist()
    first, *others = (called(item) for item in summable(sent["news"]).tolist())
    chosen = stage.mechanism == "choice"
    return ToldImpression(
        stage.mechanism,
        stage.epsilon,
        query.epsilon,
        query.delta,
        stage.basis,
        (int(without.argmax()) + 1,) if chosen else tuple(without.tolist()),
        (int(told) + 1,) if chosen else tuple(told.tolist()),
        _randomisation(query, stage.basis),
        called(clicks[0]) if clicks else None,
        first,
        tuple(name for name in others if name is not None),
        count,
        bool(method.candidates),
        float(truth(stage.epsilon, torch.tensor(count))),
        len(encode_tree(sent)),
    )


def _randomisation(query: Mechanism, basis: int) -> str:
    if isinstance(query, Attention):
        kind = "Laplace noise of scale" if query.noise == "laplace" else "Gaussian noise of deviation"
        return f"{kind} {query.scale:.3g} in each"
    return f"true with probability {float(truth(query.epsilon, torch.tensor(basis))):.3f}, otherwise any other"


@dataclass(frozen=True)
class Report:
    """One report."""

    table: str
    place: tuple[int, ...]
    """The position of the drawn entry in its table."""
    item: str | None
    """As the data calls it; None where the table has no row for each item."""
    title: str | None
    entry: int
    """Its number over all tables, in the order of their names."""
    value: float
    """The entry of the update, as the device computed it."""
    projected: float
    """The value projected on [−1, 1]."""
    chance: float
    """The probability that the bit is 1."""
    bit: int
    plain: str
    """The four bytes, in hexadecimal: twice the entry and the bit, lowest byte first."""
    sealed: str | None
    """The bytes that leave the device behind a proxy."""
    own: bool = False
    """Whether it is about an item that this person trains on."""

    @property
    def binary(self) -> str:
        """The four bytes as the number that they are, highest bit first: 31 bits of entry, and the bit.

        >>> Report("w", (3,), None, None, 3, 0.5, 0.5, 0.7, 1, "07000000", None).binary
        '0000000000000000000000000000011 1'
        """
        bits = f"{int.from_bytes(bytes.fromhex(self.plain), 'little'):032b}"
        return f"{bits[:-1]} {bits[-1]}"


@dataclass(frozen=True)
class Sealed:
    """The same reports on their way through a proxy."""

    epoch: str
    device: str
    """The key that a proxy knows the device by."""
    number: str
    """The number of the message; a repetition has the same."""
    bytes: int
    """The size of the message, signature included."""
    report_bytes: int
    proxy_opened: int
    """How many of the reports open with a key that is not the server's."""
    server_opened: tuple[tuple[int, int], ...]
    """(entry, bit) of each, as the server reads them: in the order of the message, which is random."""


@dataclass(frozen=True)
class ClientReports:
    """All reports of one client in a round."""

    epsilon: float
    k: int
    entries: int
    """How many entries there are to draw from."""
    reports: tuple[Report, ...]
    sealed: Sealed | None
    """None where nothing is shuffled, or PyNaCl is not installed."""
    note: str = ""
    """Why they are not shown sealed, where they should be."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the bits of each report written out."""
        out = asdict(self)
        for line, report in zip(out["reports"], self.reports, strict=True):
            line["binary"] = report.binary
        return out


def take_apart(
    method: Method, simulator: Simulator, shared: Tree, user: int, rng: Rng, sent: Update
) -> ClientReports | None:
    """What is in the message `sent` of this client and round; None where its channel makes no reports of it."""
    channel = method.uplink
    stage = channel.facts.reports
    if stage is None:
        return None
    before: Method = replace(method, uplink=channel.before(stage))  # type: ignore[type-var]
    worked_out = {name: summable(value) for name, value in simulator.message(before, shared, user, rng).items()}
    tables = [(parse_counts_name(name)[0], rows.size) for name, rows in sorted(sent.items())]
    starts = np.cumsum([0, *(size for _, size in tables)])
    pairs, reports = report_numbers(sent), []
    items = set(simulator.split.training(user).tolist())
    for pair in pairs.tolist():
        number = int(np.searchsorted(starts, pair, side="right")) - 1
        table, entry = tables[number][0], (pair - int(starts[number])) // 2
        place = tuple(map(int, np.unravel_index(entry, worked_out[table].shape)))
        value = worked_out[table][place]
        projected = stage.projected(value)
        called = _called(simulator, worked_out[table].shape, place)
        reports.append(
            Report(
                table,
                place,
                *called,
                entry=pair // 2,
                value=float(value),
                projected=float(projected),
                chance=float(stage.chance(projected)),
                bit=pair % 2,
                plain=pair.to_bytes(4, "little").hex(),
                sealed=None,
                own=called[0] is not None and place[0] in items,
            )
        )
    every = ClientReports(stage.epsilon, stage.k, int(starts[-1]) // 2, tuple(reports), None)
    return _sealed(every, pairs) if channel.facts.shuffled else every


def _called(simulator: Simulator, shape: torch.Size, place: tuple[int, ...]) -> tuple[str | None, str | None]:
    """The item that an entry is about, and its title."""
    population = simulator.split.population
    if not place or shape[0] != simulator.catalogue.n_items:
        return None, None
    title = None if population.item_names is None else population.item_name(place[0])
    return population.item_id(place[0]), title


def _sealed(plain: ClientReports, pairs: npt.NDArray[np.int64]) -> ClientReports:
    """The reports as a device would send them, sealed to keys that are generated here and thrown away."""
    try:
        from homebody.federation import envelopes as seals
    except HomebodyError as error:
        return replace(plain, note=f"They are not shown sealed here. {error}")
    public, secret = seals.epoch_keys()
    _, signing = seals.signing_keys()
    reports = seals.seal_reports(pairs, public)
    envelope = seals.Envelope("message", os.urandom(seals.EPOCH_BYTES), os.urandom(16), reports)
    body = seals.sign_envelope(envelope, signing)
    device, arrived = seals.open_envelope(body)
    opened = seals.unseal_reports(arrived.reports, public, secret)
    other_public, others = seals.epoch_keys()
    elsewhere = seals.unseal_reports(arrived.reports, other_public, others)
    size = seals.REPORT_BYTES
    places: dict[int, list[int]] = {}
    for place, pair in enumerate(opened.tolist()):
        places.setdefault(pair, []).append(place)
    shown = []
    for report in plain.reports:
        at = size * places[int.from_bytes(bytes.fromhex(report.plain), "little")].pop()
        shown.append(replace(report, sealed=arrived.reports[at : at + size].hex()))
    names = (arrived.epoch.hex(), device.hex(), arrived.number.hex())
    read = tuple((int(pair) // 2, int(pair) % 2) for pair in opened)
    view = Sealed(*names, len(body), size, int((elsewhere != np.uint32(2**32 - 1)).sum()), read)
    return replace(plain, reports=tuple(shown), sealed=view)
