"""Which differences are more than luck."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from homebody.core import Evaluated
from homebody.report import RunFolder
from homebody.report.comparison import (
    cautions,
    comparison_columns,
    holm,
    legend,
    paired_p,
    reference_rows,
    summarise_runs,
)
from homebody.report.words import behind_proxy


def test_p_of_a_few_pairs_by_hand() -> None:
    """With eight differences of one sign, 2 of 2^8 sign patterns are as extreme."""
    flips = 40_000
    p = paired_p(np.array([1.0, 2.0, 0.5, 1.5, 3.0, 0.1, 0.7, 2.2]), flips=flips)
    exact = 2 / 2**8
    assert p == pytest.approx(exact, abs=5 * math.sqrt(exact / flips))


def test_p_of_no_difference_is_one() -> None:
    assert paired_p(np.zeros(50)) == 1.0
    assert paired_p(np.array([])) == 1.0
    assert paired_p(np.array([0.5, -0.5])) == 1.0


def test_p_has_no_side_and_does_not_see_ties() -> None:
    difference = np.random.default_rng(0).normal(0.3, 1, size=60)
    p = paired_p(difference)
    assert paired_p(-difference) == p
    assert paired_p(np.concatenate([difference, np.zeros(500)])) == pytest.approx(p, abs=0.01)
    assert paired_p(1000 * difference) == p


def test_p_is_uniform_when_nothing_differs() -> None:
    """400 null experiments: a Kolmogorov distance over 0.102 has probability 0.0005 (fixed seed)."""
    generator = np.random.default_rng(7)
    p_values = np.sort([paired_p(generator.normal(size=40), flips=1000, seed=trial) for trial in range(400)])
    expected = (np.arange(400) + 0.5) / 400
    assert np.abs(p_values - expected).max() < 0.102
    assert (p_values <= 0.05).mean() < 0.05 + 4 * math.sqrt(0.05 * 0.95 / 400)


def test_p_is_never_nought() -> None:
    assert paired_p(np.ones(500), flips=999) == pytest.approx(1 / 1000)


def test_a_shift_is_found() -> None:
    """A shift of half a deviation over 200 users is 7 standard errors."""
    generator = np.random.default_rng(3)
    assert paired_p(generator.normal(0.5, 1, size=200)) < 0.001


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        ([0.03], [0.03]),
        ([0.01, 0.04], [0.02, 0.04]),
        ([0.04, 0.01, 0.03], [0.06, 0.03, 0.06]),
        ([0.01, 0.02, 0.03, 0.005], [0.03, 0.04, 0.04, 0.02]),
        ([0.6, 0.7], [1.0, 1.0]),
        ([0.02, 0.02], [0.04, 0.04]),
    ],
)
def test_holm_by_hand(given: list[float], expected: list[float]) -> None:
    assert holm(given) == pytest.approx(expected)


def run(parent: Path, method: str, seed: int, ranks: list[int]) -> dict[str, Any]:
    """A finished run of which only the ranks matter."""
    folder = RunFolder.create(parent, f"{method}-{seed}")
    folder.write_text("recipe.toml", "")
    users = torch.arange(len(ranks))
    gain = [1 / math.log2(rank + 2) if rank < 10 else 0.0 for rank in ranks]
    folder.add_ranks(
        Evaluated({}, {"user": users, "rank": torch.tensor(ranks), "ndcg@10": torch.tensor(gain, dtype=torch.float64)})
    )
    return {
        "method": method,
        "data": "toy",
        "protocol": "strict",
        "meaning": "protocol strict",
        "notes": ["a note"],
        "seed": seed,
        "metrics": {"ndcg@10": float(np.mean(gain)), "hr@10": float(np.mean(np.array(ranks) < 10))},
        "epsilon": {"server": "inf"},
        "bytes_up": 10 * (seed + 1),
        "bytes_down": 7,
        "rounds": 3,
        "seconds": 1.5 + seed,
        "run": str(folder.path),
    }


def test_runs_side_by_side(tmp_path: Path) -> None:
    results = [
        run(tmp_path, "good", 0, [0] * 30 + [50] * 10),
        run(tmp_path, "good", 1, [0] * 30 + [0] * 10),
        run(tmp_path, "poor", 0, [50] * 40),
        run(tmp_path, "poor", 1, [50] * 39 + [0]),
    ]
    found = summarise_runs(results)
    assert (found["best"], found["seeds"], found["data"], found["notes"]) == ("good", [0, 1], "toy", ["a note"])
    good, poor = found["methods"]
    assert good["metrics"]["hr@10"] == {"mean": pytest.approx(0.875), "sd": pytest.approx(0.25 / math.sqrt(2))}
    assert poor["metrics"]["ndcg@10"] == {"mean": pytest.approx(0.0125), "sd": pytest.approx(0.025 / math.sqrt(2))}
    assert good["p_against_best"] is None
    assert poor["p_against_best"] < 0.001
    assert (good["bytes_up"], good["seconds"]) == (15, 2.0)
    assert good["compile_seconds"] == 0.0  # records of older versions do not say
    assert good["runs"] == [results[0]["run"], results[1]["run"]]


def test_one_seed_has_no_deviation_and_equals_are_not_told_apart(tmp_path: Path) -> None:
    found = summarise_runs([run(tmp_path, name, 0, [0, 3, 20]) for name in ("one", "two", "three")])
    assert {row["metrics"]["hr@10"]["sd"] for row in found["methods"]} == {None}
    assert sorted(str(row["p_against_best"]) for row in found["methods"]) == ["1.0", "1.0", "None"]


def test_users_are_paired_and_not_only_means(tmp_path: Path) -> None:
    """Equal spreads, but one method is a little better for nearly everyone: only pairs can show it."""
    generator = np.random.default_rng(0)
    ranks = generator.integers(0, 9, size=60)
    found = summarise_runs([run(tmp_path, "low", 0, (ranks + 1).tolist()), run(tmp_path, "high", 0, ranks.tolist())])
    assert found["best"] == "high"
    assert found["methods"][0]["p_against_best"] < 0.001


def test_an_epsilon_that_counts_on_a_shuffle_has_a_footnote(tmp_path: Path) -> None:
    def reports(total: float, **more: int) -> dict[str, Any]:
        return {"reports": {"count": 100, "epsilon": 2.5, "round": 250.0, "total": total, **more}}

    plain, bits = run(tmp_path, "plain", 0, [0, 3]), run(tmp_path, "bits", 0, [1, 3])
    far = {**bits, "method": "far.py:Far", **reports(700.0, sealed_bytes=9)}
    through = {**bits, **reports(5000.0, sealed_bytes=9)}
    said = "holds behind a proxy that does not collude with the observer; by addition it is"
    assert summarise_runs([plain, {**bits, **reports(5000.0)}])["notes"] == ["a note"], "no shuffle"
    assert summarise_runs([plain, through])["notes"] == ["a note", f"ε of bits {said} 5,000"]
    assert summarise_runs([through, far])["notes"][1] == f"ε of bits, Far {said} 5,000 (bits), 700 (Far)"
    assert behind_proxy([through, {**bits, **reports(50.0, sealed_bytes=9)}]) == [f"ε of bits {said} 50 to 5,000"]


def private(name: str, ndcg: float, **changes: Any) -> dict[str, Any]:
    references = {"popularity": {"ndcg@10": 0.2}, "chance": {"ndcg@10": 0.05}}
    epsilon = {"server": "inf", "public": 8.0}
    return {"method": name, "metrics": {"ndcg@10": ndcg}, "epsilon": epsilon, "references": references, **changes}


def test_cautions_name_what_is_below_popularity() -> None:
    assert cautions([private("fedmf", 0.25)]) == []
    (said,) = cautions([private("fedmf", 0.25), private("file.py:Mine", 0.1)])
    assert said.startswith("Below popularity: NDCG@10 of Mine is 0.1000, that of one list for everyone 0.2000. To try:")
    assert cautions([private("fedmf", 0.1, epsilon={"server": "inf"})]) == []


def test_records_of_earlier_versions_have_no_cautions() -> None:
    assert cautions([{"method": "fedmf", "metrics": {"ndcg@10": 0.1}, "epsilon": {"server": 1.0}}]) == []
    assert cautions([{"method": "fedmf", "metrics": {}, "epsilon": {"server": 1.0}}]) == []


def test_one_sentence_says_who_had_fewer_rounds() -> None:
    few = [private(name, 0.3, planned_rounds=rounds, default_rounds=100) for name, rounds in (("a", 5), ("b", 100))]
    few.append(private("c", 0.3, planned_rounds=1, default_rounds=5))
    assert cautions(few) == ["Fewer rounds than by default: a 5 of 100, c 1 of 5."]


def test_references_stand_below_the_methods_unless_they_are_among_them(tmp_path: Path) -> None:
    references = {"popularity": {"ndcg@10": 0.2}, "chance": {"ndcg@10": 0.05}}
    results = [
        {**run(tmp_path, name, seed, [0, 2, 4]), "references": references}
        for name in ("popularity", "fedmf")
        for seed in (0, 1)
    ]
    comparison = summarise_runs(results)
    assert comparison["references"]["chance"]["ndcg@10"] == {"mean": 0.05, "sd": 0.0}
    (row,) = reference_rows(comparison)
    assert (row["name"], row["reference"]) == ("chance", True)
    texts = {column.heading: column.text(row) for column in comparison_columns(("server", "public"))}
    assert texts["NDCG@10"] == "0.0500 ± 0.0000"
    assert {texts[heading] for heading in ("p", "ε, server", "KB up", "seconds")} == {""}
    old = summarise_runs([{**result, "references": None} for result in results])
    assert reference_rows(old) == []


def test_a_bounded_epsilon_is_put_in_words_once() -> None:
    comparison = {"meaning": "m", "test": "t", "epsilon_delta": 1e-5, "methods": [private("a", 0.3), private("b", 0.3)]}
    (said,) = [line for line in legend(comparison) if line.startswith("what ε allows")]
    assert "a against public, b against public: odds × 2,981, finds 99.97 %;" in said
    open_ = [private("a", 0.3, epsilon={"server": "inf"})]
    assert not any("what ε allows" in line for line in legend({**comparison, "methods": open_}))
