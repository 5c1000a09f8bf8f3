"""What a device tells of an interest: the chances are those that are stated, and no two people are farther apart.

Statistical tests have fixed seeds. Each states how often a right mechanism would fail it under another seed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import dp_accounting
import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.func import vmap

from homebody.errors import HomebodyError
from homebody.privacy.accountant import epsilon
from homebody.privacy.events import GaussianRelease, LaplaceRelease, PureRelease
from homebody.privacy.queries import (
    Attention,
    Cap,
    Choice,
    Mechanism,
    PrivUnit,
    Query,
    Vector,
    analytic_multiplier,
    attention_l1,
    attention_l2,
    before_padding,
    clipped,
    normalised,
    randomised,
    truth,
)
from homebody.rng import Rng

DRAWS = 20_000


def drawn(told: Callable[[Rng], Tensor], seed: int, count: int = DRAWS) -> Tensor:
    """What is told so many times, each from a stream of its own."""
    return vmap(lambda key: told(Rng(key)))(Rng.of(seed).fold(torch.arange(count)).key)


def counted(places: Tensor, chances: list[float]) -> float:
    """The p-value of Pearson's test: a sample of these chances has one under 1e-6 once in a million seeds."""
    found = np.bincount(places.numpy(), minlength=len(chances))
    assert len(found) == len(chances)
    return float(stats.chisquare(found, np.array(chances) * len(places)).pvalue)


def chances(epsilon: float, places: int, true: int) -> list[float]:
    most = math.exp(epsilon) / (math.exp(epsilon) + places - 1)
    return [most if place == true else (1 - most) / (places - 1) for place in range(places)]


