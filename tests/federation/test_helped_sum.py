"""A secure sum that a helper opens: real devices with real homes and a real proxy, in one process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.federation.helped import URL, Helper
from tests.federation.test_secure_sum import HOMES, Killed, in_letters

from homebody.data.partitions import everything
from homebody.errors import Abandoned, HomebodyError
from homebody.federation import wire
from homebody.federation.device.sums import Sums
from homebody.federation.envelopes import epoch_keys
from homebody.federation.secure_sum.together import add_up_with_helper
from homebody.federation.server import helper as helper_module
from homebody.federation.server.helper import HelperClient
from homebody.federation.server.plan import ServerPlan
from homebody.federation.task import SumTask, Task
from homebody.privacy import HelpedRelease
from homebody.privacy.accountant import epsilon
from homebody.recipe import Recipe
from homebody.simulation import Simulator
from homebody.training import fit

METHODS = {"fedmf": {"factors": 4}, "pfedrec": {"factors": 4}, "fedials": {"factors": 4}}
PLAN = Recipe(
    "fedmf",
    "devices",
    {"factors": 4},
    stages=["secure-sum:range=1000,helper=true"],
    rounds=1,
    seed=5,
    evaluate_every=0,
)
NOISY = replace(PLAN, stages=["clip:norm=1", "secure-sum:helper=true", "gaussian:z=2"], rounds=2)


def train_letters(one: Any) -> list[tuple[str, bytes]]:
    return [(mark, body) for mark, kind, body in one.mail.letters if kind == "train"]


@pytest.mark.parametrize("method", METHODS)
def test_devices_add_up_what_a_simulation_adds_up(village: Callable[..., Any], method: str) -> None:
    plan = replace(PLAN, method=method, fields=METHODS[method], rounds=5, evaluate_every=1, cutoffs=[3])
    one = village(plan)
    fitted = one.fit()
    lines: list[Any] = []
    one.near(fitted.shared, one.simulated(on_round=lines.append).shared, tolerance=1e-4)
    for found, line in zip(one.records.rounds(), lines, strict=True):
        assert found["clients"] == 7
        if method != "fedials":  # whose items are so alike at first that rounding swaps their ranks
            assert found["metrics"] == pytest.approx(line.metrics, abs=1e-4)
    assert one.records.counters() == {}
    assert len(train_letters(one)) == 5 * 4  # one exchange a round


def test_the_server_reads_no_vector_of_one_device(village: Callable[..., Any]) -> None:
    one = village(PLAN)
    one.fit()
    sizes = []
    for _, kind, body in one.mail.answers:
        parts = wire.decode_letter(body)[1]
        if kind == "train" and parts:
            assert parts.keys() == {wire.SUM}
            content = parts[wire.SUM][20:]
            assert content.count(0) < 0.05 * len(content)
            sizes.append(len(content))
    assert len(sizes) == 4


def test_the_helpers_noise_is_charged_once_and_holds_against_the_server(village: Callable[..., Any]) -> None:
    one = village(NOISY)
    fitted = one.fit()
    assert one.told() == ["train/1", "train/2"]
    stated = epsilon([(HelpedRelease(2.0, "replace-one"), 2)], 1e-6).epsilon
    assert one.records.ledger().epsilons(1e-6)["server"] == pytest.approx(stated)
    # It depends on no other device, so a person may count on it.
    assert one.homes[0].ledger(0).epsilons(1e-6)["server"] == pytest.approx(stated)
    assert one.own(0, 0) == one.own(3, 0) == ["train/1", "train/2"]
    assert all(bool(torch.isfinite(value).all()) for value in fitted.shared.values())


def test_noise_is_in_the_sum_once(village: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise of the helper's, and with the same letters, the server adds none of its own."""
    from homebody.federation.secure_sum import helped

    drawn: list[int] = []

    def quiet(self: Any, *given: Any, **rest: Any) -> None:
        original(self, *given, **rest)
        self._draw = lambda depth, entries: drawn.append(depth) or torch.zeros(entries, dtype=torch.int64).numpy()

    original = helped.Helper.__init__
    monkeypatch.setattr(helped.Helper, "__init__", quiet)
    one = village(replace(NOISY, rounds=1))
    fitted = one.fit()
    assert drawn == [20]
    plain = one.simulated  # the same clip, without noise
    one.recipe = replace(one.recipe, stages=["clip:norm=1"])
    one.near(fitted.shared, plain().shared, tolerance=1e-4)


def test_a_device_is_lost(village: Callable[..., Any], town: Callable[..., Any], people: Any) -> None:
    one = village(PLAN, quorum=0.5)
    one.mail.twisted["mark3"] = lambda kind, letter, answer: answer if kind == "query.hello" else None
    one.fit()
    in_letters(one, town(people(), HOMES, replace(PLAN, stages=[]), quorum=0.5), "mark3")
    assert [line["clients"] for line in one.records.rounds()] == [6]


