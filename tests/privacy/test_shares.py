"""Several releases on one budget: each has a share of it, and together they cost what one release would."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from homebody import account
from homebody.core import Cohort, Method, releases, stated_by
from homebody.errors import HomebodyError
from homebody.methods.nearby import Nearby
from homebody.privacy import OBSERVERS, Channel, Clip, Gaussian, Laplace, Ledger, SecureSum, Skellam
from homebody.privacy.accountant import epsilon
from homebody.recipe import Recipe
from homebody.run import execute

EVERYONE, DATA = Cohort(np.arange(300), "all", 300, 300), "synthetic:users=300,items=120,mean=16"
UNDIVIDED = Cohort(np.arange(300), "all", 300, 300, divided=False)
SUM = SecureSum(helper=True)
SHARES = [(0.1, 0.9), (0.5, 0.5), (0.2, 0.3, 0.5)]


def cost(channels: list[Channel], delta: float, cohort: Cohort = EVERYONE, observer: str = "server") -> float:
    """ε of one release through each of these channels."""
    charges = [charge for channel in channels for charge in channel.charges(cohort)]
    return epsilon([(charge.event, 1) for charge in charges if charge.observer == observer], delta).epsilon


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize(
    ("channel", "delta"),
    [
        (Channel(Clip(1.0), SUM, Gaussian(0.65, "add-remove")), 1e-6),
        (Channel(Clip(2.0), SUM, Gaussian(3.0)), 1e-5),
        (Channel(Clip(1.0, order=1), Laplace(b=2.0)), 0.0),
    ],
    ids=["gaussian, add-remove", "gaussian, replace-one", "laplace"],
)
def test_releases_whose_shares_add_up_to_1_cost_what_one_would(
    channel: Channel, delta: float, shares: tuple[float, ...]
) -> None:
    whole = cost([channel], delta)
    assert cost([channel.with_share(share) for share in shares], delta) == pytest.approx(whole, rel=1e-9)
    assert cost([channel.with_share(share) for share in shares[1:]], delta) < whole
    assert channel.with_share(1.0) == channel


@pytest.mark.parametrize("shares", SHARES)
def test_shares_of_skellam_noise_cost_no_more_than_one_release(shares: tuple[float, ...]) -> None:
    """Its bound has a small part that falls faster than the square of the noise."""
    channel = Channel(Clip(1.0), Skellam(1.0, "add-remove"), SecureSum())
    whole = cost([channel], 1e-6)
    assert whole * 0.99 < cost([channel.with_share(share) for share in shares], 1e-6) <= whole * (1 + 1e-9)


def test_the_rest_of_a_channel_is_shared_by_all() -> None:
    channel = Channel(Clip(1.0), SUM, Gaussian(0.6, "add-remove"))
    first, second, noise = channel.with_share(0.25).stages
    assert (first, second) == channel.stages[:2]
    assert isinstance(noise, Gaussian)
    assert (noise.z, noise.relation) == (1.2, "add-remove")


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_is_a_part(share: float) -> None:
    with pytest.raises(HomebodyError, match="share of a budget must be above 0 and at most 1"):
        Channel().with_share(share)


def ledger_of(run: Path) -> Ledger:
    return Ledger(run / "ledger.sqlite")


@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
def test_calibration_spends_the_budget_on_both_releases_of_nearby(relation: str, tmp_path: Path) -> None:
    stages = ["clip:norm=1", "secure-sum:helper=true", f"gaussian:z=1,relation={relation}"]
    how = {"stages": stages, "budget": "eps=8,observer=server", "calibrate": True}
    run = Path(execute(Recipe("nearby", DATA, fields={"rank": 4}, **how), tmp_path)["run"])  # type: ignore[arg-type]
    ledger = ledger_of(run)
    charged = [entry for entry in ledger.entries() if entry.observer == "server"]
    spent = ledger.epsilons(1e-6)
    ledger.close()
    assert [(entry.release, entry.relation) for entry in charged] == [("popularity/1", relation), ("pairs/1", relation)]
    for observer in OBSERVERS:
        assert 8 * (1 - 1e-3) <= spent[observer] <= 8


YEAR = {0.65324: (8.00, 12.1, 18.6, 38.6), 1.19408: (4.00, 5.93, 8.89, 17.4), 4.22675: (0.999, 1.45, 2.12, 3.90)}
"""What docs/private-corner.md says of 1, 2, 4 and 12 releases."""


@pytest.mark.parametrize("z", YEAR)
def test_the_price_of_several_releases_of_nearby_is_what_the_calculator_says(z: float) -> None:
    times = [1, 2, 4, 12]
    said = account.gaussian(z, rounds=times, relation="add-remove")["epsilon"].to_list()
    assert [float(f"{epsilon:.3g}") for epsilon in said] == [*YEAR[z]]
    sums = [phase.method for phase in Nearby(uplink=Channel(Clip(1.0), SUM, Gaussian(z, "add-remove"))).phases]
    for count, expected in zip(times, said, strict=True):
        ledger = Ledger()
        for month in range(count):
            for number, method in enumerate(sums):
                assert method is not None
                ledger.charge(f"{month}/{number}", releases(method, EVERYONE))
        assert ledger.epsilons(1e-6)["server"] == pytest.approx(expected, rel=1e-6)
        ledger.close()


def test_the_noise_that_keeps_a_years_releases_within_a_budget_is_that_of_the_page() -> None:
    for year, expected in ((8.0, (0.653, 0.924, 1.31, 2.26)), (4.0, (1.19, 1.69, 2.39, 4.14))):
        said = account.gaussian(epsilon=year, rounds=[1, 2, 4, 12], relation="add-remove")["noise"].to_list()
        assert [float(f"{noise:.3g}") for noise in said] == [*expected]


def test_replacing_takes_twice_the_noise_of_leaving() -> None:
    """For the same ε; a clip of 1 moves the sum by 1 and by 2."""
    leaving, replacing = (
        Channel(Clip(1.0), SUM, Gaussian(z, relation))  # type: ignore[arg-type]
        for z, relation in ((0.65, "add-remove"), (0.65, "replace-one"))
    )
    assert cost([leaving], 1e-6, UNDIVIDED) == cost([replacing], 1e-6, UNDIVIDED)
    assert replacing.deviation(1, 1) == 2 * leaving.deviation(1, 1)


def test_a_departure_costs_more_where_a_sum_is_divided() -> None:
    channel = Channel(Clip(1.0), SUM, Gaussian(0.65, "add-remove"))
    for observer in OBSERVERS:
        divided, undivided = (cost([channel], 1e-6, cohort, observer) for cohort in (EVERYONE, UNDIVIDED))
        assert divided > 1.5 * undivided
    assert {charge.event.relation for charge in channel.charges(EVERYONE)} == {"replace-one"}
    assert {charge.event.relation for charge in channel.charges(UNDIVIDED)} == {"add-remove"}


def test_nearby_among_devices_alone_is_charged_for_everybody() -> None:
    stages = ["clip:norm=1", "skellam:relation=add-remove,z=1", "secure-sum"]
    method = Nearby(uplink=Channel(Clip(1.0), Skellam(1.0, "add-remove"), SecureSum()))
    assert Recipe("nearby", DATA, stages=stages).build() == method
    ledger = Ledger()
    for number, phase in enumerate(method.phases):
        assert phase.method is not None
        ledger.charge(str(number), releases(phase.method, EVERYONE))
    charged = {(entry.observer, entry.relation) for entry in ledger.entries()}
    assert charged == {(observer, "add-remove") for observer in OBSERVERS}
    # Parties know their own noise: for them it is a little less.
    spent = ledger.epsilons(1e-6)
    ledger.close()
    assert spent["server"] == spent["public"] == pytest.approx(5.22, abs=0.05)
    assert spent["server"] <= spent["clients"] < 5.4


@dataclass(frozen=True)
class SaysSo(Nearby):
    """Ships with nobody, and inherits the claim that nothing is divided by the number of people."""


def test_somebody_elses_word_that_nothing_is_divided_is_a_claim() -> None:
    theirs: Method = SaysSo()
    assert stated_by(Nearby()) is None
    assert stated_by(theirs) == "SaysSo"
    charged = releases(theirs, EVERYONE)
    assert {charge.observer for charge in charged} == set(OBSERVERS)
    assert all(charge.event.kind == "not-private" for charge in charged)
    assert "SaysSo states itself what it tells" in charged[0].event.reason  # type: ignore[union-attr]