class TestRandomised:
    @pytest.mark.parametrize(("places", "true"), [(2, 1), (5, 0), (40, 17)])
    @pytest.mark.parametrize("epsilon", [1e-9, 0.5, 3.0])
    def test_the_true_place_has_its_chance_and_the_others_share_the_rest(
        self, epsilon: float, places: int, true: int
    ) -> None:
        """Nine tests at one in a million each. Half of ε would be noticed where there is any."""
        told = drawn(lambda rng: randomised(torch.tensor(true), torch.tensor(places), epsilon, rng), seed=1)
        assert counted(told, chances(epsilon, places, true)) > 1e-6
        if epsilon > 0.1 and places < 40:
            assert counted(told, chances(epsilon / 2, places, true)) < 1e-6

    @pytest.mark.parametrize("places", [2, 7, 1000])
    @pytest.mark.parametrize("epsilon", [1e-12, 1e-7, 1e-3, 1.0, 10.0, 40.0, 700.0])
    def test_no_chance_is_more_than_the_guarantee_allows(self, epsilon: float, places: int) -> None:
        """Exactly, in the whole numbers that are compared: each other place has its share of 2⁴⁴, or one less.

        Where ε is so small that all places are alike, that one of 2⁴⁴ is all that the true place may be ahead by.
        """
        honest = math.floor(float(truth(epsilon, torch.tensor(places))) * 2**52)
        least = (1 - honest / 2**52) * math.floor(2**44 / (places - 1)) / 2**44
        assert honest >= math.floor(2**52 / places)
        assert honest / 2**52 <= math.exp(epsilon) * least * (1 + (1e-10 if epsilon < 1e-5 else 0.0))

    @pytest.mark.parametrize("places", [2**20, 2**24])
    def test_of_very_many_places_all_are_drawn_alike(self, places: int) -> None:
        """The counts of 64 equal parts, but for the true place; one in a million each."""
        told = drawn(lambda rng: randomised(torch.tensor(5), torch.tensor(places), 0.5, rng), seed=3)
        assert 0 <= int(told.min()) < int(told.max()) < places
        assert counted(told * 64 // places, [1 / 64] * 64) > 1e-6

    def test_where_there_is_one_place_or_none_nothing_is_drawn(self) -> None:
        for places in (0, 1):
            assert randomised(torch.tensor(0), torch.tensor(places), 0.1, Rng.of(0)).item() == 0


class TestChoice:
    def test_the_best_is_told_by_randomised_response(self) -> None:
        interest, mechanism = torch.tensor([0.2, -1.0, 3.0, 2.9]), Choice(1.0, basis=4)
        told = drawn(lambda rng: mechanism.device(interest, rng), seed=2)
        assert told.dtype == torch.int32
        assert counted(told, chances(1.0, 4, 2)) > 1e-6
        assert mechanism.event == PureRelease(1.0)

    def test_the_server_makes_chances_of_it(self) -> None:
        """Where all are equally likely before, those after are the chances of the randomised response."""
        found = Choice(1.0, basis=4).server(torch.tensor([2, 0]))
        for row, true in zip(found, (2, 0), strict=True):
            assert row.tolist() == pytest.approx(chances(1.0, 4, true), rel=1e-5)

    @pytest.mark.parametrize("mechanism", [Choice(9.0, basis=4), Attention(9.0, size=4), Vector(9.0, size=4)])
    def test_an_interest_of_another_size_is_refused(self, mechanism: Mechanism) -> None:
        """A place beyond the basis would be told as it is: no other history could have told it."""
        for size in (1, 3, 5):
            with pytest.raises(HomebodyError, match=f"An interest of 4 numbers was expected, not one of {size}"):
                mechanism.device(torch.arange(float(size)), Rng.of(0))

    def test_an_interest_that_is_no_number_tells_something(self) -> None:
        for bad in (math.nan, math.inf, -math.inf):
            assert 0 <= Choice(1.0, basis=3).device(torch.full((3,), bad), Rng.of(0)).item() < 3


SCALES: dict[str, tuple[Attention | Vector, float]] = {
    "laplace": (Attention(2.0, theta=0.6, size=5), attention_l1(0.6, 5) / 2),
    "laplace as published": (Attention(2.0, theta=0.6, guarantee="published", size=5), 0.3),
    "gaussian": (
        Attention(2.0, 1e-3, 0.6, "gaussian", size=5),
        0.6 * math.sqrt(2) * analytic_multiplier(2.0, 1e-3),
    ),
    "gaussian as published": (
        Attention(2.0, 1e-3, 0.6, "gaussian", "published", 5),
        0.3 * math.sqrt(2 * math.log(1250)),
    ),
    "a vector": (Vector(2.0, theta=0.6, size=5), 0.6 * math.sqrt(5)),
    "a vector as published": (Vector(2.0, theta=0.6, guarantee="published", size=5), 0.6),
    "a vector, gaussian": (Vector(2.0, 1e-3, 0.6, "gaussian", size=5), 1.2 * analytic_multiplier(2.0, 1e-3)),
    "a vector, gaussian as published": (
        Vector(2.0, 1e-3, 0.6, "gaussian", "published", 5),
        0.6 * math.sqrt(2 * math.log(1250)),
    ),
}


class TestNoise:
    @pytest.mark.parametrize("name", SCALES)
    def test_what_is_told_is_the_clipped_interest_with_noise_of_its_scale(self, name: str) -> None:
        """Kolmogorov and Smirnov at one in a million, of 20,000 numbers."""
        mechanism, scale = SCALES[name]
        assert mechanism.scale == pytest.approx(scale)
        interest = torch.tensor([5.0, 1.0, 0.0, -1.0, 2.0])
        shares = interest.softmax(-1) if isinstance(mechanism, Attention) else interest
        centre = shares * min(1.0, 0.6 / float(shares.norm()))
        told = drawn(lambda rng: mechanism.device(interest, rng), seed=3, count=DRAWS // 5)
        noise = (told - centre).double().numpy().ravel()
        kind = stats.laplace if mechanism.noise == "laplace" else stats.norm
        assert stats.kstest(noise, kind(scale=scale).cdf).pvalue > 1e-6
        assert stats.kstest(noise, kind(scale=1.1 * scale).cdf).pvalue < 1e-6

    def test_events_say_what_the_noise_costs(self) -> None:
        assert SCALES["laplace"][0].event == SCALES["a vector"][0].event == PureRelease(2.0)
        event = SCALES["laplace as published"][0].event
        assert isinstance(event, LaplaceRelease)
        assert event.multiplier == pytest.approx(0.3 / attention_l1(0.6, 5))
        assert epsilon([(event, 1)], 0.0).epsilon == pytest.approx(attention_l1(0.6, 5) / 0.3)
        event = SCALES["a vector as published"][0].event
        assert epsilon([(event, 1)], 0.0).epsilon == pytest.approx(2.0 * math.sqrt(5))
        for name in ("gaussian", "a vector, gaussian"):
            assert epsilon([(SCALES[name][0].event, 1)], 1e-3).epsilon == pytest.approx(2.0, abs=1e-3)

    @pytest.mark.parametrize("activation", ["relu", "softplus"])
    def test_the_server_makes_weights_of_it(self, activation: str) -> None:
        told = torch.tensor([[0.5, -0.2, 0.1], [-1.0, -1.0, -1.0]])
        found = Attention(1.0, size=3, activation=activation).server(told)  # type: ignore[arg-type]
        torch.testing.assert_close(found.sum(1), torch.ones(2))
        torch.testing.assert_close(found[1], torch.full((3,), 1 / 3))
        expected = told[0].clamp(min=0) if activation == "relu" else (1 + told[0].exp()).log()
        torch.testing.assert_close(found[0], expected / expected.sum())
        assert torch.equal(found, normalised(told, activation))

    def test_a_mechanism_without_a_half_says_so(self) -> None:
        with pytest.raises(HomebodyError, match="must define device"):
            Mechanism(1.0).device(torch.zeros(2), Rng.of(0))


def attentions(theta: float, size: int) -> Tensor:
    """Attentions of people who are as different as can be, and of 2,000 others."""
    sets = torch.tensor(list(itertools.product([0.0, 1.0], repeat=size)))
    random = Rng.of(6).normal(2_000, size) * torch.logspace(-1, 2, 2_000)[:, None]
    return clipped(torch.cat([100 * sets, random]).softmax(-1), theta)


@pytest.mark.parametrize("theta", [0.1, 0.5, 0.6, 0.8, 1.0, 2.0])
@pytest.mark.parametrize("size", [2, 5, 7])
def test_no_two_attentions_are_farther_apart_than_is_stated_and_some_are_as_far(theta: float, size: int) -> None:
    every = attentions(theta, size).double()
    assert (every >= 0).all()
    assert float(every.norm(dim=1).max()) <= min(theta, 1.0)
    assert float(every.sum(1).max()) <= 1.0
    for order, stated in ((1.0, attention_l1(theta, size)), (2.0, attention_l2(theta))):
        most = float(torch.cdist(every, every[: 2**size + 500], p=order).max())
        assert most <= stated * (1 + 1e-9)
        assert most >= 0.99 * stated


class TestGaussianFigures:
    """PrivateRec's serving, ε = 10 and δ = 10⁻³."""

    def test_the_certified_noise(self) -> None:
        assert Attention(10.0, 1e-3, 1.0, "gaussian").scale == pytest.approx(0.5743, abs=1e-4)
        multiplier = 0.5743 / math.sqrt(2)
        assert dp_accounting.get_epsilon_gaussian(multiplier, 1e-3) == pytest.approx(10.0, abs=0.01)
        assert epsilon([(GaussianRelease(multiplier, "replace-one"), 1)], 1e-3).epsilon == pytest.approx(10, abs=0.01)

    @pytest.mark.parametrize(("padding", "expected"), [(0.0, 17.86), (0.2, 18.37), (0.5, 19.56), (0.8, 22.52)])
    def test_the_printed_noise(self, padding: float, expected: float) -> None:
        """It is set for (ε′, δ′); what it really costs before padding, and one click after it."""
        inside, small = before_padding(10.0, 1e-3, padding)
        mechanism = Attention(inside, small, 1.0, "gaussian", "published")
        assert mechanism.scale == pytest.approx(math.sqrt(2 * math.log(1.25 / small)) / inside)
        whole = dp_accounting.get_epsilon_gaussian(mechanism.scale / math.sqrt(2), small)
        assert epsilon([(mechanism.event, 1)], small).epsilon == pytest.approx(whole, rel=1e-4)
        assert math.log1p((1 - padding) * math.expm1(whole)) == pytest.approx(expected, abs=0.01)

    @pytest.mark.parametrize("target", [0.01, 0.5, 1.0, 10.0, 60.0])
    @pytest.mark.parametrize("delta", [1e-9, 1e-3, 0.3])
    def test_the_multiplier_is_the_least_that_certifies(self, target: float, delta: float) -> None:
        multiplier = analytic_multiplier(target, delta)
        assert dp_accounting.get_epsilon_gaussian(multiplier, delta) == pytest.approx(target, rel=1e-4, abs=1e-6)


class TestPadding:
    """Against all histories of three clicks on three places, each hidden (place 0) with probability p.

    What is told is a randomised response on the place that is most frequent.
    """

    def released(self, inside: float, padding: float, plain: float = 0.0) -> dict[tuple[int, ...], list[float]]:
        """The chances of what is told of each history; with this probability the true place itself, marked as such."""
        exact = {}
        for history in itertools.product(range(3), repeat=3):
            tree = np.bincount(history, minlength=3).argmax()
            response = np.array(chances(inside, 3, int(tree))) * (1 - plain)
            exact[history] = np.concatenate([response, plain * (np.arange(3) == tree)])
        hidden = {}
        for history in exact:
            total = np.zeros(6)
            for mask in itertools.product([False, True], repeat=3):
                chance = math.prod(padding if one else 1 - padding for one in mask)
                seen = tuple(0 if one else place for one, place in zip(mask, history, strict=True))
                total += chance * exact[seen]
            hidden[history] = total.tolist()
        return hidden

    def spent(self, released: dict[tuple[int, ...], list[float]], epsilon: float) -> float:
        """The least δ for which this ε holds between any two histories that differ in one click."""
        worst = 0.0
        for one, other in itertools.permutations(released, 2):
            if sum(a != b for a, b in zip(one, other, strict=True)) == 1:
                p, q = released[one], released[other]
                worst = max(worst, sum(max(0.0, a - math.exp(epsilon) * b) for a, b in zip(p, q, strict=True)))
        return worst

    @pytest.mark.parametrize("padding", [0.0, 0.3, 0.5, 0.9])
    @pytest.mark.parametrize("target", [0.1, 1.0, 5.0])
    def test_one_click_costs_no_more_than_was_asked(self, target: float, padding: float) -> None:
        inside, small = before_padding(target, 1e-2, padding)
        assert inside >= target
        assert self.spent(self.released(inside, padding), target) < 1e-12
        # With some chance the place is told as it is: (ε′, δ′) inside, and (ε, δ) for a click.
        assert self.spent(self.released(inside, padding, small), target) <= 1e-2 * (1 + 1e-9)
        if padding:
            assert self.spent(self.released(inside, 0.0), target) > 1e-3  # without hiding it would cost more

    @pytest.mark.parametrize("padding", [0.3, 0.9])
    def test_one_click_alone_costs_just_as_much(self, padding: float) -> None:
        """Nothing is given away: the bound is reached by a history of one click."""
        inside, _ = before_padding(1.0, 0.0, padding)
        plain, other = (np.array(chances(inside, 3, place)) for place in (1, 2))
        nothing = np.array(chances(inside, 3, 0))
        one, two = (padding * nothing + (1 - padding) * seen for seen in (plain, other))
        assert np.log(one / two).max() == pytest.approx(1.0)


class TestPrivUnit:
    @pytest.mark.parametrize("size", [2, 3, 16, 400])
    @pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0, 20.0])
    def test_the_ratio_of_densities_is_what_the_guarantee_says(self, epsilon: float, size: int) -> None:
        cap = Cap.of(epsilon, size)
        assert math.log(cap.p / cap.q) - math.log((1 - cap.p) / (1 - cap.q)) == pytest.approx(epsilon)
        assert 0 < cap.q <= 0.5
        assert 0 < cap.length <= 1
        told = PrivUnit(epsilon, size=size)
        assert isinstance(told.event, PureRelease)
        assert told.event.epsilon == epsilon

    @pytest.mark.parametrize("size", [2, 3, 16])
    def test_what_is_told_lies_in_the_cap_as_often_as_stated(self, size: int) -> None:
        """Nine tests at one in a million each, two-sided, and the mean within six of its deviations."""
        mechanism, cap = PrivUnit(3.0, size=size), Cap.of(3.0, size)
        true = torch.nn.functional.normalize(torch.arange(1.0, size + 1), dim=0)
        told = drawn(lambda rng: mechanism.device(3 * true, rng), seed=11).double()
        torch.testing.assert_close(told.norm(dim=1), torch.ones(DRAWS).double(), atol=1e-4, rtol=0)
        along = told @ true.double()
        inside = int((along >= cap.gamma).sum())
        assert stats.binomtest(inside, DRAWS, cap.p).pvalue > 1e-6
        assert stats.binomtest(inside, DRAWS, Cap.of(1.5, size).p).pvalue < 1e-6
        assert abs(float(along.mean()) - cap.length) < 6 * float(along.std()) / DRAWS**0.5
        # Within the cap as an even direction is there.
        far = (along[along >= cap.gamma] + 1) / 2
        half = 0.5 * (size - 1)
        tail = stats.beta(half, half)
        assert stats.kstest(far.numpy(), lambda x: 1 - tail.sf(x) / cap.q).pvalue > 1e-6
        rest = (along[along < cap.gamma] + 1) / 2
        assert stats.kstest(rest.numpy(), lambda x: tail.cdf(x) / (1 - cap.q)).pvalue > 1e-6

    def test_across_it_is_even(self) -> None:
        """Both ends of an axis across the true direction are as likely: one in a million."""
        mechanism = PrivUnit(4.0, size=5)
        told = drawn(lambda rng: mechanism.device(torch.eye(5)[0], rng), seed=12)
        for place in range(1, 5):
            assert stats.binomtest(int((told[:, place] > 0).sum()), DRAWS).pvalue > 1e-6

    def test_no_other_direction_tells_more(self) -> None:
        for size in (3, 32):
            best = Cap.of(5.0, size)
            for gamma in np.linspace(0, 0.95, 60):
                q = 0.5 * float(stats.beta(0.5 * (size - 1), 0.5).cdf(1 - gamma**2))
                p = 1 / (1 + math.exp(-5.0) * (1 - q) / q)
                t = stats.beta(0.5 * (size - 1), 0.5 * (size - 1), loc=-1, scale=2)
                above = t.expect(lambda x: x, lb=gamma) if q > 1e-9 else 0.0
                assert above * (p / q - (1 - p) / (1 - q)) <= best.length + 1e-4

    def test_a_vector_without_a_direction_tells_an_even_one(self) -> None:
        mechanism = PrivUnit(8.0, size=4)
        for blank in (torch.zeros(4), torch.full((4,), torch.nan)):
            told = drawn(lambda rng, blank=blank: mechanism.device(blank, rng), seed=13)
            # Of a mean of 20,000 even directions, each entry has a deviation of 1 / (2 √20,000) = 0.0035.
            assert told.mean(0).abs().max() < 0.025

    def test_the_server_takes_off_the_shrinkage(self) -> None:
        mechanism = PrivUnit(4.0, size=6)
        told = drawn(lambda rng: mechanism.device(torch.eye(6)[2], rng), seed=14)
        assert (mechanism.server(told).mean(0) - torch.eye(6)[2]).abs().max() < 0.05

    def test_a_line_has_no_directions(self) -> None:
        with pytest.raises(HomebodyError, match="at least 2 dimensions"):
            PrivUnit(1.0, size=1)


