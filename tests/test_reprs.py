"""What is shown of a thing that somebody types the name of, in a shell and in a notebook."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import homebody as hb
from homebody.markup import html
from homebody.privacy import Budget, Charge, Clip, Gaussian, GaussianRelease, NonPrivate, SecureSum, Skellam, specs
from homebody.testing import impressed
from homebody.training import fit

POPULATION = hb.load("synthetic:users=200,items=100,mean=12")
SPLIT = hb.leave_one_out(POPULATION)
CHARGES = [
    Charge("server", "user", NonPrivate("plain updates")),
    Charge("public", "user", GaussianRelease(4, "replace-one")),
]


def charged() -> hb.Ledger:
    ledger = hb.Ledger()
    for number in range(200):
        ledger.charge(f"train/{number}", CHARGES)
    return ledger


THINGS: dict[str, tuple[Any, str]] = {
    "population": (POPULATION, "200 users, 100 items"),
    "impressions": (impressed().population, "impressions"),
    "split": (SPLIT, "200 people learn from"),
    "split of impressions": (impressed(), "impressions shown"),
    "channel": (hb.Channel(Clip(1.0), Gaussian(z=2)), "Channel(Clip(norm=1.0), Gaussian(z=2))"),
    "asking channel": (hb.Channel(asks_rows=True), "Channel(asks_rows=True)"),
    "ledger": (charged(), "400 charges for 200 releases"),
    "budget": (Budget(8.0), "epsilon=8.0"),
    "charge": (CHARGES[1], "to public, about one user: Gaussian noise"),
    "simulator": (hb.Simulator(SPLIT), "200 clients"),
    "catalogue": (impressed().catalogue(), "items"),
    "trained": (fit(hb.FedMF(factors=4), hb.Simulator(SPLIT), rounds=1), "round 1: valid/hr@5"),
    "method": (hb.FedMF(), "FedMF(uplink=Channel()"),
}


@pytest.mark.parametrize("name", THINGS)
def test_a_repr_is_one_short_line(name: str) -> None:
    thing, text = THINGS[name]
    shown = repr(thing)
    assert text in shown
    assert len(shown) < 400
    assert "\n" not in shown


@pytest.mark.parametrize("name", ["population", "split", "split of impressions", "channel", "ledger", "budget"])
def test_a_notebook_shows_a_small_table(name: str) -> None:
    page = THINGS[name][0]._repr_html_()
    assert page.startswith("<div>")
    assert page.endswith("</div>")
    assert len(page) < 5_000
    assert "<script" not in page


def test_a_channel_is_written_as_it_is_typed() -> None:
    channel = hb.Channel(Clip(0.5), Skellam(z=1.5), SecureSum())
    read = eval(repr(channel), {"Channel": hb.Channel, "Clip": Clip, "Skellam": Skellam, "SecureSum": SecureSum})
    assert read == channel
    assert specs.stage_texts(read) == specs.stage_texts(channel)


def test_a_ledger_that_is_closed_says_so(tmp_path: Path) -> None:
    ledger = hb.Ledger(tmp_path / "ledger.sqlite")
    ledger.charge("train/1", CHARGES)
    assert "server ∞" in repr(ledger)
    ledger.close()
    assert repr(ledger) == "<Ledger: closed>"
    assert "closed" in ledger._repr_html_()


def test_names_from_the_data_are_no_markup() -> None:
    page = replace(POPULATION, name="<i>&")._repr_html_()
    assert "&lt;i&gt;&amp;" in page
    assert "<i>" not in page


def test_long_tables_are_cut_and_numbers_stand_right() -> None:
    page = html("many", ["name", "value"], [(str(n), f"{n:,}") for n in range(50)], most=3)
    assert page.count("<tr>") == 4
    assert "and 47 more" in page
    assert "<td>2</td>" in page
    left = html("few", ["name", "value"], [("a", "12 people")])
    assert left.count("text-align: left") == 4
