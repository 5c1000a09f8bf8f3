from __future__ import annotations

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homebody.data.population import Population
from homebody.data.synthetic import Synthetic, synthetic
from homebody.data.synthetic_kernels import alias_tables
from homebody.errors import HomebodyError


@given(st.integers(1, 60), st.integers(1, 30), st.floats(0, 1), st.integers(0, 2**63 - 1), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_histories_are_sorted_distinct_and_long_enough(
    users: int, items: int, fill: float, seed: int, factors: int
) -> None:
    shortest = min(5, items)
    people = synthetic(Synthetic(users, items, shortest + fill * (items - shortest), seed, factors))
    assert people.n_users == users
    assert people.lengths.min() >= shortest
    inside = np.ones(people.n_interactions, dtype=bool)
    inside[people.indptr[:-1]] = False
    assert (np.diff(people.items, prepend=0)[inside] > 0).all()


def test_a_history_depends_on_neither_the_crowd_nor_the_threads() -> None:
    many = synthetic(Synthetic(users=5000, items=200, mean=12, seed=3))
    few = synthetic(Synthetic(users=40, items=200, mean=12, seed=3))
    assert np.array_equal(few.items, many.items[: few.n_interactions])
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    try:
        alone = synthetic(Synthetic(users=5000, items=200, mean=12, seed=3))
    finally:
        numba.set_num_threads(before)
    assert np.array_equal(alone.items, many.items)


def test_seeds_differ() -> None:
    one, other = (synthetic(Synthetic(seed=seed)) for seed in (0, 1))
    assert not np.array_equal(one.lengths, other.lengths)


@pytest.mark.parametrize(("items", "mean"), [(500, 30.0), (500, 300.0), (20, 6.5), (10, 10.0), (10, 5.0)])
def test_the_mean_length_is_the_stated_one(items: int, mean: float) -> None:
    lengths = synthetic(Synthetic(users=20_000, items=items, mean=mean)).lengths
    # Five standard errors: one false alarm in two million seeds, and this seed is fixed.
    assert abs(lengths.mean() - mean) <= 5 * lengths.std() / np.sqrt(20_000) + 1e-9
    assert lengths.max() <= items


def test_alias_tables_hold_the_weights() -> None:
    weights = np.array([[1.0, 2.0, 3.0, 0.5, 0.0], [5.0, 5.0, 5.0, 5.0, 5.0]])
    keep, other = alias_tables(weights)
    for row in range(2):
        chance = keep[row].astype(float)
        np.add.at(chance, other[row], 1.0 - keep[row])
        np.testing.assert_allclose(chance / 5, weights[row] / weights[row].sum(), atol=1e-6)


def test_popularity_is_skewed_by_as_much_as_asked() -> None:
    def share_of_top_tenth(skew: float) -> float:
        popularity = np.sort(synthetic(Synthetic(users=2000, items=1000, skew=skew)).popularity)[::-1]
        return float(popularity[:100].sum() / popularity.sum())

    flat, zipf = share_of_top_tenth(0.0), share_of_top_tenth(1.0)
    assert flat < 0.2
    assert zipf > 0.4


def hit_ratio(people: Population, scores: np.ndarray, held: np.ndarray, rng: np.random.Generator) -> float:
    """HR@10 against 99 unseen items a user."""
    seen = np.zeros(scores.shape, dtype=bool)
    seen[np.repeat(np.arange(people.n_users), people.lengths), people.items] = True
    unseen = np.where(seen, 2.0, rng.random(scores.shape)).argsort(axis=1)[:, :99]
    own = np.take_along_axis(scores, held[:, None], axis=1)
    return float(((np.take_along_axis(scores, unseen, axis=1) >= own).sum(axis=1) < 10).mean())


def test_other_peoples_histories_help_beyond_popularity() -> None:
    people = synthetic(Synthetic())
    rng = np.random.default_rng(0)
    place = people.indptr[:-1] + rng.integers(0, people.lengths)
    matrix = np.zeros((people.n_users, people.n_items))
    matrix[np.repeat(np.arange(people.n_users), people.lengths), people.items] = 1
    held = people.items[place]
    matrix[np.arange(people.n_users), held] = 0
    popularity = matrix.sum(axis=0)
    scale = np.maximum(popularity, 1) ** 0.25
    left, strength, right = np.linalg.svd(matrix / scale, full_matrices=False)
    factors = (left[:, :8] * strength[:8]) @ right[:8] * scale
    everyone = np.broadcast_to(popularity, matrix.shape)
    by_popularity = hit_ratio(people, everyone, held, np.random.default_rng(1))
    by_factors = hit_ratio(people, factors, held, np.random.default_rng(1))
    assert by_factors > by_popularity + 0.05


def test_a_specification_is_read_back_from_its_name() -> None:
    for text in (
        "synthetic",
        "synthetic:users=20,mean=6.5",
        "synthetic:items=9,mean=9,seed=4,factors=2,skew=0",
    ):
        spec = Synthetic.parse(text)
        assert str(spec) == text
        assert Synthetic.parse(str(spec)) == spec
    assert Synthetic.parse("synthetic:") == Synthetic()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("synthetic:item=5", "did you mean 'items'"),
        ("synthetic:users=1e6", "users must be a whole number, not '1e6'"),
        ("synthetic:mean=lots", "mean must be a number, not 'lots'"),
        ("synthetic:users", "Give users once, as users=number"),
        ("synthetic:users=1,users=2", "Give users once"),
        ("synthetic:users=0", "needs users from 1"),
        ("synthetic:items=0", "needs items from 1"),
        ("synthetic:mean=4", "needs mean from 5 to 500, not 4"),
        ("synthetic:mean=nan", "needs mean from 5"),
        ("synthetic:items=20", "needs mean from 5 to 20, not 30"),
        ("synthetic:seed=-1", "needs seed from 0"),
        ("synthetic:factors=0", "needs factors from 1"),
        ("synthetic:skew=inf", "needs skew from 0"),
    ],
)
def test_a_bad_specification_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(HomebodyError, match=sentence):
        Synthetic.parse(text)