def test_too_few_devices_open_nothing_and_a_new_attempt_is_charged_again(
    village: Callable[..., Any], helper: Helper
) -> None:
    one = village(replace(NOISY, rounds=1), quorum=0.1)
    lost: list[str] = []

    def twist(kind: str, letter: bytes, answer: bytes) -> bytes | None:
        if kind == "train" and len(lost) < 2 and wire.decode_letter(answer)[1]:
            lost.append(kind)
            return None
        return answer

    one.mail.twisted["mark0"] = one.mail.twisted["mark1"] = twist
    one.fit()
    assert len(lost) == 2
    assert one.told() == ["train/1", "train/1#2"]
    assert one.own(0, 0) == ["train/1", "train/1"]  # its vector may have left: other noise, another charge
    assert sum(path.endswith("/set") for path, _ in helper.asked) == 1
    assert len({path for path, _ in helper.asked if path != "/v1/sums"}) == 3  # two epochs, one of them opened


@pytest.mark.parametrize("stored", [False, True])
def test_a_device_that_is_killed_before_or_after_it_answers(
    village: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    one = village(replace(NOISY, rounds=1))
    device, put = one.mail.devices["mark0"], Sums.put
    answer, died, given = device.answer, list[str](), list[bytes]()

    def dying(self: Any, attempt: Any, state: bytes) -> None:
        dies = self is one.homes[0].sums and not died
        if stored or not dies:
            put(self, attempt, state)
        if dies and stored:
            one.homes[0].store.connection.execute("COMMIT")  # what was written stays, as after a kill
            given.append(state)
        if dies:
            died.append("masked")
            raise Killed

    def answering(body: bytes, until: float = math.inf) -> bytes:
        said = answer(body, until)
        if wire.decode_letter(said)[0].get("refused") == "The device cannot answer this now.":
            one.mail.devices["mark0"] = revived = one.device(one.homes[0], one.reporters[0])
            said = revived.answer(body, until)
            if stored:
                assert wire.decode_letter(said)[1][wire.SUM] == given[0]
        return bytes(said)

    monkeypatch.setattr(Sums, "put", dying)
    monkeypatch.setattr(device, "answer", answering)
    one.fit()
    assert died == ["masked"]
    assert one.told() == ["train/1"]
    assert one.own(0, 0) == ["train/1"]
    assert [line["clients"] for line in one.records.rounds()] == [7]


@pytest.mark.parametrize("point", ["begun", "epoch", "set", "answered", "opened"])
def test_a_server_or_a_helper_that_is_killed_goes_on(
    village: Callable[..., Any], helper: Helper, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """One set is opened, whenever the server is killed; the helper is started anew as well."""
    one = village(replace(NOISY, rounds=1))
    put, begin, open_ = one.records.put_sum, HelperClient.begin, HelperClient.open
    died, answers = list[str](), list[bytes]()

    def die(here: str) -> None:
        if here == point and not died:
            died.append(here)
            helper.restart()
            raise Killed

    def putting(attempt: str, people: Any, state: bytes | None, result: bytes | None) -> None:
        put(attempt, people, state, result)
        die("opened" if state is None else "begun" if state.startswith(b"E") else "set")

    def beginning(self: HelperClient, *given: Any) -> Any:
        epoch = begin(self, *given)
        die("epoch")
        return epoch

    def opening(self: HelperClient, *given: Any) -> bytes:
        answers.append(open_(self, *given))
        die("answered")
        return answers[-1]

    monkeypatch.setattr(HelperClient, "begin", beginning)
    monkeypatch.setattr(HelperClient, "open", opening)
    one.records.put_sum = putting
    with pytest.raises(Killed):
        one.fit()
    one.fit()
    assert one.told() == ["train/1"]
    assert [line["clients"] for line in one.records.rounds()] == [7]
    assert one.own(0, 0) == one.own(3, 0) == ["train/1"]
    assert len(set(answers)) == 1
    assert len({body for path, body in helper.asked if path.endswith("/set")}) == 1


def test_a_device_that_the_helper_does_not_know_is_left_out_and_counted(
    village: Callable[..., Any], town: Callable[..., Any], people: Any
) -> None:
    one = village(PLAN, unknown=(3,), quorum=0.5)
    one.fit()
    in_letters(one, town(people(), HOMES, replace(PLAN, stages=[]), quorum=0.5), "mark3")
    assert one.records.counters() == {"refused: The helper does not know the device that signed the message.": 1}
    assert one.records.devices()[3].faults == 1
    assert [line["clients"] for line in one.records.rounds()] == [6]


def test_a_message_of_another_form_is_refused_and_counted(village: Callable[..., Any]) -> None:
    one = village(PLAN, quorum=0.5)

    def cut(kind: str, letter: bytes, answer: bytes) -> bytes:
        header, parts = wire.decode_letter(answer)
        return wire.encode_letter(header, {wire.SUM: parts[wire.SUM][:-1]}) if wire.SUM in parts else answer

    one.mail.twisted["mark3"] = cut
    one.fit()
    (name,) = one.records.counters()
    assert "bytes, and this is not one" in name
    assert [line["clients"] for line in one.records.rounds()] == [6]


class TestLyingServer:
    def letter(self, one: Any) -> tuple[dict[str, Any], dict[str, bytes], SumTask]:
        one.fit()
        body = next(body for mark, body in train_letters(one)[::-1] if mark == "mark0")
        header, parts = wire.decode_letter(body)
        asked = Task.read(header).sum
        assert asked.helper is not None
        return header, parts, asked

    def refused(self, one: Any, header: dict[str, Any], parts: dict[str, bytes]) -> str:
        before = one.own(0, 0)
        said = wire.decode_letter(
            one.mail.devices["mark0"].answer(wire.encode_letter(header, parts), time.monotonic() + 1)
        )
        assert not said[1]
        assert one.own(0, 0) == before
        return str(said[0]["refused"])

    def test_a_key_or_terms_of_its_own(self, village: Callable[..., Any]) -> None:
        """The device asks the helper itself, and charges nobody."""
        one = village(replace(NOISY, rounds=1))
        header, parts, asked = self.letter(one)
        own = replace(asked.helper, key=epoch_keys()[0])
        assert self.refused(one, {**header, "sum": SumTask.helped(own).to_json()}, parts)
        assert any("names another key or other terms" in line["reason"] for line in one.said("failed"))
        unknown = replace(asked.helper, id=bytes(16))
        assert self.refused(one, {**header, "sum": SumTask.helped(unknown).to_json()}, parts)
        assert any("it knows no such epoch" in line["reason"] for line in one.said("failed"))

    def test_other_parameters_than_other_devices_get(self, village: Callable[..., Any]) -> None:
        """By a model of its own the server could tell this device's part of the sum."""
        one = village(replace(PLAN, rounds=1))
        header, parts, _ = self.letter(one)
        assert "about another letter" in self.refused(one, {**header, "shared": "ab" * 16}, parts)

    def test_less_noise_or_another_ring_than_the_method_has(self, village: Callable[..., Any]) -> None:
        """Even if the helper says the same."""
        one = village(replace(NOISY, rounds=1))
        header, parts, asked = self.letter(one)
        for fields in ({"depth": 3}, {"depth": -1}, {"width": 8}, {"entries": 7}, {"least": 0.5}, {"people": 1}):
            terms = replace(asked.terms, **fields)  # type: ignore[arg-type]
            other = SumTask.helped(replace(asked.helper, terms=terms)).to_json()
            assert "The terms of the secure sum" in self.refused(one, {**header, "sum": other}, parts)
        terms = replace(asked.terms, attempt="train/2")
        other = SumTask.helped(replace(asked.helper, terms=terms)).to_json()
        assert "of another round" in self.refused(one, {**header, "sum": other}, parts)

    def test_no_helper_where_the_method_has_one(self, village: Callable[..., Any]) -> None:
        one = village(replace(NOISY, rounds=1))
        header, parts, asked = self.letter(one)
        from homebody.federation.secure_sum.messages import Terms

        terms = Terms(asked.terms.run, asked.terms.attempt, 4, asked.terms.entries, 4)
        said = {"terms": terms.encode().hex(), "exchange": "keys"}
        assert "with a helper, or without one" in self.refused(one, {**header, "sum": said}, parts)
        assert "secure sum" in self.refused(one, {**header, "sum": None}, parts)
        said = {"helper": {**asked.helper.to_json(), "closes": "never"}}
        assert "description of a secure sum" in self.refused(one, {**header, "sum": said}, parts)

    def test_fewer_devices_than_one_takes_part_among(self, village: Callable[..., Any]) -> None:
        one = village(replace(NOISY, rounds=1))
        header, parts, _ = self.letter(one)
        one.homes[0].configure(fewest=4)
        assert "fewer devices than this one takes part among" in self.refused(one, header, parts)

    def test_another_epoch_of_the_same_round_is_another_release(
        self, village: Callable[..., Any], helper: Helper
    ) -> None:
        """The same vector in two sums has two draws of noise: a person is charged for both."""
        one = village(replace(NOISY, rounds=1))
        header, parts, asked = self.letter(one)
        again = helper.asks().begin(bytes(range(16)), asked.terms, 60.0, time.monotonic() + 30)
        letter = wire.encode_letter({**header, "sum": SumTask.helped(again).to_json()}, parts)
        said = wire.decode_letter(one.mail.devices["mark0"].answer(letter))
        assert said[1].keys() == {wire.SUM}
        assert one.own(0, 0) == ["train/1", "train/1"]


class TestHelperClient:
    def test_a_helper_that_is_away_is_waited_for(
        self, village: Callable[..., Any], helper: Helper, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = village(replace(NOISY, rounds=1))
        rests: list[float] = []

        class Time:
            monotonic = staticmethod(time.monotonic)

            @staticmethod
            def sleep(seconds: float) -> None:
                rests.append(seconds)
                helper.away = len(rests) < 3

        monkeypatch.setattr(helper_module, "time", Time)
        helper.away = True
        one.fit()
        assert len(rests) == 3
        assert [line["clients"] for line in one.records.rounds()] == [7]

    def test_a_round_that_the_helper_did_not_begin_is_not_charged_again(
        self, village: Callable[..., Any], helper: Helper, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody was asked anything."""
        one = village(replace(NOISY, rounds=1), deadline=1.0)
        begin, tried = HelperClient.begin, list[bytes]()

        def beginning(self: HelperClient, number: bytes, *given: Any) -> Any:
            helper.away = not tried
            tried.append(number)
            return begin(self, number, *given)

        monkeypatch.setattr(HelperClient, "begin", beginning)
        one.fit()
        assert len(set(tried)) == 2
        assert one.told() == one.own(0, 0) == ["train/1"]
        assert one.records.counters() == {"sums_begun_again": 1}

    def test_a_helper_that_stays_away(self, helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
        from tests.federation.proxy.test_helper import TERMS

        monkeypatch.setattr(helper_module, "_FIRST_PAUSE", 0.01)
        helper.away = True
        with pytest.raises(Abandoned, match=r"cannot be reached \(ConnectError\): see that the proxy runs"):
            helper.asks().begin(bytes(16), TERMS, 60, time.monotonic() + 0.1)

    def test_what_it_is_told(self, helper: Helper) -> None:
        from tests.federation.proxy.test_helper import TERMS

        until = time.monotonic() + 30
        with pytest.raises(HomebodyError, match="does not know this server: have its operator let"):
            helper.asks(known=False).begin(bytes(16), TERMS, 60, until)
        client = helper.asks()
        with pytest.raises(HomebodyError, match="refuses the sum: A sum is open for 1 to 86400 seconds"):
            client.begin(bytes(16), TERMS, 1e6, until)
        epoch = client.begin(bytes(16), TERMS, 60, until)
        with pytest.raises(Abandoned, match="with other terms"):
            client.begin(bytes(16), replace(TERMS, depth=3), 60, until)
        with pytest.raises(Abandoned, match="There is no such sum"):
            client.open(replace(epoch, id=bytes(range(16))), b"", until)


@pytest.mark.parametrize("stages", [PLAN.stages, NOISY.stages, ["clip:norm=1", "secure-sum:helper=true,least=0.1"]])
def test_a_plain_simulation_has_the_conversation_of_devices(
    people: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, stages: list[str]
) -> None:
    sums = list[int]()

    def counted(vectors: Any, *given: Any) -> Any:
        sums.append(len(vectors))
        return add_up_with_helper(vectors, *given)

    monkeypatch.setattr("homebody.federation.secure_sum.together.add_up_with_helper", counted)
    split, recipe = everything(people(), seed=5), replace(PLAN, stages=stages)
    plain, fused = (
        fit(recipe.build(), Simulator(split, fused=how), rounds=2, seed=5, evaluate_every=0) for how in (False, True)
    )
    assert sums == [7, 7]
    for name, value in fused.shared.items():  # the same seed draws the same noise
        torch.testing.assert_close(plain.shared[name], value, rtol=0, atol=1e-4)


def test_a_device_without_a_proxy_says_so(village: Callable[..., Any]) -> None:
    one = village(PLAN)
    one.fit()
    letter = next(body for mark, body in train_letters(one) if mark == "mark3")
    said, parts = wire.decode_letter(one.device(one.homes[3]).answer(letter))
    assert "this device has no proxy" in said["refused"]
    assert not parts


@pytest.mark.parametrize(
    ("stages", "settings", "match"),
    [
        (NOISY.stages, {}, "needs a proxy that opens it: give the server its address"),
        (["clip:norm=1", "secure-sum", "gaussian:z=2"], {"helper": URL}, "leave out --helper"),
        (NOISY.stages, {"helper": "http://example.org:1"}, "reached by https://"),
        (NOISY.stages, {"helper": "example.org"}, "must be https://HOST:PORT"),
        (["secure-sum:helper=true"], {"helper": URL}, "put a Clip before it, or give its range"),
    ],
)
def test_what_a_server_cannot_do_is_refused_before_it_starts(
    stages: list[str], settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(HomebodyError, match=match):
        ServerPlan(replace(PLAN, stages=stages), **settings).method()
