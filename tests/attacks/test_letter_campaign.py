"""A million mutated letters to a real device with a real home.

Whatever a letter says, the device answers with a letter of its own: it never dies, never names a person or a folder,
never charges for what it refuses, and its ledgers stay whole.
"""

from __future__ import annotations

import json
import resource
import struct
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.attacks.conftest import Campaign

from homebody.core import Catalogue, Rows, Tree
from homebody.federation import wire
from homebody.federation.device.device import Device
from homebody.federation.device.home import Home
from homebody.methods import find
from homebody.rng import Rng

METHODS: dict[str, dict[str, Any]] = {
    "fedmf": {"factors": 3},
    "pfedrec": {"factors": 3},
    "fedials": {"factors": 3},
    "fcf": {"factors": 3},
    "fedrecon": {"factors": 3},
    "fedncf": {"factors": 3, "hidden": "3"},
    "fedgnn": {"factors": 3},
    "dplcf": {},
    "private-popularity": {},
    "fmf-ldp": {"factors": 3},
}
STAGES: list[list[str]] = [[], ["clip:norm=1,order=1", "laplace:b=1"], ["clip:norm=1"], ["ask-rows"]]
ITEMS = [(f"secret-item-{n}", f"Secret title {n}") for n in range(12)]
PEOPLE = {"ann-of-green": (0, 1, 2, 3, 4), "bob-the-builder": (5, 6, 7), "cleo-patra": (2, 8, 11, 10)}
PRIVATE = [name.encode() for name in PEOPLE]
JUNK: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 7, 40, 2**31, 2**53, 2**62, 2**63, -(2**63), 2**64, 10**30, 0.5, -0.0, 1e308),
    *(
        "",
        "a",
        "train/1",
        "../../etc/passwd",
        "x" * 600,
        "\u0000",
        "\ud7ff",
        "𝔘",
        "fedmf",
        "1,2",
        "nan",
        "; DROP TABLE",
    ),
    *([], [[]], [1], ["1"], [None], [-1], [2**70], {}, {"a": 1}, {"": {}}, [[[[[[]]]]]], list(range(300))),
]
PARTS = 8
"""Of the campaign, each with a seed of its own: workers of pytest-xdist can share them."""
AGAIN = 5_000
"""Letters to one home: what letters may add to it must not slow the rest down."""


