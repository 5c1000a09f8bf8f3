"""A registered device that answers with anything at all: it is refused, and training goes on with the others.

The runtime, its reader and the training loop are the real ones. The devices are made up: each answer is built from what
its letter asks for, and then changed at random in one of many ways.
"""

from __future__ import annotations

import json
import math
import random
import resource
import struct
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import pytest
import torch

from homebody.core import Rows, Tree
from homebody.database import connect
from homebody.errors import HomebodyError
from homebody.federation import wire
from homebody.federation.server import letters as correspondence
from homebody.federation.server.admin import report
from homebody.federation.server.aggregate import LetterRoute
from homebody.federation.server.monitor import RoundSums, exposition
from homebody.federation.server.plan import ServerPlan
from homebody.federation.server.records import Records
from homebody.federation.server.runtime import Flower
from homebody.federation.task import telemetry
from homebody.recipe import Recipe
from homebody.rng import Rng
from homebody.training import fit

ITEMS = 12
NEVER = 1 << 60


class Clock:
    """Time that passes only where somebody waits."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Reply(NamedTuple):
    message: str
    body: bytes | None
    error: str = ""


class Asked(NamedTuple):
    """A letter, as a device reads it."""

    kind: str
    people: list[int]
    first: int
    shared: str
    digest: str


Change = Callable[["Street", Asked, random.Random], bytes]


class Street:
    """Devices of one person each. Those from `honest` on answer as `change` makes them."""

    def __init__(self, devices: int, honest: int, change: Change, clock: Clock, seed: int = 0) -> None:
        self.clock, self.change, self.honest = clock, change, honest
        self.random = random.Random(seed)
        self.records = Records(connect(None))
        self.records.add_items([(f"i{item}", "") for item in range(ITEMS)])
        for number in range(devices):
            self.records.add_device(f"mark{number}", b"%d" % number, f"device {number}", 1)
        self.devices, self.wanted = devices, dict[str, Mapping[str, wire.Expected]]()
        self.fuzzed, self.earlier = 0, ["0" * 32]
        self.events: Counter[str] = Counter()
        self._waiting: dict[str, tuple[int, str, bytes]] = {}
        self._count = 0

    def register(self, public_key: bytes, name: str) -> None: ...

    def unregister(self, public_key: bytes) -> None: ...

    def nodes(self) -> dict[str, int]:
        return {f"mark{number}": 7 + number for number in range(self.devices)}

    def send(self, letters: Mapping[int, tuple[str, bytes]], deadline: float) -> dict[str, int]:
        sent = {}
        for node, (kind, body) in letters.items():
            self._count += 1
            self._waiting[name := str(self._count)] = (node - 7, kind, body)
            sent[name] = node
        return sent

    def receive(self, messages: Collection[str], wait: float) -> list[Reply]:
        there = [(name, self._waiting.pop(name)) for name in messages if name in self._waiting]
        found = [Reply(name, self._answer(*letter)) for name, letter in there]
        if not found:
            self.clock.sleep(wait)
        return found

    def _answer(self, device: int, kind: str, body: bytes) -> bytes:
        header, _ = wire.decode_letter(body)
        asked = Asked(kind, header.get("people", []), device, header.get("shared", ""), wire.digest(body))
        if device < self.honest:
            return wire.encode_letter(*self.right(asked))
        self.fuzzed += 1
        given = self.change(self, asked, self.random)
        if self.random.random() < 0.01:
            self.earlier = [*self.earlier[-9:], asked.digest]
        return given

    def right(self, asked: Asked) -> tuple[dict[str, Any], dict[str, bytes]]:
        """The answer of a device that does as it should."""
        header = {"to": asked.digest, "people": [0], "items": ITEMS, "holds": [asked.shared] if asked.shared else []}
        if asked.kind.startswith("query"):
            return header, {}
        wanted = self.wanted[asked.kind]
        return header | {"declined": []}, {str(number): wire.encode_tree(update(wanted)) for number in asked.people}

    def log(self, event: str, **facts: Any) -> None:
        json.dumps(facts)
        self.events[event] += 1

    def train(self, recipe: Recipe, rounds: int, **more: Any) -> Any:
        plan = ServerPlan(recipe, quorum=0.01, least=self.honest, run="0123456789abcdef", **more)
        runtime = Flower(self, self.records, plan, log=self.log)
        method = plan.method()
        shared = method.init_shared(runtime.catalogue, Rng.of(0))
        self.wanted = {"train": wire.expected(method, shared, runtime.catalogue)}
        if recipe.every(method):
            self.wanted["evaluate"] = telemetry(method, recipe.measured())
        return fit(
            method,
            runtime,
            rounds=rounds,
            evaluate_every=recipe.every(method),
            ledger=self.records.ledger(),
            checkpoints=self.records,
            on_round=self.records.add_round,
        )


def update(wanted: Mapping[str, wire.Expected]) -> Tree:
    """A small one, of the names, shapes and kinds that are asked for."""
    tree: Tree = {}
    for name, (shape, size, kind) in wanted.items():
        value = torch.full(shape if size is None else (1, *shape), 0.01).to(kind)
        tree[name] = value if size is None else Rows(torch.tensor([size - 1]), value, size)
    return tree


def junk(rng: random.Random, depth: int = 0) -> Any:
    """Any value that JSON can hold."""
    kind = rng.randrange(14 if depth < 4 else 10)
    if kind == 10:
        return [junk(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 11:
        return {str(junk(rng, 9)): junk(rng, depth + 1) for _ in range(rng.randrange(4))}
    if kind == 12:
        return [[junk(rng, depth + 1)]]
    if kind == 13:
        nested: Any = 1
        for _ in range(rng.choice((5, 20)) if rng.random() < 0.95 else rng.choice((300, 3000))):
            nested = [nested]
        return nested
    scalars = (
        None, True, False, rng.randrange(-3, 40), rng.choice((2**31, 2**63, -(2**63), 10**300)), rng.random(),
        rng.choice((1e308, -0.0, 5e-324)), "", rng.choice(("\ud800", "\0", "٣", "²", "item", "<f4", "shared")),
        "x" * rng.choice((1, 65, 501, 3000)),
    )  # fmt: skip
    return scalars[kind]


def sealed(header: Any, parts: Mapping[str, bytes], sizes: Any = None) -> bytes:
    """As `wire.encode_letter`, whatever is in it."""
    said = {"header": header, "parts": {name: len(part) for name, part in parts.items()} if sizes is None else sizes}
    text = written(said)
    return b"".join([struct.pack("<2sHI", b"HB", wire.VERSION, len(text)), text, *parts.values()])


def written(said: Any) -> bytes:
    try:
        return json.dumps(said).encode()
    except RecursionError:
        return b'{"header":' + b"[" * 100_000 + b"]" * 100_000 + b',"parts":{}}'


def other_bytes(street: Street, asked: Asked, rng: random.Random) -> bytes:
    """A right answer, with some bytes changed, cut off, put in or said twice."""
    body = bytearray(wire.encode_letter(*street.right(asked)))
    for _ in range(rng.choice((1, 1, 2, 8))):
        at, what = rng.randrange(len(body) + 1), rng.randrange(6)
        if what == 0 and at < len(body):
            body[at] = rng.randrange(256)
        elif what == 1:
            del body[at:]
        elif what == 2:
            body[at:at] = rng.randbytes(rng.choice((1, 8, 100)))
        elif what == 3:
            del body[at : at + rng.randrange(1, 20)]
        elif what == 4:
            body[at:at] = body[at : at + 50]
        else:
            body[:8] = struct.pack(
                "<2sHI", rng.choice((b"HB", b"BH")), rng.choice((0, 1, 2, 65535)), rng.getrandbits(32)
            )
    return bytes(body)


def other_header(street: Street, asked: Asked, rng: random.Random) -> bytes:
    """One or several fields of another type, range or length, left out, or said twice."""
    header, parts = street.right(asked)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        name = rng.choice(("to", "people", "items", "holds", "declined", "refused", "lacks", str(junk(rng, 9))))
        what = rng.randrange(7)
        if what == 0:
            header.pop(name, None)
        elif what == 1:
            header["to"] = rng.choice(street.earlier)
        elif what == 2:
            header[name] = [rng.randrange(-2, 80) for _ in range(rng.choice((1, 2, 5, 500)))]
        elif what == 3:
            header[name] = [[rng.choice(asked.people or [1])]]
        elif what == 4:
            header[name] = [rng.choice(asked.people or [0])] * 2
        else:
            header[name] = junk(rng)
    if rng.random() < 0.2:
        parts = {}
    if rng.random() < 0.1:
        twice = rng.choice((b'"items": NaN, "people"', b'"items": 1, "people"', b'"to": 1e999, "x"'))
        text = written({"header": header, "parts": {name: len(part) for name, part in parts.items()}})
        text = text.replace(b'"people"', twice)
        return b"".join([struct.pack("<2sHI", b"HB", wire.VERSION, len(text)), text, *parts.values()])
    return sealed(rng.choice((header, header, header, junk(rng))) if rng.random() < 0.05 else header, parts)


def other_parts(street: Street, asked: Asked, rng: random.Random) -> bytes:
    """Parts of others, of nobody, of the same person twice, of other lengths than they say; and too many."""
    header, parts = street.right(asked)
    one = next(iter(parts.values()), wire.encode_tree({}))
    what = rng.randrange(8)
    if what == 0:
        parts = {str(rng.randrange(-2, street.devices + 5)): one}
    elif what == 1:
        name = str(asked.people[0]) if asked.people else "0"
        parts = {name: one, rng.choice((f"0{name}", f" {name}", f"{name}.0", f"+{name}", "٣", f"{name}\0")): one}
    elif what == 2:
        parts = {str(number): b"" for number in range(rng.choice((1, 5, 50)) if rng.random() < 0.95 else 2000)}
    elif what == 3:
        return sealed(header, parts, {name: junk(rng) for name in parts})
    elif what == 4:
        return sealed(
            header, parts, {name: len(part) + rng.choice((-1, 1, 2**40, -(2**40))) for name, part in parts.items()}
        )
    elif what == 5:
        return sealed(header, parts, junk(rng))
    elif what == 6:
        parts = {name: part + bytes(rng.choice((1, 1000, 1 << 16))) for name, part in parts.items()}
    else:
        parts = {name: rng.randbytes(rng.choice((0, 1, 8, 200))) for name in parts} | {str(junk(rng, 9)): one}
    return sealed(header, parts)


def other_tree(street: Street, asked: Asked, rng: random.Random) -> bytes:
    """An update of other names, shapes, kinds, rows or numbers; or a list of tensors that is none."""
    header, parts = street.right(asked)
    if asked.kind.startswith("query"):
        return sealed(header, {"0": wire.encode_tree({"w": torch.ones(2)})})
    for name in parts:
        tree = update(street.wanted[asked.kind])
        for _ in range(rng.choice((1, 1, 2))):
            tensor = rng.choice(list(tree) or ["w"])
            tree[tensor] = other_tensor(tree.get(tensor, torch.ones(1)), rng)
            if (what := rng.randrange(8)) == 0:
                del tree[tensor]
            elif what == 1:
                tree[rng.choice(("w", "item", "", "x" * 300, "a[1]", "\0"))] = torch.ones(1)
        packed = wire.encode_tree(tree)
        if rng.random() < 0.4:
            packed = other_head(packed, rng)
        parts[name] = packed
    return sealed(header, parts)


def other_tensor(value: Any, rng: random.Random) -> Any:
    numbers = value.value if isinstance(value, Rows) else value
    what = rng.randrange(8)
    if what < 3 and numbers.numel():
        numbers = numbers.to(torch.float32 if what else numbers.dtype).clone()
        extreme = rng.choice((math.nan, math.inf, -math.inf, 1e9, -1e30, 3e38, 1.01, 1e-45, 127))
        if not numbers.is_floating_point():
            extreme = rng.choice((2**63 - 1, -(2**63))) if numbers.dtype == torch.int64 else 1
        numbers.view(-1)[rng.randrange(numbers.numel())] = extreme
    elif what == 3:
        kinds = (torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool)
        numbers = torch.nan_to_num(numbers.to(torch.float32)).clamp(-100, 100).to(rng.choice(kinds))
    elif what == 4:
        numbers = numbers[..., None] if rng.random() < 0.5 else numbers[None] if numbers is value else numbers[..., 1:]
    elif what == 5:
        numbers = torch.zeros((*numbers.shape[:-1], 0)) if numbers.dim() else torch.zeros(0)
    if not isinstance(value, Rows):
        return numbers if what < 6 else Rows(torch.tensor([0]), torch.ones(1, 1), 1)
    index = value.index
    if what == 6:
        index = torch.tensor([rng.choice((0, value.size, 2**31 - 1))])
    elif what == 7:
        count = 70_000 if rng.random() < 0.02 else rng.choice((0, 2, 5))
        return Rows(torch.zeros(count, dtype=torch.int64), torch.ones(count, *numbers.shape[1:]), value.size)
    if len(index) != len(numbers):
        index = torch.zeros(len(numbers), dtype=torch.int64)
    return Rows(index, numbers, value.size + rng.choice((0, 0, 0, 1, -1)))


def other_head(packed: bytes, rng: random.Random) -> bytes:
    """Other kinds and shapes than there are bytes for."""
    header, parts = wire.decode_letter(packed)
    head = header["tree"]
    entry = rng.choice(head) if head else []
    what = rng.randrange(6)
    if what == 0 and entry:
        entry[rng.randrange(len(entry))] = junk(rng)
    elif what == 1 and entry:
        entry[-1] = [rng.choice(("<f4", "<i4", "|b1", "<f8", ">f4", "O", junk(rng))), junk(rng)]
    elif what == 2 and entry:
        entry[-1] = ["<f4", [rng.choice((-1, 0, 2**31, 2**62, 1)) for _ in range(rng.randrange(12))]]
    elif what == 3:
        head = head * rng.choice((2, 300))
    elif what == 4:
        head = junk(rng)
    else:
        return sealed({"tree": head}, {name: part[: rng.randrange(len(part) + 1)] for name, part in parts.items()})
    return sealed({"tree": head}, parts)


CHANGES: tuple[Change, ...] = (other_bytes, other_header, other_parts, other_tree)


def anything(street: Street, asked: Asked, rng: random.Random) -> bytes:
    """Most of the time something is wrong; sometimes nothing is."""
    if asked.kind == "query.hello" and rng.random() < 0.5:
        return wire.encode_letter(*street.right(asked))  # or it would be asked for nothing but greetings
    return (
        rng.choice((*CHANGES, other_header, other_tree))(street, asked, rng)
        if rng.random() < 0.97
        else wire.encode_letter(*street.right(asked))
    )


FEDMF = Recipe("fedmf", "devices", {"factors": 2}, evaluate_every=10, stages=["clip:norm=1"])
ONE_BIT = Recipe("fedmf", "devices", {"factors": 2}, evaluate_every=0, stages=["one-bit:epsilon=1,k=3"])
GAUSSIAN = Recipe("fedmf", "devices", {"factors": 2}, evaluate_every=10, stages=["clip:norm=1", "gaussian:z=1"])
LAPLACE = Recipe("fedmf", "devices", {"factors": 2}, evaluate_every=10, stages=["clip:norm=1,order=1", "laplace:b=1"])
RECIPES = {"clipped": FEDMF, "one-bit": ONE_BIT, "gaussian": GAUSSIAN, "laplace": LAPLACE}
PLAIN = Recipe("fedials", "devices", {"factors": 2}, evaluate_every=0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("homebody.federation.server.runtime.time", made)
    monkeypatch.setattr("homebody.federation.server.letters.time", made)
    return made


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is refused is asked again at once: otherwise few answers would be looked at."""
    monkeypatch.setattr(correspondence, "REST_SECONDS", 0.0)
    monkeypatch.setattr(correspondence, "GREET_SECONDS", 0.0)


