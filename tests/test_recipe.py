"""A recipe says what to run, in TOML and on the command line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homebody.errors import HomebodyError
from homebody.methods.fedmf import FedMF
from homebody.recipe import Recipe, fingerprint, parse_fields, under_one_budget

MINIMAL = 'method = "fedmf"\ndata = "synthetic"\n'


def test_a_recipe_survives_its_file() -> None:
    recipe = Recipe(
        "my file.py:Mine",
        'data "quoted".csv',
        fields={"factors": 8, "learning_rate": 0.1, "flag": True, "text": "ü"},
        rounds=3,
        seed=-5,
        protocol="published",
        held_out="random",
        negatives=7,
        cohort=2,
        evaluate_every=4,
        select="hr@10",
        device="cuda:1",
        fused=False,
        columns={"user_col": "who"},
        data_dir="here",
    )
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    assert Recipe.from_toml(Recipe("fedmf", "synthetic").to_toml()) == Recipe("fedmf", "synthetic")


@given(
    st.text(min_size=1),
    st.text(min_size=1),
    st.dictionaries(st.text(min_size=1), st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.booleans()),
    st.none() | st.integers(1, 10**6),
    st.integers(-(2**62), 2**62),
)
def test_any_recipe_survives_its_file(
    method: str, data: str, fields: dict[str, Any], rounds: int | None, seed: int
) -> None:
    recipe = Recipe(method, data, fields=fields, rounds=rounds, seed=seed)
    assert Recipe.from_toml(recipe.to_toml()) == recipe


def test_a_recipe_builds_its_method() -> None:
    built = Recipe("fedmf", "synthetic", fields={"factors": 3, "learning_rate": 1}).build()
    assert built == FedMF(factors=3, learning_rate=1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("method = ", "not valid TOML"),
        ("schema = 3\n" + MINIMAL, "newer Homebody"),
        (MINIMAL + "round = 3\n", "did you mean 'rounds'"),
        ('data = "synthetic"\n', "names no method"),
        ('method = "fedmf"\n', "names no data"),
        ("schema = 'x'\n" + MINIMAL, "schema"),
        (MINIMAL + 'rounds = "ten"\n', "rounds"),
        (MINIMAL + "seed = 1.5\n", "seed"),
        (MINIMAL + "fields = 3\n", "fields"),
        (MINIMAL + "columns = ['user']\n", "columns"),
        (MINIMAL + 'fused = "no"\n', "fused"),
        ('method = 3\ndata = "synthetic"\n', "method"),
    ],
)
def test_a_recipe_that_says_nothing_sensible_is_an_error(text: str, said: str) -> None:
    with pytest.raises(HomebodyError, match=said):
        Recipe.from_toml(text)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"factor": 3}, "did you mean 'factors'"),
        ({"factors": "3"}, "factors must be a whole number, not '3'"),
        ({"factors": 0}, "factors must be at least 1, not 0"),
        ({"factors": True}, "factors must be a whole number, not True"),
        ({"factors": 2.0}, r"factors must be a whole number, not 2\.0"),
        ({"learning_rate": float("nan")}, "learning_rate must be a finite number"),
        ({"learning_rate": float("inf")}, "learning_rate must be a finite number"),
        ({"learning_rate": -0.1}, r"learning_rate must be at least 0, not -0\.1"),
    ],
)
def test_fields_that_no_method_takes_are_errors(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(HomebodyError, match=said):
        Recipe("fedmf", "synthetic", fields=fields).build()


def test_settings_become_values_of_the_fields_type() -> None:
    given = ["factors=8", "learning_rate=1e-3", "epochs=2", "factors=9"]
    assert parse_fields("fedmf", given) == {"factors": 9, "learning_rate": 0.001, "epochs": 2}
    assert parse_fields("popularity", []) == {}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("factors", "--set takes field=value, not 'factors'"),
        ("=3", "There is no field of fedmf ''"),
        ("factor=3", "did you mean 'factors'"),
        ("uplink=none", "There is no field of fedmf 'uplink'"),
        ("factors=many", "factors must be a whole number, not 'many'"),
        ("factors=2.5", r"factors must be a whole number, not '2\.5'"),
        ("factors=", "factors must be a whole number, not ''"),
        ("learning_rate=fast", "learning_rate must be a number, not 'fast'"),
    ],
)
def test_settings_that_cannot_be_meant_are_errors(setting: str, said: str) -> None:
    with pytest.raises(HomebodyError, match=said):
        parse_fields("fedmf", [setting])


def test_a_name_for_a_folder_has_nothing_a_path_would_trip_over() -> None:
    names = [
        Recipe("fedmf", "synthetic:users=20,items=30").name,
        Recipe("some/where/mine.py:Mine", "../data/my.csv", seed=3, protocol="published").name,
    ]
    assert names == ["fedmf-synthetic_users20_items30-strict-seed0", "Mine-my-published-seed3"]


def test_a_fingerprint_sees_names_and_contents() -> None:
    one = fingerprint({"a": b"12", "b": b"3"})
    assert one == fingerprint({"a": memoryview(b"12"), "b": b"3"})
    assert len({one, fingerprint({"a": b"12", "b": b"4"}), fingerprint({"a": b"12", "c": b"3"})}) == 3


@pytest.mark.parametrize("name", ["epsilon", "k", "users"])
def test_a_setting_of_the_channel_is_no_field_and_the_error_says_where_it_is(name: str) -> None:
    said = f"{name} is no field of fmf-ldp .*--stage one-bit:epsilon=2.5,k=100 --stage shuffle\\."
    with pytest.raises(HomebodyError, match=said):
        parse_fields("fmf-ldp", [f"{name}=1"])
    with pytest.raises(HomebodyError, match=said):
        Recipe("fmf-ldp", "synthetic", fields={name: 1}).build()
    with pytest.raises(HomebodyError, match=f"There is no field of fedmf '{name}'"):
        parse_fields("fedmf", [f"{name}=1"])


@pytest.mark.parametrize(
    ("method", "stages", "told"),
    [
        ("fmf-ldp", ["one-bit:epsilon=1,k=100"], ["fmf-ldp's own channel shuffles; these stages do not"]),
        ("fmf-ldp", ["one-bit:epsilon=1,k=100", "shuffle"], []),
        ("fmf-ldp", [], []),
        ("fedmf", ["one-bit:epsilon=1,k=100"], []),
        ("popularity", ["one-bit:epsilon=1,k=100"], []),
    ],
)
def test_stages_without_the_methods_own_shuffle_are_told_of(method: str, stages: list[str], told: list[str]) -> None:
    assert Recipe(method, "synthetic", stages=stages).unshuffled() == told


def test_one_budget_for_methods_with_noise_and_without() -> None:
    names = ["popularity", "fmf-ldp", "fedmf", "nearby", "dp-als"]
    rows, notes = under_one_budget([Recipe(name, "ml-100k", budget="eps=8", calibrate=True) for name in names])
    assert {row.method for row in rows if row.calibrate and row.budget} == {"nearby", "dp-als"}
    assert [note.split()[0] for note in notes] == ["popularity", "fmf-ldp", "fedmf"]
    noised = Recipe("fedmf", "ml-100k", stages=["clip:norm=1", "gaussian"], budget="eps=8", calibrate=True)
    assert under_one_budget([noised]) == ([noised], [])
    alone = [Recipe("ials", "ml-100k", budget="eps=8", calibrate=True)]
    assert under_one_budget(alone) == (alone, [])  # and so it is refused, as `homebody run` refuses it
    held = [Recipe(name, "ml-100k", budget="eps=8") for name in names]
    assert under_one_budget(held) == (held, [])