class Letters:
    """Letters that begin as a server writes them, and then go wrong on every layer."""

    def __init__(self, seed: int, methods: Sequence[str]) -> None:
        self.rng, self._methods = np.random.default_rng(seed), methods
        self._last = b""
        self._begun: dict[tuple[str, int], Tree] = {}
        """Shared parameters as methods begin with them, for each number of items."""

    def any(self, options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def one(self) -> bytes:
        header, parts = self.whole()
        for _ in range(int(self.rng.integers(0, 4))):
            if self.chance(0.6):
                self._spoil_header(header)
            else:
                self._spoil_parts(header, parts)
        try:
            body = wire.encode_letter(header, parts)
        except (wire.Malformed, ValueError, UnicodeError, RecursionError):
            body = self._last
        if self.chance(0.25):
            body = self.bytes(body)
        elif self.chance(0.1):
            body = self._by_hand(header, parts)
        self._last = body
        return body

    def whole(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """A letter that is well-formed."""
        name = self.any(self._methods)
        items = int(self.any([12, 12, 12, 11, 2]))
        shared = self._shared(name, items)
        parts = {"items": json.dumps([0, ITEMS[:items]]).encode(), "shared": wire.encode_tree(shared)}
        header = {
            "run": self.any(["feedbeef00", "feedbeef01"]),
            "method": name,
            "fields": dict(METHODS[name]),
            "stages": list(self.any(STAGES)),
            "seed": 1,
            "protocol": self.any(["strict", "published", "isolated"]),
            "held_out": None,
            "negatives": 5,
            "cutoffs": [3],
            "measures": self.chance(0.5),
            "do": self.any(["hello", "train", "train", "evaluate", "adapt"]),
            "release": f"train/{self.rng.integers(1, 4)}",
            "step": int(self.rng.integers(1, 4)),
            "key": int(self.rng.integers(1, 50)),
            "clients_key": 5,
            "keep": None,
            "n_items": items,
            "half": self.chance(0.2),
            "first": 40,
            "people": list(range(40, 40 + int(self.rng.integers(0, 4)))),
            "shared": wire.digest(parts["shared"]),
        }
        return header, parts

    def _shared(self, name: str, items: int) -> Tree:
        if (name, items) not in self._begun:
            method = find(name)(**METHODS[name])
            self._begun[name, items] = dict(method.init_shared(Catalogue(items), Rng.of(0)))
        shared = dict(self._begun[name, items])
        if self.chance(0.3):  # numbers that a method may choke on, of the right shape
            fill = self.any([0.0, 1e-30, 1e30, 3e38, float("nan"), float("inf"), -1.0])
            which = self.any(list(shared)) if shared else None
            if which is not None and shared[which].is_floating_point():
                shared[which] = torch.full_like(shared[which], fill)
        return shared

    def _spoil_header(self, header: dict[str, Any]) -> None:
        if not header:
            return
        name, kind = self.any(list(header)), self.rng.integers(6)
        if kind == 0:
            del header[name]
        elif kind == 1:
            header[self.any(list(header))] = header[name]
        elif kind == 2:
            header["fields"] = {**_mapping(header.get("fields")), self.any(_FIELDS): self.any(JUNK)}
        elif kind == 3:
            header["stages"] = [self.any(_STAGE_WORDS) for _ in range(int(self.rng.integers(0, 4)))]
        elif kind == 4:
            header["epoch"] = self.any([{}, dict.fromkeys(("epoch", "key", "shared"), "ab" * 16), *JUNK])
        else:
            header[name] = self.any(JUNK)

    def _spoil_parts(self, header: dict[str, Any], parts: dict[str, bytes]) -> None:
        name = self.any(["items", "shared", "shared", "features", "other"])
        content, kind = parts.get(name, b""), self.rng.integers(6)
        if kind == 0:
            parts.pop(name, None)
        elif kind == 1:
            parts[name] = self.bytes(content)
        elif kind == 2 and name == "items":
            first, some = self.any([0, 1, 12, 13, -1, 10**9, "0", None]), self.any([ITEMS, ITEMS[::-1], [["a"]], JUNK])
            parts[name] = json.dumps([first, some]).encode()
        elif kind == 3:
            parts[name] = self.rng.bytes(int(self.rng.integers(0, 80)))
        else:
            parts[name] = wire.encode_tree(self._tree())
        if self.chance(0.7) and name in ("shared", "features"):
            header[name] = wire.digest(parts.get(name, b""))

    def _tree(self) -> Tree:
        tree: Tree = {}
        for _ in range(int(self.rng.integers(0, 4))):
            shape = [int(side) for side in self.rng.integers(0, 14, int(self.rng.integers(0, 4)))]
            value = torch.tensor(self.rng.normal(size=shape)).to(self.any([torch.float32, torch.int64, torch.float16]))
            name = self.any(["item", "user", "score", "weight", "bias", "item/0", "x", ""])
            if shape and self.chance(0.2):
                value = Rows(torch.arange(len(value)), value, len(value) + 1)  # type: ignore[assignment]
            tree[name] = value
        return tree

    def bytes(self, body: bytes) -> bytes:
        for _ in range(int(self.rng.integers(1, 4))):
            at, kind = int(self.rng.integers(0, max(1, min(len(body), 1500)))), self.rng.integers(6)
            if kind == 0:
                body = body[:at] + self.rng.bytes(1) + body[at + 1 :]
            elif kind == 1:
                body = body[:at]
            elif kind == 2:
                body = body[:at] + self.rng.bytes(int(self.rng.integers(1, 20))) + body[at:]
            elif kind == 3:
                body = body[:at] + self._last[at : at + 400] + body[at:]
            elif kind == 4:
                body = (
                    body[:at] + bytes([(body[at] if body else 0) ^ (1 << int(self.rng.integers(8)))]) + body[at + 1 :]
                )
            else:
                body = body + body[: int(self.rng.integers(0, 40))]
        return body

    def _by_hand(self, header: dict[str, Any], parts: dict[str, bytes]) -> bytes:
        """A head whose lengths may lie about what follows."""
        lengths = {name: len(part) + int(self.any([0, 0, 0, 1, -1, 2**31])) for name, part in parts.items()}
        text = json.dumps({"header": header, "parts": lengths}).encode()
        size = len(text) + int(self.any([0, 0, 0, 1, -1, 2**20]))
        head = struct.pack("<2sHI", b"HB", int(self.any([1, 1, 1, 0, 2])), max(0, size))
        return head + text + b"".join(parts.values())


_FIELDS = ["factors", "hidden", "lr", "epochs", "steps", "alpha", "reg", "k", "epsilon", "uplink", "nosuch", ""]
_STAGE_WORDS: list[Any] = [
    *("clip:norm=1", "clip:norm=0", "clip:norm=nan", "clip:norm=1e308", "laplace:b=1", "laplace:b=-1", "gaussian:z=1"),
    *("secure-sum", "shuffle", "ask-rows", "one-bit:epsilon=1", "one-bit:epsilon=1,k=2", "nosuch", "clip", ":", "", 5),
]


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def furnished(folder: Path) -> Home:
    home = Home.create(folder, server="127.0.0.1:9092")
    for name, items in PEOPLE.items():
        person = home.people.add(name)
        for when, item in enumerate(items):
            home.history.append(person, ITEMS[item][0], time=when)
    return home


def check(home: Home, folder: Path, letter: bytes, said: bytes, outcomes: Counter[str]) -> None:
    """What must hold of any answer."""
    header, parts = wire.decode_letter(said)
    assert header["to"] == wire.digest(letter)
    assert not any(name in said for name in PRIVATE), said[:500]
    assert str(folder).encode() not in said
    assert len(json.dumps(header)) < 5000
    if "refused" in header:
        assert not parts
        assert "\n" not in header["refused"]
        cannot = header["refused"] == "The device cannot answer this now."
        outcomes["accident" if cannot else "refused"] += 1
    elif "lacks" in header:
        outcomes["lacking"] += 1
    elif "declined" in header:
        outcomes["declined"] += bool(header["declined"])
        outcomes["answered"] += bool(parts)
        outcomes["nobody_asked"] += not (parts or header["declined"])
    else:
        outcomes["greeted"] += 1


def entries(home: Home) -> int:
    return sum(len(home.ledger(slot).entries()) for slot in range(len(PEOPLE)))


def run(folder: Path, count: int, seed: int, methods: Sequence[str]) -> tuple[Counter[str], Counter[str]]:
    """Send so many letters; how they were answered, and the kinds of accidents that the device noted."""
    letters, outcomes, accidents = Letters(seed, methods), Counter[str](), Counter[str]()

    def note(event: str, **facts: Any) -> None:
        if event == "failed":
            accidents[facts["reason"].split(".")[0][:60]] += 1

    for start in range(0, count, AGAIN):
        here = folder / f"device{start}"
        with ExitStack() as stack:
            home = stack.enter_context(furnished(here))
            device = Device(home, note, sleep=lambda seconds: True)  # nobody looks at the clock
            for number in range(min(AGAIN, count - start)):
                letter = letters.one()
                watched = number % 50 == 0
                before = entries(home) if watched else 0
                said = device.answer(letter)
                was = outcomes.copy() if watched else None
                check(home, here, letter, said, outcomes)
                if was is not None and outcomes["refused"] + outcomes["lacking"] > was["refused"] + was["lacking"]:
                    assert entries(home) == before, "Nothing is charged for what is refused."
            for slot in range(len(PEOPLE)):
                home.ledger(slot).verify()
                names = [(entry.release, entry.observer, entry.unit) for entry in home.ledger(slot).entries()]
                assert len(set(names)) == len(names)
    return outcomes, accidents


def test_a_few_letters(fast_folder: Path) -> None:
    outcomes, accidents = run(fast_folder, 500, seed=3, methods=["fcf"])
    assert outcomes["refused"] > 100
    assert outcomes["answered"] > 10
    assert not accidents


@pytest.mark.attack
@pytest.mark.parametrize("part", range(PARTS))
def test_a_million_letters(fast_folder: Path, campaign: Campaign, part: int) -> None:
    count = campaign.size(1_000_000 // PARTS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes, accidents = run(fast_folder, count, seed=17 + part, methods=list(METHODS))
    campaign.did(f"letters to a device, part {part + 1} of {PARTS}", count, **outcomes)
    assert not accidents, accidents.most_common(20)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 1024, f"The device's memory grew by {grown:.0f} MB."
