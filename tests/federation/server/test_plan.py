"""What a server was told: read back as it was written, and what makes no sense refused in a sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from homebody.errors import HomebodyError
from homebody.federation.server.plan import FILE, ServerPlan
from homebody.methods.fedmf import FedMF
from homebody.privacy import Shuffle
from homebody.recipe import Recipe

RECIPE = Recipe("fedmf", "devices", {"factors": 3}, rounds=4, seed=2, stages=["clip:norm=1"], cohort=5)


def test_a_plan_comes_back_from_its_file(tmp_path: Path) -> None:
    plan = ServerPlan(RECIPE, listen="[::1]:9000", metrics="", tls=False, deadline=5, half=True, largest=10.0, least=3)
    (tmp_path / FILE).write_text(plan.to_toml())
    assert ServerPlan.read(tmp_path) == plan
    assert replace(plan, least=4).least == 4
    assert ServerPlan(RECIPE).run != ServerPlan(RECIPE).run


@pytest.mark.parametrize(
    ("listen", "host", "port", "address"),
    [
        ("127.0.0.1:9092", "127.0.0.1", 9092, "127.0.0.1:9092"),
        ("0.0.0.0:80", "0.0.0.0", 80, "127.0.0.1:80"),
        ("[::]:9092", "::", 9092, "[::1]:9092"),
        ("[fe80::1]:1", "fe80::1", 1, "[fe80::1]:1"),
        ("example.org:65535", "example.org", 65535, "example.org:65535"),
    ],
)
def test_where_a_server_listens_and_is_found(listen: str, host: str, port: int, address: str) -> None:
    plan = ServerPlan(RECIPE, listen=listen)
    assert (plan.host, plan.port, plan.address) == (host, port, address)
    assert ServerPlan(RECIPE, listen=listen, link="link.example:1").address == "link.example:1"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"listen": "9092"}, "An address is HOST:PORT, such as 127.0.0.1:9092, not '9092'."),
        ({"listen": ""}, "An address is HOST:PORT"),
        ({"listen": "a b:1"}, "An address is HOST:PORT"),
        ({"listen": "host:70000"}, "An address is HOST:PORT"),
        ({"listen": "host:0"}, "An address is HOST:PORT"),
        ({"listen": "http://host:1"}, "An address is HOST:PORT"),
        ({"listen": 9092}, "The server's listen must be a text, not 9092."),
        ({"metrics": "x"}, "An address is HOST:PORT"),
        ({"metrics": False}, "The server's metrics must be a text, not False."),
        ({"link": "x"}, "An address is HOST:PORT"),
        ({"reports": "9093"}, "An address is HOST:PORT"),
        ({"reports": 9093}, "The server's reports must be a text, not 9093."),
        ({"reports_wait": -1}, "The server's reports_wait must be at least 0 seconds, not -1."),
        ({"database": 5}, "The server's database must be a text, not 5."),
        ({"database": " "}, "The server's database is empty: give a name."),
        ({"run": ""}, "The server's run is empty: give a name."),
        ({"tls": "no"}, "The server's tls must be true or false, not 'no'."),
        ({"half": 1}, "The server's half must be true or false, not 1."),
        ({"deadline": "60"}, "The server's deadline must be a number, not '60'."),
        ({"deadline": True}, "The server's deadline must be a number, not True."),
        ({"deadline": 0.5}, "The server's deadline must be at least 1 second, not 0.5."),
        ({"deadline": float("nan")}, "The server's deadline must be a finite number, not nan."),
        ({"deadline": 1e6}, "The server's deadline must be at most 86,400 seconds, not 1,000,000.0."),
        ({"quorum": 0}, "The server's quorum must be above 0, not 0."),
        ({"quorum": 1.5}, "The server's quorum must be at most 1, not 1.5."),
        ({"quorum": float("nan")}, "The server's quorum must be a finite number, not nan."),
        ({"least": 0}, "The server's least must be at least 1, not 0."),
        ({"least": 1.5}, "The server's least must be a whole number, not 1.5."),
        ({"longest": 0}, "The server's longest must be at least 1 interaction, not 0."),
        ({"longest": 2.5}, "The server's longest must be a whole number, not 2.5."),
        ({"largest": 0}, "The server's largest must be above 0, not 0."),
        ({"largest": float("inf")}, "The server's largest must be a finite number, not inf."),
        ({"largest": float("nan")}, "The server's largest must be a finite number, not nan."),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(HomebodyError) as refused:
        ServerPlan(RECIPE, **settings)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("listen = ", "The server's plan is not valid TOML"),
        ("schema = 2", "written by a newer Homebody"),
        ("schema = 0", "must be a whole number from 1, not 0"),
        ("schema = 'new'", "must be a whole number from 1, not 'new'"),
        ("lisen = 'x'", "There is no setting of a server 'lisen'; did you mean 'listen'?"),
        ("recipe = 5", "The server's recipe must be a table, not 5."),
        ("", "The recipe names no method."),
        ("[recipe]\nmethod = 'fedmf'", "The recipe names no data."),
        ("[recipe]\nmethod = 'fedmf'\ndata = 'devices'\nmetod = 1", "There is no recipe field 'metod'"),
        ("[recipe]\nmethod = 'fedmf'\ndata = 'devices'\nseed = 'a'", "The recipe's seed must be a whole number"),
        ("tls = 'no'\n[recipe]\nmethod = 'fedmf'\ndata = 'devices'", "The server's tls must be true or false"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(HomebodyError) as refused:
        ServerPlan.read(tmp_path)
    assert said in str(refused.value)


def test_a_folder_without_a_server_is_named(tmp_path: Path) -> None:
    with pytest.raises(HomebodyError, match=r"There is no server in .*: make one with `homebody server init"):
        ServerPlan.read(tmp_path / "nowhere")
    (tmp_path / FILE).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HomebodyError, match="cannot be read"):
        ServerPlan.read(tmp_path)


PUBLIC = {"pretrain_rounds": 1, "pretraining": "public"}
NOISE = ["clip:norm=1", "gaussian:z=1"]


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ({"method": "nosuch"}, "There is no method 'nosuch'"),
        ({"method": "mine.py:Mine"}, "Devices run methods that come with Homebody or with an installed package"),
        ({"method": "popularity", "fields": {}, "stages": []}, "popularity collects raw data"),
        ({"fields": {"factors": 0}}, "factors must be at least 1, not 0."),
        ({"fields": {"nosuch": 0}}, "There is no field of fedmf 'nosuch'"),
        ({"stages": ["nosuch"]}, "There is no stage 'nosuch'"),
        ({"stages": ["gaussian:z=1"]}, "Gaussian noise needs a bound"),
        ({"stages": ["secure-sum"]}, "A secure sum needs to know how large a number may be"),
        ({"stages": ["ask-rows"]}, "ask-rows needs more than one letter a round"),
        ({"stages": ["one-bit:epsilon=1,k=1", "shuffle"]}, "Shuffle needs a proxy between devices and server"),
        ({"split": "ratio:test=0.2"}, "Devices hold out their last two interactions"),
        ({"protocol": "nosuch"}, "There is no protocol 'nosuch'"),
        ({"held_out": "nosuch"}, "There is no way to hold out 'nosuch'"),
        ({"select": "valid/ndcg@0"}, "There is no metric to choose the round by 'valid/ndcg@0'"),
        ({"budget": "eps=8", "calibrate": True}, "leave out calibrate"),
        ({"budget": "epsilon"}, "budget"),
        ({"rounds": 0}, "The server's rounds must be at least 1, not 0."),
        ({"cohort": 0}, "The server's cohort must be at least 1, not 0."),
        ({"negatives": 0}, "The server's negatives must be at least 1, not 0."),
        ({"public": 0.1}, "No device's data is public"),
        ({"method": "dp-privrec", "fields": PUBLIC, "stages": NOISE}, "No device's data is public"),
        ({"seed": 2**64}, "The seed must fit in 64 bits"),
    ],
)
def test_what_devices_cannot_do_is_refused_before_anything_starts(recipe: dict[str, Any], said: str) -> None:
    with pytest.raises(HomebodyError) as refused:
        ServerPlan(Recipe(**{"method": "fedmf", "data": "devices", **recipe})).method()
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "cohort", "among"),
    [({}, None, 1), ({"least": 20}, None, 10), ({"least": 20, "quorum": 1.0}, 30, 30), ({"quorum": 0.25}, 7, 2)],
)
def test_a_shuffle_counts_on_those_who_are_certain_to_report(
    settings: dict[str, Any], cohort: int | None, among: int
) -> None:
    recipe = Recipe("fedmf", "devices", cohort=cohort, stages=["one-bit:epsilon=1,k=1", "shuffle"], budget="eps=8")
    plan = ServerPlan(recipe, reports="127.0.0.1:9093", **settings)
    (_, shuffle) = plan.method().uplink.stages
    assert isinstance(shuffle, Shuffle)
    assert shuffle.users == plan.shuffled_among == among
    fewer = replace(recipe, stages=["one-bit:epsilon=1,k=1", "shuffle:users=1"])
    assert replace(plan, recipe=fewer).method().uplink.stages[1] == replace(shuffle, users=1)
    more = replace(recipe, stages=["one-bit:epsilon=1,k=1", f"shuffle:users={among + 1}"])
    with pytest.raises(HomebodyError, match=f"counts on {among + 1} people, but {among} are enough for a round"):
        replace(plan, recipe=more).method()


def test_an_address_for_reports_that_nobody_sends_is_refused() -> None:
    with pytest.raises(HomebodyError, match="fedmf sends no reports through a proxy: leave out --reports"):
        ServerPlan(RECIPE, reports="127.0.0.1:9093").method()


def test_what_the_runtime_and_the_devices_are_told() -> None:
    plan = ServerPlan(RECIPE, deadline=7, quorum=0.25, least=2, run="abc", reports_wait=9)
    assert plan.reports_wait == 9
    assert (plan.deadline, plan.quorum, plan.least_present) == (7, 0.25, 5)  # a cohort of 5 needs 5
    assert plan.recipe.measured() == [5, 10, 20]
    method = plan.method()
    assert isinstance(method, FedMF)
    assert method.factors == 3
    assert plan.describe() == {
        "run": "abc",
        "method": "fedmf",
        "fields": {"factors": 3},
        "stages": ["clip:norm=1"],
        "seed": 2,
        "protocol": "strict",
        "held_out": None,
        "negatives": 99,
        "cutoffs": [5, 10, 20],
        "measures": True,
        "longest": 5_000,
    }


def test_where_the_database_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServerPlan(RECIPE).database_in(tmp_path) == tmp_path / "server.sqlite"
    assert ServerPlan(RECIPE, database="postgresql://x/y").database_in(tmp_path) == "postgresql://x/y"
    plan = ServerPlan(RECIPE, database="env:HOMEBODY_TEST_URL")
    monkeypatch.delenv("HOMEBODY_TEST_URL", raising=False)
    with pytest.raises(HomebodyError, match="given by the environment variable HOMEBODY_TEST_URL, which is not set"):
        plan.database_in(tmp_path)
    monkeypatch.setenv("HOMEBODY_TEST_URL", "postgresql://secret@x/y")
    assert plan.database_in(tmp_path) == "postgresql://secret@x/y"
    assert "secret@" not in plan.to_toml()
