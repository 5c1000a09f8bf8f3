"""What people try first in Python and get wrong: each gets one sentence, before anything is trained."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import Any

import numpy as np
import polars as pl
import pytest

import homebody as hb
from homebody.data import Population

QUICK: dict[str, Any] = {"rounds": 1, "quiet": True}
FRAME = pl.DataFrame({"user": [1, 1, 1, 2, 2, 2], "item": [1, 2, 3, 1, 2, 3]})


@pytest.fixture(scope="module")
def people() -> Population:
    return hb.load("synthetic:users=60,items=40,mean=8")


@pytest.fixture(scope="module")
def model(people: Population) -> hb.Fitted:
    return hb.fit("fedials", people, rounds=2, quiet=True)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda p: hb.Simulator(p), "clients of a split, such as hb.leave_one_out\\(people\\), not this Population"),
        (lambda p: hb.split(FRAME), "A population is split, .* not this DataFrame"),
        (lambda p: hb.leave_one_out("synthetic"), "not 'synthetic'"),
        (lambda p: hb.split(p, 0.2), "A split is a text such as .*, not 0.2"),
        (lambda p: hb.split(p, negatives="9"), "negatives is a whole number"),
        (lambda p: p.history("7"), "A user's number is asked for, as user\\('7'\\) gives it"),
        (lambda p: hb.compare([], p), "There is no method to compare"),
        (lambda p: hb.tune("fedials", p, trials="4"), "Trials must be a whole number, not '4'"),
        (lambda p: hb.tune("fedials", p, search=["factors"]), "search names fields and where to look"),
        (lambda p: hb.leaderboard("fedials", p), "hb.leaderboard\\(data, \\*, methods, .*too many positional"),
        (lambda p: hb.Budget("8"), "A budget's epsilon must be a number, not '8'"),
        (lambda p: hb.FedMF(8), "is a Channel, .* not 8. Settings go by name, such as factors="),
        (lambda p: hb.FedMF(uplink="clip:norm=1"), "is a Channel"),
        (lambda p: hb.FedMF(factor=8), "There is no field of FedMF 'factor'; did you mean 'factors'"),
        (lambda p: hb.IALS(factor=8), "There is no field of IALS 'factor'; did you mean 'factors'"),
        (lambda p: hb.fit("FedMF", p, **QUICK), "did you mean 'fedmf'"),
        (lambda p: hb.fit("fedmf", p, n_factors=8, **QUICK), "give hb.FedMF\\(factors=8\\)"),
        (lambda p: hb.fit("fedmf", p, epochs=3, **QUICK), "give hb.FedMF\\(epochs=3\\)"),
        (lambda p: hb.fit("fedials", p, epochs=3, **QUICK), "did you mean 'rounds'"),
        (lambda p: hb.fit("fedials", p, verbose=True, **QUICK), "did you mean 'quiet'"),
        (lambda p: hb.fit("fedials", FRAME, user_col="user", **QUICK), "user_col is .* give it to hb.load"),
        (lambda p: hb.fit("fedials", p, rounds="2"), "^rounds must be a whole number, not '2'"),
        (lambda p: hb.fit("fedials", p, cutoffs=[1_000_000], **QUICK), "1,000,000 is beyond the 40 items"),
        (lambda p: hb.fit("fedials", p, cutoffs=[], **QUICK), "need a cut-off"),
        (lambda p: hb.fit("fedials", p, out=3, **QUICK), "A file or folder is named by a text or a Path, not 3"),
        (lambda p: hb.open(None), "A file or folder is named by a text or a Path, not None"),
        (lambda p: hb.open("lastest"), "Did you mean 'latest'"),
    ],
)
def test_calls(people: Population, call: Any, sentence: str) -> None:
    with pytest.raises(hb.HomebodyError, match=sentence) as refused:
        call(people)
    assert "--" not in str(refused.value)
    assert "recipe's" not in str(refused.value)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda m: m.recommend(1, k="3"), "a whole number such as 10, not '3'"),
        (lambda m: m.recommend(1, k=2.5), "a whole number such as 10, not 2.5"),
        (lambda m: m.recommend_for([1], k=True), "a whole number such as 10, not True"),
        (lambda m: m.save(None), "A file or folder is named"),
        (lambda m: m.plot("ndcg@7"), "There is no metric 'ndcg@7' here; did you mean ndcg@10"),
        (lambda m: m.plot(3), "There is no metric '3' here"),
        (pickle.dumps, "model.save\\(path\\) writes it"),
        (copy.deepcopy, "model.save\\(path\\) writes it"),
    ],
)
def test_models(model: hb.Fitted, call: Any, sentence: str) -> None:
    with pytest.raises(hb.HomebodyError, match=sentence) as refused:
        call(model)
    assert len(str(refused.value)) < 200


def test_numbers_of_numpy_are_numbers(people: Population, model: hb.Fitted) -> None:
    fitted = hb.fit(hb.FedMF(factors=np.int64(4)), people, rounds=np.int64(2), cutoffs=np.array([5, 10]), quiet=True)
    assert (fitted.recipe.rounds, fitted.recipe.cutoffs, fitted.recipe.fields) == (2, [5, 10], {"factors": 4})
    assert fitted.recipe.from_toml(fitted.recipe.to_toml()) == fitted.recipe
    assert model.recommend(1, k=np.int64(2)).height == 2
    assert hb.Budget(np.float32(8)) == hb.Budget(8.0)  # type: ignore[arg-type]


def test_stages_as_objects_are_the_same_as_texts(people: Population) -> None:
    stages = [hb.Clip(1.0), "secure-sum", hb.Gaussian(z=2.0)]
    texts = ["clip:norm=1", "secure-sum", "gaussian:z=2"]
    fitted = hb.fit("fedmf", people, stages=stages, **QUICK)
    assert fitted.recipe.stages == texts
    assert fitted.epsilon == hb.fit("fedmf", people, stages=texts, **QUICK).epsilon
    assert hb.fit("fedmf", people, stages="clip:norm=1", **QUICK).recipe.stages == ["clip:norm=1"]


def test_the_loss_alone_and_metrics_in_a_list(model: hb.Fitted) -> None:
    assert "NDCG" not in model.plot("loss").svg
    assert model.plot(["ndcg@10", "hr@10"]).svg == model.plot("ndcg@10", "hr@10").svg


def test_a_tiny_budget_is_calibrated_without_a_warning(people: Population) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted = hb.fit("fedmf", people, stages=["clip:norm=1", "gaussian"], budget=1e-9, calibrate=True, **QUICK)
    assert fitted.epsilon["public"] <= 1e-9


def test_help_and_completion_show_what_there_is() -> None:
    assert "factors" in inspect.signature(hb.FedMF).parameters
    assert "args" not in inspect.signature(hb.IALS).parameters
    assert {"gaussian", "statement"} <= set(dir(hb.account)) <= set(hb.account.__all__)
    assert set(dir(hb.audit)) == set(hb.audit.__all__)
