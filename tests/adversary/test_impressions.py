"""What certified reports on impressions tell: the bytes they are made of, and the game of two candidates.

Seeds are fixed. Bounds hold with the stated confidence for a right mechanism; AUCs near one half have a standard
deviation of 0.6 / √trials.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.adversary.news import certified, started
from torch import Tensor

from homebody.adversary import impressions
from homebody.adversary.impressions import GameAnswer, report_stage, tell_apart
from homebody.core import Cohort, Update
from homebody.errors import HomebodyError
from homebody.federation.wire import encode_tree
from homebody.methods.fedrec import FedRec
from homebody.methods.privaterec import PrivateRec
from homebody.privacy import Channel, Ledger
from homebody.privacy.impressions import ImpressionReport
from homebody.privacy.queries import Attention, Choice
from homebody.rng import Rng

CHANNELS = {
    "choice": certified(),
    "padded": certified(padding=0.5),
    "laplace": certified(mechanism="attention", basis=5, sharpness=3000.0),
    "gaussian": certified(mechanism="attention", basis=5, noise="gaussian", sharpness=3000.0),
    "clipped": certified(mechanism="attention", basis=5, theta=0.5, sharpness=3000.0),
}


def played(method: PrivateRec, **how: Any) -> dict[str, GameAnswer]:
    answers = tell_apart(method, *started(method), **{"users": 60, "trials": 4_000, **how})
    assert [one.question for one in answers] == ["one past click", "the click", "a history", "a person"]
    return {one.question: one for one in answers}


class TestGame:
    @pytest.mark.parametrize("method", CHANNELS.values(), ids=CHANNELS)
    @pytest.mark.parametrize("epsilon", [0.5, 3.0])
    def test_bounds_stay_under_what_is_certified(self, method: PrivateRec, epsilon: float) -> None:
        """A right mechanism fails this with a probability of at most 0.001 for each of ten cases."""
        trials = 1_000 if method.padding else 4_000
        for one in played(replace(method, epsilon=epsilon), confidence=0.999, trials=trials).values():
            assert one.lower.epsilon <= one.epsilon
            assert not one.contradicted
            assert one.auc.low <= one.as_dict()["allowed_auc"]

    @pytest.mark.slow
    def test_at_a_tiny_epsilon_the_guess_is_as_good_as_a_coin(self) -> None:
        """20,000 trials: 0.02 from 0.505, the most that ε = 0.01 allows a person, is more than 3.5 deviations away."""
        for method in (certified(epsilon=0.01), certified(epsilon=0.01, mechanism="attention", basis=5)):
            for one in played(method, trials=20_000).values():
                assert abs(one.auc.value - 0.5) <= 0.02
                assert one.auc.high - one.auc.low < 0.02

    @pytest.mark.parametrize("method", [CHANNELS["choice"], CHANNELS["laplace"]], ids=["choice", "laplace"])
    def test_a_large_epsilon_is_read(self, method: PrivateRec) -> None:
        """The attack works: where much may be told, much is found."""
        found = played(replace(method, epsilon=12.0))
        assert found["the click"].auc.value > 0.95
        assert found["a person"].auc.value > 0.98
        assert found["a history"].auc.value > 0.7
        assert found["a person"].lower.epsilon > 4

    @pytest.mark.parametrize("name", CHANNELS)
    def test_what_is_certified_is_what_the_ledger_is_charged(self, name: str) -> None:
        """With Gaussian noise, a click is charged in the history and in the label, which is more than needed."""
        stage, ledger = report_stage(CHANNELS[name].uplink), Ledger()
        assert stage is not None
        ledger.charge("a report", CHANNELS[name].uplink.charges(Cohort(np.arange(9), "all", 9, 9)))
        claims = impressions._certified(stage)
        delta = claims["a person"][1] or 1e-9
        assert ledger.epsilon("server", "user", delta=delta).epsilon == pytest.approx(claims["a person"][0], rel=1e-3)
        alone = ledger.epsilon("server", "interaction", delta=delta).epsilon
        for question in ("one past click", "the click"):
            assert alone == pytest.approx(claims[question][0] * (2 if stage.gaussian else 1), rel=1e-3)

    @pytest.mark.parametrize(
        ("question", "broken"),
        [("the click", "click"), ("a history", "interest"), ("one past click", "interest")],
    )
    def test_a_report_that_tells_too_much_is_contradicted(
        self, monkeypatch: pytest.MonkeyPatch, question: str, broken: str
    ) -> None:
        """A half of the report is made with ε = 8, and 1 is claimed."""
        method = certified(epsilon=1.0)
        right = ImpressionReport.device
        loud = ImpressionReport(8.0)

        def device(self: ImpressionReport, update: Update, rng: Rng) -> Update:
            told, more = right(self, update, rng), right(loud, update, rng)
            part = "news" if broken == "click" else "choice"
            return {**told, part: more[part]}

        monkeypatch.setattr(ImpressionReport, "device", device)
        found = played(method, confidence=0.999)
        assert found[question].contradicted
        assert found["a person"].contradicted
        untouched = "a history" if broken == "click" else "the click"
        assert not found[untouched].contradicted

    @pytest.mark.slow
    def test_weights_with_half_the_noise_are_contradicted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        method = certified(mechanism="attention", basis=2, epsilon=4.0, sharpness=1e4)
        monkeypatch.setattr(Attention, "scale", property(lambda self: 2.0 / self.epsilon / 4))
        assert played(method, trials=20_000)["a history"].contradicted

    def test_the_same_seed_finds_the_same(self) -> None:
        first, again, other = (played(CHANNELS["choice"], trials=500, seed=seed) for seed in (1, 1, 2))
        assert first == again
        assert first != other

    def test_refusals(self) -> None:
        method = certified()
        with pytest.raises(HomebodyError, match="at least 100"):
            tell_apart(method, *started(method), trials=10)
        with pytest.raises(HomebodyError, match="FedRec sends no reports on impressions"):
            tell_apart(FedRec(), *started(method))


def messages(method: PrivateRec, histories: Tensor, rng: Rng) -> list[Update]:
    """What devices send that differ in their histories alone."""
    simulator, shared = started(method)
    n_items = simulator.catalogue.n_items
    shown = torch.arange(10.0)
    sent = []
    for history in histories:
        news = method.vectors(shared, simulator.catalogue, history)
        batch = {"real": history < n_items, "hidden": torch.zeros(len(history), dtype=torch.bool)}
        batch |= {"shown": shown, "click": (shown == 3).float()}
        sent.append(method.uplink.device(method.reported(shared, news, batch), rng.fold("device")))
    return sent


class TestBytes:
    """A message is a function of (choice or weights, pseudo-click, negatives)."""

    def histories(self, n_items: int) -> Tensor:
        """None, one, and fifty news."""
        rows = torch.full((3, 50), n_items)
        rows[1, 0] = 7
        rows[2] = torch.arange(50, 100) % n_items
        return rows

    def test_equal_choices_and_news_are_equal_bytes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever the histories are: the outcome of the randomised response is forced to be the same."""
        method = certified(basis=5)
        honest = Choice.device
        monkeypatch.setattr(Choice, "device", lambda self, interest, rng: honest(self, torch.arange(5.0), rng))
        sent = messages(method, self.histories(120), Rng.of(4))
        assert len({encode_tree(one) for one in sent}) == 1
        assert {name for one in sent for name in one} == {"choice", "news"}

    def test_equal_weights_and_news_are_equal_bytes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        method = certified(basis=5, mechanism="attention")
        honest = Attention.device
        monkeypatch.setattr(Attention, "device", lambda self, interest, rng: honest(self, torch.arange(5.0), rng))
        sent = messages(method, self.histories(120), Rng.of(4))
        assert len({encode_tree(one) for one in sent}) == 1
        assert {name for one in sent for name in one} == {"weights", "news"}

    def test_reports_with_equal_fields_are_equal_bytes_as_they_are_drawn(self) -> None:
        """Without forcing anything: reports that say the same are the same bytes, and all are as long."""
        method = certified(basis=3, epsilon=0.1, negatives=1)
        fields: dict[tuple[int, tuple[int, ...]], set[bytes]] = {}
        lengths = set()
        for number in range(60):
            for sent in messages(method, self.histories(120), Rng.of(number)):
                choice, news = sent["choice"], sent["news"]
                assert isinstance(choice, Tensor)
                assert isinstance(news, Tensor)
                data = encode_tree(sent)
                lengths.add(len(data))
                fields.setdefault((int(choice), tuple(news.tolist())), set()).add(data)
        assert len(lengths) == 1
        assert len(fields) < 180, "some reports say the same"
        assert all(len(same) == 1 for same in fields.values())

    def test_news_do_not_depend_on_the_history(self) -> None:
        for sent in zip(
            *(messages(method, self.histories(120), Rng.of(4)) for method in CHANNELS.values()), strict=True
        ):
            assert len({tuple(one["news"].tolist()) for one in sent}) == 1  # type: ignore[union-attr]

    @pytest.mark.parametrize("basis", [5, 16])
    def test_a_report_is_short(self, basis: int) -> None:
        chosen = certified(basis=basis)
        assert all(len(encode_tree(one)) <= 200 for one in messages(chosen, self.histories(120), Rng.of(0)))
        weighted = certified(basis=basis, mechanism="attention")
        for one in messages(weighted, self.histories(120), Rng.of(0)):
            assert len(encode_tree(one, half=basis > 5)) <= 200


def test_a_channel_without_reports_has_no_stage() -> None:
    assert report_stage(Channel()) is None