class TestQuery:
    @pytest.mark.parametrize(
        "text",
        [
            "choice:epsilon=5",
            "choice:epsilon=5,interests=16",
            "unit:epsilon=0.5",
            "attention:epsilon=10,guarantee=published",
            "attention:epsilon=10,delta=0.001,interests=16,theta=0.6",
            "vector:epsilon=5,delta=1e-05",
        ],
    )
    def test_what_is_parsed_is_printed(self, text: str) -> None:
        assert str(Query.parse(text)) == text
        assert Query.parse(f" {text.replace(',', ' , ')} ") == Query.parse(text)

    def test_as_many_interests_as_keep_nine_in_ten_true(self) -> None:
        for spent in (0.1, 1.0, 3.0, 5.0, 8.0, 50.0):
            count = Query.parse(f"choice:epsilon={spent}").count
            assert 4 <= count <= 256
            if count > 4:
                assert float(truth(spent, torch.tensor(count))) >= 0.9 - 1e-6
            if count < 256:
                assert float(truth(spent, torch.tensor(count + 1))) < 0.9

    def test_each_kind_has_its_mechanism(self) -> None:
        assert Query.parse("choice:epsilon=5,interests=7").mechanism(32) == Choice(5.0, basis=7)
        assert Query.parse("choice:epsilon=5").mechanism(32, interests=9) == Choice(5.0, basis=9)
        assert Query.parse("unit:epsilon=2").mechanism(32) == PrivUnit(2.0, size=32)
        assert Query.parse("vector:epsilon=2,delta=1e-5").mechanism(8) == Vector(
            2.0, 1e-5, 1.0, "gaussian", "certified", 8
        )
        published = Query.parse("attention:epsilon=10,guarantee=published").mechanism(8)
        assert published == Attention(10.0, 0.0, 1.0, "laplace", "published", 5, "softplus")

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("choice", "does not say its ε"),
            ("choice:epsilon=0", "epsilon must be above 0"),
            ("choice:epsilon=-1", "epsilon must be above 0"),
            ("choice:epsilon=nan", "finite number"),
            ("choice:epsilon=inf", "finite number"),
            ("choice:epsilon=1e9", "at most 100"),
            ("choice:epsilon=five", "must be a number"),
            ("choice:epsilon=5,interests=1", "at least 2"),
            ("choice:epsilon=5,interests=2.5", "a whole number"),
            ("choice:epsilon=5,interests=1001", "at most 1,000"),
            ("choice:epsilon=5,theta=2", "no setting of a choice query 'theta'"),
            ("unit:epsilon=5,interests=4", "no setting of a unit query"),
            ("choice:epsilon=5,epsilon=6", "says twice"),
            ("choice:epsilon", "KIND:SETTING=VALUE"),
            ("choice:epsilon=5,", "KIND:SETTING=VALUE"),
            ("chioce:epsilon=5", "did you mean 'choice'"),
            ("", "no kind of query"),
            ("vector:epsilon=5,delta=0.9", "at most 0.5"),
            ("vector:epsilon=5,guarantee=published", "give its delta"),
            ("attention:epsilon=5,guarantee=some", "must be one of certified, published"),
        ],
    )
    def test_what_is_wrong_is_refused_in_a_sentence(self, text: str, sentence: str) -> None:
        with pytest.raises(HomebodyError, match=sentence) as refused:
            Query.parse(text)
        assert str(refused.value).endswith((".", "vector"))


def test_twenty_thousand_choices_match_the_chance_of_the_true_one() -> None:
    """As devices of a service tell it: one in a million fails by chance."""
    query = Query.parse("choice:epsilon=5,interests=16")
    mechanism = query.mechanism(size=8)
    told = drawn(lambda rng: mechanism.device(torch.eye(16)[5], rng), seed=15)
    assert counted(told, chances(5.0, 16, 5)) > 1e-6
    assert counted(told, chances(4.5, 16, 5)) < 1e-6
