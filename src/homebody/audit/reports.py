"""One-bit reports, taken apart bit by bit: what a device draws and says, and what is left of it on each hop.

Everything is what the code that runs gives: the message is the simulator's, the values are those of the same client
before `OneBit`, and reports are sealed, signed and opened by `homebody.federation.envelopes`, with keys that nobody
keeps.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from homebody.audit.views import whole
from homebody.core import Method, Tree, Update
from homebody.errors import HomebodyError
from homebody.federation.wire import report_numbers
from homebody.privacy.reports import parse_counts_name
from homebody.rng import Rng
from homebody.simulation import Simulator

__all__ = ["ClientReports", "Report", "Sealed", "take_apart"]


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
        told = asdict(self)
        for line, report in zip(told["reports"], self.reports, strict=True):
            line["binary"] = report.binary
        return told


def take_apart(
    method: Method, simulator: Simulator, shared: Tree, user: int, rng: Rng, sent: Update
) -> ClientReports | None:
    """What is in the message `sent` of this client and round; None where its channel makes no reports of it."""
    channel = method.uplink
    stage = channel.facts.reports
    if stage is None:
        return None
    before: Method = replace(method, uplink=channel.before(stage))  # type: ignore[type-var]
    worked_out = {name: whole(value) for name, value in simulator.message(before, shared, user, rng).items()}
    tables = [(parse_counts_name(name)[0], rows.size) for name, rows in sorted(sent.items())]
    starts = np.cumsum([0, *(size for _, size in tables)])
    pairs, found = report_numbers(sent), []
    own = set(simulator.split.training(user).tolist())
    for pair in pairs.tolist():
        number = int(np.searchsorted(starts, pair, side="right")) - 1
        table, entry = tables[number][0], (pair - int(starts[number])) // 2
        place = tuple(map(int, np.unravel_index(entry, worked_out[table].shape)))
        value = worked_out[table][place]
        projected = stage.projected(value)
        called = _called(simulator, worked_out[table].shape, place)
        found.append(
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
                own=called[0] is not None and place[0] in own,
            )
        )
    every = ClientReports(stage.epsilon, stage.k, int(starts[-1]) // 2, tuple(found), None)
    return _sealed(every, pairs) if channel.facts.shuffled else every


def _called(simulator: Simulator, shape: torch.Size, place: tuple[int, ...]) -> tuple[str | None, str | None]:
    """The item that an entry is about, and its title."""
    population = simulator.split.population
    if not place or shape[0] != simulator.catalogue.n_items:
        return None, None
    title = None if population.item_names is None else population.item_name(place[0])
    return population.item_id(place[0]), title


def _sealed(found: ClientReports, pairs: npt.NDArray[np.int64]) -> ClientReports:
    """The reports as a device would send them, sealed to keys that are generated here and thrown away."""
    try:
        from homebody.federation import envelopes as seals
    except HomebodyError as error:
        return replace(found, note=f"They are not shown sealed here. {error}")
    public, secret = seals.epoch_keys()
    _, signing = seals.signing_keys()
    reports = seals.seal_reports(pairs, public)
    envelope = seals.Envelope("message", os.urandom(seals.EPOCH_BYTES), os.urandom(16), reports)
    body = seals.sign_envelope(envelope, signing)
    device, arrived = seals.open_envelope(body)
    opened = seals.unseal_reports(arrived.reports, public, secret)
    own, others = seals.epoch_keys()
    elsewhere = seals.unseal_reports(arrived.reports, own, others)
    size = seals.REPORT_BYTES
    places: dict[int, list[int]] = {}
    for place, pair in enumerate(opened.tolist()):
        places.setdefault(pair, []).append(place)
    shown = []
    for report in found.reports:
        at = size * places[int.from_bytes(bytes.fromhex(report.plain), "little")].pop()
        shown.append(replace(report, sealed=arrived.reports[at : at + size].hex()))
    view = Sealed(
        arrived.epoch.hex(),
        device.hex(),
        arrived.number.hex(),
        len(body),
        size,
        int((elsewhere != np.uint32(2**32 - 1)).sum()),
        tuple((int(pair) // 2, int(pair) % 2) for pair in opened),
    )
    return replace(found, reports=tuple(shown), sealed=view)
