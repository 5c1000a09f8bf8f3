"""A report on an impression: the pseudo-click and the negatives are drawn as stated, whatever the padding.

Statistical tests have fixed seeds; a right stage fails each of them once in a million others.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch.func import vmap

from homebody.core import Total, Tree
from homebody.errors import HomebodyError
from homebody.privacy import Channel, Clip, ImpressionReport, Laplace
from homebody.privacy.queries import Attention, Choice, attention_l1, before_padding
from homebody.rng import Rng

ITEMS = [7, 3, 9, 4, 0, 8]
CLICK = 2


def update(extra: int = 0, items: list[int] = ITEMS, click: int | None = CLICK) -> Tree:
    """One impression, with so much padding."""
    shown = torch.tensor([*items, *[-1] * extra], dtype=torch.float32)
    place = torch.arange(len(shown))
    return {
        "interest": torch.tensor([0.0, 2.0, 1.0]),
        "shown": shown,
        "click": (place == (-1 if click is None else click)).float(),
    }


def told(stage: ImpressionReport, count: int, given: Tree, seed: int = 1) -> Tree:
    keys = Rng.of(seed).fold(torch.arange(count)).key
    return vmap(lambda key: stage.device(given, Rng(key)))(keys)


class TestNews:
    stage = ImpressionReport(1.0, basis=3, negatives=2)

    def test_the_pseudo_click_is_randomised_over_all_that_was_shown(self) -> None:
        news = told(self.stage, 30_000, update(extra=3))["news"]
        true = math.e / (math.e + 5)
        expected = [30_000 * (true if place == CLICK else (1 - true) / 5) for place in range(6)]
        found = [int((news[:, 0] == item).sum()) for item in ITEMS]
        assert stats.chisquare(found, expected).pvalue > 1e-6

    def test_of_several_marks_the_first_is_the_click(self) -> None:
        """Their places once were added up, and at a large ε no item was told."""
        several = update(extra=1) | {"click": torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0])}
        news = told(ImpressionReport(50.0, basis=3, negatives=2), 100, several)["news"]
        assert (news[:, 0] == ITEMS[1]).all()

    def test_negatives_are_any_two_of_the_others_and_may_be_the_true_click(self) -> None:
        """Every ordered pair without the pseudo-click is as likely, also pairs with the true click."""
        news = told(self.stage, 30_000, update(extra=3))["news"].numpy()
        assert (news[:, 0] != news[:, 1]).all()
        assert (news[:, 0] != news[:, 2]).all()
        place = {item: number for number, item in enumerate(ITEMS)}
        for pseudo in (ITEMS[CLICK], 3):
            some = news[news[:, 0] == pseudo]
            others = [item for item in ITEMS if item != pseudo]
            code = np.array([6 * place[first] + place[second] for _, first, second in some.tolist()])
            pairs = [6 * place[a] + place[b] for a in others for b in others if a != b]
            found = [int((code == pair).sum()) for pair in pairs]
            assert sum(found) == len(some)
            assert stats.chisquare(found).pvalue > 1e-6

    def test_a_wider_impression_gives_the_same_report(self) -> None:
        for stage in (self.stage, ImpressionReport(1.0, "attention", 3), ImpressionReport(0.1, negatives=5, basis=3)):
            narrow, wide = (told(stage, 200, update(extra)) for extra in (0, 9))
            assert narrow.keys() == wide.keys()
            assert all(torch.equal(narrow[name], wide[name]) for name in narrow)

    def test_too_few_items_leave_empty_places(self) -> None:
        stage = ImpressionReport(50.0, basis=3, negatives=4)
        assert stage.device(update(4, [7, 3], 1), Rng.of(0))["news"].tolist() == [3, 7, -1, -1, -1]
        assert stage.device(update(0, [7, 3], 1), Rng.of(0))["news"].tolist() == [3, 7, -1, -1, -1]
        assert stage.device(update(3, [], None), Rng.of(0))["news"].tolist() == [-1] * 5

    def test_the_interest_and_the_click_are_drawn_apart(self) -> None:
        """30,000 reports: whether the choice is true says nothing of whether the click is."""
        report = told(self.stage, 30_000, update())
        table = np.histogram2d((report["choice"] == 1).numpy(), (report["news"][:, 0] == ITEMS[CLICK]).numpy(), bins=2)
        assert stats.chi2_contingency(table[0]).pvalue > 1e-6


class TestInterest:
    def test_a_choice_has_the_chance_of_its_epsilon_before_padding(self) -> None:
        stage = ImpressionReport(1.0, basis=3, padding=0.5)
        inside = before_padding(1.0, 0.0, 0.5)[0]
        assert stage.query == Choice(inside, basis=3)
        choice = told(stage, 20_000, update())["choice"]
        true = math.exp(inside) / (math.exp(inside) + 2)
        found = np.bincount(choice.numpy())
        assert stats.chisquare(found, 20_000 * np.array([(1 - true) / 2, true, (1 - true) / 2])).pvalue > 1e-6

    def test_weights_are_sent_in_16_bits_with_their_noise(self) -> None:
        stage = ImpressionReport(1.0, "attention", 3, theta=0.5)
        assert stage.query == Attention(1.0, theta=0.5, size=3)
        weights = told(stage, 5_000, update())["weights"]
        assert weights.dtype == torch.float16
        shares = torch.tensor([0.0, 2.0, 1.0]).softmax(-1)
        noise = (weights.double() - shares * 0.5 / shares.norm()).numpy().ravel()
        # 16 bits round to a thousandth of a number, which the test of 15,000 would not notice.
        assert stats.kstest(noise, stats.laplace(scale=attention_l1(0.5, 3)).cdf).pvalue > 1e-6

    def test_a_huge_weight_stays_a_number(self) -> None:
        weights = told(ImpressionReport(1e-6, "attention", 3), 20, update())["weights"]
        assert torch.isfinite(weights).all()
        assert float(weights.abs().max()) <= 6e4


def test_the_server_gets_every_report() -> None:
    stage = ImpressionReport(1.0, basis=3, negatives=2)
    sums: Tree = {}
    parts = [told(stage, count, update(), seed) for count, seed in ((4, 1), (3, 2))]
    for part in parts:
        stage.read(part, sums)
    total = stage.server(Total(sums, 7), Rng.of(0))
    assert total.sum == {}
    assert total.clients == 7
    assert total.messages["news"].shape == (7, 3)
    both = [{name: value.tolist() for name, value in tree.items()} for tree in (*parts, total.messages)]
    one, two, found = (list(zip(tree["choice"], tree["news"], strict=True)) for tree in both)
    assert sorted(found) == sorted(one + two)
    # In whatever order they came, it is the same.
    other: Tree = {}
    for part in reversed(parts):
        stage.read(part, other)
    again = stage.server(Total(other, 7), Rng.of(0)).messages
    assert all(torch.equal(again[name], value) for name, value in total.messages.items())


class TestNothingToTell:
    """Who has no click tells uniform draws, and nobody can see that: neither chance differs by more than e^ε."""

    stage = ImpressionReport(3.0, basis=3, negatives=2, candidates=6)

    def test_without_a_click_among_the_candidates_the_pseudo_click_is_any_of_them(self) -> None:
        news = told(self.stage, 30_000, update(extra=2, click=None))["news"]
        assert stats.chisquare([int((news[:, 0] == item).sum()) for item in ITEMS]).pvalue > 1e-6
        assert (news >= 0).all()

    def test_an_interest_that_is_alike_in_all_is_any_choice(self) -> None:
        for interest in (torch.zeros(3), torch.full((3,), torch.nan)):
            choice = told(self.stage, 30_000, {**update(), "interest": interest})["choice"]
            assert stats.chisquare(np.bincount(choice.numpy(), minlength=3)).pvalue > 1e-6

    def test_nothing_has_the_candidates_of_everyone(self) -> None:
        given = update()
        nothing = Channel(self.stage).nothing(given)
        assert torch.equal(nothing["shown"], given["shown"])
        assert not nothing["click"].any()
        assert not nothing["interest"].any()

    def test_a_message_that_no_device_of_this_stage_sends_is_not_admitted(self) -> None:
        fine = {"choice": torch.tensor(2), "news": torch.tensor([7, -1, 9])}
        assert self.stage.admits(fine, 10)
        for wrong in ({"choice": torch.tensor(3)}, {"choice": torch.tensor(-1)}, {"news": torch.tensor([7, 10, 9])}):
            assert not self.stage.admits({**fine, **wrong}, 10)
        assert not self.stage.admits({**fine, "news": torch.tensor([7, -2, 9])}, 10)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"epsilon": 0.0}, "ε of a report must be a number above 0"),
        ({"epsilon": -1.0}, "ε of a report must be a number above 0"),
        ({"theta": 0.0}, "θ, the norm of attention weights, must be"),
        ({"basis": 1}, "among 2 basis vectors or more, not 1"),
        ({"negatives": 0}, "has 1 negative or more, not 0"),
        ({"candidates": 4}, "candidates of a report are 0, for what was shown, or more than its 4 negatives, not 4"),
        ({"candidates": -1}, "candidates of a report are 0"),
        ({"padding": 1.0}, "at least 0 and under 1, not 1.0"),
        ({"padding": -0.1}, "at least 0 and under 1, not -0.1"),
        ({"mechanism": "vector"}, "mechanism of an impression report is choice or attention, not 'vector'"),
        ({"noise": "none"}, "noise of an impression report is laplace or gaussian, not 'none'"),
        ({"mechanism": "attention", "noise": "gaussian", "delta": 0.0}, "δ of Gaussian noise is between 0 and 1"),
    ],
)
def test_errors_are_sentences(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(HomebodyError, match=problem):
        ImpressionReport(**{"epsilon": 1.0, **settings})


def test_it_follows_no_other_noise() -> None:
    with pytest.raises(HomebodyError, match="Impression reports cannot follow Laplace noise"):
        Channel(Clip(1.0, order=1), Laplace(1.0), ImpressionReport(1.0))