def fuzz(clock: Clock, recipe: Recipe, answers: int, devices: int, seed: int) -> tuple[Street, Any]:
    street = Street(devices, honest=4, change=anything, clock=clock, seed=seed)
    fitted: Any = None
    rounds = 0
    while street.fuzzed < answers:
        rounds += max(3, (answers - street.fuzzed) // devices)
        fitted = street.train(recipe, rounds, most_faults=NEVER)
    assert all(bool(torch.isfinite(value).all()) for value in fitted.shared.values())
    return street, fitted


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_no_answer_ends_the_trainer(clock: Clock, restless: None, recipe: Recipe) -> None:
    street, _ = fuzz(clock, recipe, answers=1000, devices=100, seed=1)
    refused = {name: count for name, count in street.records.counters().items() if name.startswith("refused: ")}
    assert len(refused) > 15
    assert sum(refused.values()) > 500
    assert street.events["refused"] == sum(refused.values())


@pytest.mark.attack
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_million_answers_end_no_trainer(clock: Clock, restless: None, recipe: Recipe, campaign: Any) -> None:
    """A quarter for each kind of update."""
    answers = campaign.size(250_000)
    fuzz(clock, recipe, answers=max(1000, answers // 20), devices=500, seed=2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    street, _ = fuzz(clock, recipe, answers=answers, devices=500, seed=3)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    counted = street.records.counters()
    refused = sum(count for name, count in counted.items() if name.startswith("refused: "))
    rounds = len(street.records.ledger().entries()) // 3
    campaign.did(
        "answers to a trainer", street.fuzzed, refused=refused, crashes=0, charged=rounds, grown_mb=round(grown)
    )
    assert grown < 150, f"the process grew by {grown:.0f} MB over {street.fuzzed:,} answers"


def always(**facts: Any) -> Change:
    """A right answer to a round, with these facts in its header."""

    def change(street: Street, asked: Asked, rng: random.Random) -> bytes:
        header, parts = street.right(asked)
        return wire.encode_letter({**header, **facts} if asked.kind == "train" else header, parts)

    return change


def tree_of(make: Callable[[Mapping[str, wire.Expected]], Tree]) -> Change:
    def change(street: Street, asked: Asked, rng: random.Random) -> bytes:
        header, parts = street.right(asked)
        return wire.encode_letter(header, {name: wire.encode_tree(make(street.wanted[asked.kind])) for name in parts})

    return change


@pytest.mark.parametrize("declined", [[[1]], [{}], [None, [2]], {"4": []}, [[[[]]]]])
def test_a_list_where_a_number_should_be_is_refused(clock: Clock, declined: Any) -> None:
    street = Street(5, honest=4, change=always(declined=declined), clock=clock)
    street.train(FEDMF, rounds=3)
    assert [line for line in street.records.counters() if line.startswith("refused: The answer declines for")]


def test_rows_that_come_several_times_add_up(clock: Clock) -> None:
    """A clip merges them and leaves padding behind, which is no row."""

    def twice(wanted: Mapping[str, wire.Expected]) -> Tree:
        shape, size, kind = wanted["item"]
        assert size is not None
        return {"item": Rows(torch.tensor([2, 2, 3]), torch.full((3, *shape), 0.1).to(kind), size)}

    street = Street(5, honest=4, change=tree_of(twice), clock=clock)
    street.train(Recipe("fedmf", "devices", {"factors": 2}, evaluate_every=0, stages=["clip:norm=1"]), rounds=2)
    assert not street.events["refused"]


def test_who_breaks_the_servers_step_is_left_out_of_the_next_attempt(clock: Clock) -> None:
    """Numbers that are all allowed, and make a system of equations that has no solution."""

    def singular(wanted: Mapping[str, wire.Expected]) -> Tree:
        tree = update(wanted)
        tree["gram"] = torch.full_like(tree["gram"], 1e9)
        return tree

    street = Street(5, honest=4, change=tree_of(singular), clock=clock)
    fitted = street.train(PLAIN, rounds=3)
    assert all(bool(torch.isfinite(value).all()) for value in fitted.shared.values())
    counted = street.records.counters()
    assert counted["refused: it spoiled a round"] == counted["rounds_abandoned"] == 1
    assert [one.faults for one in street.records.devices()] == [0, 0, 0, 0, 1]


def test_a_device_that_keeps_breaking_is_set_aside_until_the_operator_readmits_it(clock: Clock) -> None:
    street = Street(5, honest=4, change=always(people=[[0]]), clock=clock)
    plan = ServerPlan(FEDMF, run="0123456789abcdef", most_faults=3, least=4, quorum=0.5)

    def looks(times: int) -> Flower:
        runtime = Flower(street, street.records, plan, log=street.log)
        method = plan.method()
        runtime.begin(method, Rng.of(0))
        shared = method.init_shared(runtime.catalogue, Rng.of(0))
        street.wanted = {"train": wire.expected(method, shared, runtime.catalogue)}
        for number in range(times):
            runtime.available()
            clock.sleep(100_000)
            everyone = runtime.available()
            task = runtime._task("train", number, Rng.of(0))
            plain = LetterRoute(street.wanted["train"], (1e9, None), method.uplink.bounded)
            runtime._ask(method, shared, task, everyone.tolist(), plain)
        return runtime

    looks(1)
    looks(1)  # what is counted outlives the process
    assert (street.records.devices()[4].faults, street.records.devices()[4].set_aside) == (2, None)
    runtime = looks(1)
    device = street.records.devices()[4]
    assert device.faults == 3
    assert device.set_aside is not None
    assert street.events["set aside"] == 1
    assert runtime.available().tolist() == [0, 1, 2, 3]
    asked = street.fuzzed
    clock.sleep(100_000)
    assert looks(2).available().tolist() == [0, 1, 2, 3]
    assert street.fuzzed == asked, "It is not even greeted."
    found = report(plan, street.records)
    assert [one["set_aside"] is not None for one in found["devices"]] == [False] * 4 + [True]
    assert "homebody_devices_aside 1\n" in exposition(RoundSums(street.records))
    assert "homebody_devices 4\n" in exposition(RoundSums(street.records))
    with pytest.raises(HomebodyError, match="is not set aside"):
        street.records.readmit_device("device 0")
    street.records.readmit_device("device 4")
    street.change = lambda one, letter, rng: wire.encode_letter(*one.right(letter))
    assert runtime.available().tolist() in ([0, 1, 2, 3], [0, 1, 2, 3, 4])
    assert looks(1).available().tolist() == [0, 1, 2, 3, 4]
    assert street.records.devices()[4].faults == 0


def test_a_device_of_another_version_is_refused_and_not_set_aside(clock: Clock) -> None:
    def older(street: Street, asked: Asked, rng: random.Random) -> bytes:
        body = wire.encode_letter(*street.right(asked))
        return body[:2] + struct.pack("<H", wire.VERSION + 1) + body[4:]

    street = Street(5, honest=4, change=older, clock=clock)
    for _ in range(20):
        street.train(FEDMF, rounds=1)
    assert street.records.counters()["refused: another wire version"] == 20
    assert street.records.devices()[4].faults == 0


def test_an_answer_counts_for_its_own_letter_round_and_device_alone(clock: Clock) -> None:
    """The same bytes again: in a later round, of the same letter, and by another device."""
    heard: dict[str, list[bytes]] = {"train": [], "evaluate": [], "query.hello": []}
    used: Counter[str] = Counter()

    def replay(street: Street, asked: Asked, rng: random.Random) -> bytes:
        own = wire.encode_letter(*street.right(asked))
        known = heard.setdefault(asked.kind, [])
        known.append(own)
        if len(known) > 1 and asked.kind == "train":
            used["again"] += 1
            return known[rng.randrange(len(known) - 1)]
        return own

    street = Street(8, honest=4, change=replay, clock=clock)
    street.train(Recipe("fedmf", "devices", {"factors": 2}, evaluate_every=0), rounds=4)
    counted = street.records.counters()
    assert used["again"] == counted["refused: an answer to another letter"] >= 3
    # Of the four, one says something of its own in the first round; what it says there counts nowhere else.
    assert [line["clients"] for line in street.records.rounds()] == [5, 4, 4, 4]
