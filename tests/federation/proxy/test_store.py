"""What a proxy keeps: released together, counted once, and with no line from a report to its sender."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as tried
from hypothesis import strategies as st
from tests.federation.proxy.conftest import EPOCH, Device, Upstream, facts, reports, split

from homebody.errors import HomebodyError
from homebody.federation.envelopes import Envelope
from homebody.federation.epoch import Epoch
from homebody.federation.proxy.settings import ProxySettings
from homebody.federation.proxy.store import DATABASE, ProxyStore, SealedBatch, Sender, VerifiedMessage, create

START = 1_000_000.0


def contents(folder: Path) -> bytes:
    """Everything in a folder and below it."""
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


class Kept:
    """A store whose clock stands still unless it is moved."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        given = {"next": "http://localhost:1", "tls": False, "hold": 60.0, "least_devices": 3, "lead": 5.0, **settings}
        self.folder, self.settings, self.now = folder, ProxySettings(**given), START
        create(folder)
        self.store = ProxyStore(folder, self.settings)

    def epoch(self, k: int = 10, seconds: float = 1000.0, epoch: bytes = EPOCH) -> None:
        with self.store.transaction():
            self.store.open_epoch(Epoch.read(facts(self.now + seconds, k, epoch)), self.now)

    def accept(self, *messages: VerifiedMessage) -> list[str]:
        with self.store.transaction():
            return self.store.accept(list(messages), self.now)

    def tick(self, seconds: float = 0.0) -> Any:
        self.now += seconds
        with self.store.transaction():
            return self.store.tick(self.now)

    def cut(self) -> SealedBatch | None:
        with self.store.transaction():
            return self.store.cut()

    def forwarded(self) -> list[SealedBatch]:
        """Everything that is released, passed on."""
        out = []
        while (batch := self.cut()) is not None:
            out.append(batch)
            with self.store.transaction():
                self.store.finish(batch, "forwarded")
        return out

    def again(self) -> None:
        """As after a kill."""
        self.store.close()
        self.store = ProxyStore(self.folder, self.settings)

    def swept(self) -> None:
        for _ in range(1000):
            with self.store.transaction():
                if not self.store.sweep():
                    return
        raise AssertionError("There is always more to sweep.")

    def rows(self, table: str) -> int:
        return int(self.ask(f"SELECT count(*) FROM {table}")[0][0])

    def ask(self, sql: str) -> list[Any]:
        db = sqlite3.connect(self.folder / DATABASE)
        try:
            return db.execute(sql).fetchall()
        finally:
            db.close()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    opened: list[Kept] = []

    def kept(**settings: Any) -> Kept:
        opened.append(Kept(tmp_path, **settings))
        return opened[-1]

    yield kept
    for one in opened:
        one.store.close()


def test_nothing_goes_out_before_enough_devices_and_enough_time(kept: Callable[..., Kept]) -> None:
    here = kept(hold=60.0, least_devices=3)
    here.epoch()
    a, b, c = Device(), Device(), Device()
    assert here.accept(a.message(reports(2)), a.message(reports(2)), b.message(reports(2))) == ["accepted"] * 3
    assert here.tick(500).released == []  # two devices, however long
    assert here.cut() is None
    assert here.accept(c.message(reports(2))) == ["accepted"]
    assert here.tick().released == [8]  # the first has waited for long enough
    assert sum(batch.size for batch in here.forwarded()) == 8
    assert here.store.held() == 0


def test_enough_devices_still_wait_for_their_time(kept: Callable[..., Kept]) -> None:
    here = kept(hold=60.0, least_devices=3)
    here.epoch()
    here.accept(*(Device().message(reports(1)) for _ in range(5)))
    assert here.tick(59.9).released == []
    assert here.tick(0.1).released == [5]


def test_who_reported_before_the_last_release_counts_anew_after_it(kept: Callable[..., Kept]) -> None:
    here = kept(hold=1.0, least_devices=2)
    here.epoch()
    a, b = Device(), Device()
    here.accept(a.message(reports(1)), b.message(reports(1)))
    assert here.tick(1).released == [2]
    here.forwarded()
    here.accept(a.message(reports(1)), a.message(reports(1)))
    assert here.tick(10).released == []
    here.accept(b.message(reports(1)))
    assert here.tick().released == [3]


def test_what_comes_while_a_release_goes_out_waits_for_the_next(kept: Callable[..., Kept]) -> None:
    here = kept(hold=1.0, least_devices=2, batch=3)
    here.epoch()
    here.accept(*(Device().message(reports(2)) for _ in range(4)))
    here.tick(1)
    first = here.cut()
    late = reports(2)
    here.accept(Device().message(late))
    sent = [first, *here.forwarded()]
    assert [batch.size for batch in sent if batch] == [3, 3, 2]
    assert not set(split(late)) & {report for batch in sent if batch for report in split(batch.reports)}
    assert here.tick(5).released == []  # one device


@pytest.mark.random_draws
@pytest.mark.parametrize("heap", [8192, 70, 1])
def test_a_release_is_everything_once_and_in_no_order_of_theirs(
    kept: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch, heap: int
) -> None:
    """1,000 reports of 100 devices: reports of one device that come to lie side by side are as rare as by chance.

    That is 9 on average, all but Poisson; 60 or more of 900 have a chance of at most e⁻⁹ (9e / 60)⁶⁰ < 1e-27.
    """
    monkeypatch.setattr("homebody.federation.proxy.store.HEAP", heap)
    here = kept(hold=0.0, batch=400)
    here.epoch()
    sent = [(device, reports(10)) for device in (Device() for _ in range(100))]
    owner = {report: number for number, (_, sealed) in enumerate(sent) for report in split(sealed)}
    for device, sealed in sent:  # commit by commit
        assert here.accept(device.message(sealed)) == ["accepted"]
    assert here.rows("heaps") == {8192: 1, 70: 15, 1: 34}[heap]
    here.tick()
    batches = here.forwarded()
    assert [batch.size for batch in batches] == [400, 400, 200]
    assert here.rows("heaps") == here.rows("pools") == 0
    assert len({batch.number for batch in batches}) == 3
    came = [report for batch in batches for report in split(batch.reports)]
    assert sorted(came) == sorted(owner)
    order = [owner[report] for report in came]
    assert sum(one == other for one, other in pairwise(order)) < 60
    arrived = {report: place for place, report in enumerate(owner)}
    places = [arrived[report] for report in came]
    mean = sum(place * when for when, place in enumerate(places)) / 1000
    # Uncorrelated: the mean product of two shuffled rankings is 249,500 ± 2,637. Spearman's coefficient of 1,000 ranks
    # is as good as normal, so 9 deviations have a chance of 2e-19; in the order of arrival it would be 31.
    assert abs(mean - 999 / 2 * 999 / 2) < 9 * 2_637


def test_a_heap_is_of_as_many_devices_as_a_release(kept: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homebody.federation.proxy.store.HEAP", 5)
    here = kept(hold=0.0, least_devices=3)
    here.epoch(k=100)
    a, b, c, d = (Device() for _ in range(4))
    for device in (a, a, b, a, b, c, d, a, b):
        here.accept(device.message(reports(4)))
    # Six messages until the third device has come; one heap more for the rest, in which only one is new.
    assert here.ask("SELECT devices, reports FROM heaps ORDER BY heap") == [(3, 24), (1, 12)]
    assert here.ask("SELECT devices, reports FROM pools") == [(4, 36)]
    assert here.tick().released == [36]


def test_nothing_says_in_which_heap_a_sender_reported(
    kept: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the epoch's secret and a key one finds the sender's rows in two lists, alike for the first and the last."""
    monkeypatch.setattr("homebody.federation.proxy.store.HEAP", 4)
    here = kept(least_devices=2)
    here.epoch()
    here.accept(*(Device().message(reports(2)) for _ in range(3)))
    assert here.ask("SELECT count(*) FROM held GROUP BY heap") == [(4,), (2,)]  # the last is alone in its heap
    assert [name for (name,) in here.ask("SELECT name FROM pragma_table_info('quotas')")] == [
        "epoch", "mark", "used", "pool",
    ]  # fmt: skip
    assert here.ask("SELECT epoch, used, pool FROM quotas") == [(1, 2, 1)] * 3
    assert [name for (name,) in here.ask("SELECT name FROM pragma_table_info('accepted')")] == [
        "epoch", "mark", "content",
    ]  # fmt: skip


@pytest.mark.random_draws
def test_rows_of_one_message_lie_under_keys_that_have_nothing_in_common(kept: Callable[..., Kept]) -> None:
    """Each byte of 200 keys takes 139 of 256 values on average. McDiarmid's bound: 70 or fewer have a chance of at most
    16 exp(-2 · 68² / 200) < 2e-19, over all 16 bytes."""
    here = kept()
    here.epoch(k=200)
    sealed = reports(200)
    here.accept(Device().message(sealed))
    rows = here.ask("SELECT key, report FROM held")
    assert sorted(report for _, report in rows) == sorted(split(sealed))
    assert {len(key) for key, _ in rows} == {16}
    for place in range(16):
        assert len({key[place] for key, _ in rows}) > 70
    assert [name for (name,) in here.ask("SELECT name FROM pragma_table_info('held')")] == ["heap", "key", "report"]


def test_a_repetition_is_stored_once_and_another_content_refused(kept: Callable[..., Kept]) -> None:
    here = kept()
    here.epoch()
    device, number = Device(), os.urandom(16)
    message = device.message(reports(3), number=number)
    assert here.accept(message, message) == ["accepted", "repeated"]
    assert here.accept(device.message(reports(3), number=number)) == ["conflict"]
    here.again()
    assert here.accept(message) == ["repeated"]
    assert here.accept(device.message(reports(2), number=number)) == ["conflict"]
    assert here.accept(Device().message(message.envelope.reports, number=number)) == ["accepted"]  # another's number
    assert here.store.held() == 6


def test_a_repetition_is_known_after_its_reports_have_left(kept: Callable[..., Kept]) -> None:
    here = kept(hold=0.0, least_devices=1)
    here.epoch()
    message = Device().message(reports(3))
    here.accept(message)
    here.tick()
    here.forwarded()
    assert here.accept(message) == ["repeated"]
    assert here.store.held() == 0


def test_a_device_sends_k_reports_for_each_of_its_people_and_no_more(kept: Callable[..., Kept]) -> None:
    here = kept()
    here.epoch(k=10)
    one, three = Device(), Device(people=3)
    assert here.accept(one.message(reports(6)), one.message(reports(5))) == ["accepted", "limit"]
    assert here.accept(one.message(reports(4)), one.message(reports(1))) == ["accepted", "limit"]
    assert here.accept(three.message(reports(30)), three.message(reports(1))) == ["accepted", "limit"]
    here.again()
    assert here.accept(one.message(reports(1))) == ["limit"]
    here.tick(100)
    here.forwarded()
    assert here.accept(one.message(reports(1))) == ["limit"]  # of the epoch, not of the release
    assert here.store.held() == 40  # two devices are too few
    other = os.urandom(16)
    here.epoch(epoch=other)
    assert here.accept(one.message(reports(10), epoch=other)) == ["accepted"]


def test_the_proxys_own_limit_holds_where_the_server_asks_for_more(kept: Callable[..., Kept]) -> None:
    here = kept(most=4)
    here.epoch(k=10)
    device = Device()
    assert here.accept(device.message(reports(4)), device.message(reports(1))) == ["accepted", "limit"]


def test_no_more_is_held_than_may_be(kept: Callable[..., Kept]) -> None:
    here = kept(most_held=10, hold=0.0, least_devices=1)
    here.epoch()
    assert here.accept(Device().message(reports(7)), Device().message(reports(4))) == ["accepted", "full"]
    assert here.accept(Device().message(reports(3))) == ["accepted"]
    here.tick()
    assert here.cut() is not None  # on the disk until the next hop has it
    assert here.accept(Device().message(reports(1))) == ["full"]
    with here.store.transaction():
        here.store.finish(here.store.under_way()[0], "forwarded")
    assert here.accept(Device().message(reports(1))) == ["accepted"]


def test_an_epoch_closes_a_little_before_the_next_hop_closes_it(kept: Callable[..., Kept]) -> None:
    here = kept(lead=5.0, hold=600.0, least_devices=2)
    here.epoch(seconds=100.0)
    here.accept(Device().message(reports(1)), Device().message(reports(2)))
    assert here.store.epochs()[EPOCH].closes == START + 95
    ticked = here.tick(94.9)
    assert (ticked.released, ticked.closed) == ([], {})
    ticked = here.tick(0.1)
    assert (ticked.released, ticked.closed) == ([3], {EPOCH: 0})  # enough devices: it is time
    assert sum(batch.size for batch in here.forwarded()) == 3
    assert here.accept(Device().message(reports(1))) == ["closed"]


def test_a_short_epoch_closes_a_tenth_of_its_time_early_at_most(kept: Callable[..., Kept]) -> None:
    here = kept(lead=5.0)
    here.epoch(seconds=10.0)
    assert here.store.epochs()[EPOCH].closes == START + 9


def test_a_closed_epoch_takes_nothing_even_before_anybody_looks_at_the_clock(kept: Callable[..., Kept]) -> None:
    here = kept()
    here.epoch(seconds=100.0)
    here.now += 96
    assert here.accept(Device().message(reports(1))) == ["closed"]
    assert here.accept(Device().message(reports(1), epoch=os.urandom(16))) == ["unknown"]


def test_reports_of_too_few_are_dropped_with_their_epoch_and_counted(kept: Callable[..., Kept]) -> None:
    here = kept(least_devices=3)
    here.epoch(seconds=100.0)
    here.accept(Device().message(reports(4)), Device().message(reports(3)))
    ticked = here.tick(200)
    assert (ticked.closed, ticked.why) == ({EPOCH: 7}, {EPOCH: "too few devices: 2 of 3"})
    assert here.forwarded() == []
    assert here.store.counters()["dropped: too few devices"] == 7
    here.swept()
    assert here.rows("held") == here.rows("pools") == here.store.held() == 0


def test_with_an_epoch_go_its_secret_and_its_lists(kept: Callable[..., Kept]) -> None:
    here = kept(least_devices=1, hold=0.0)
    here.epoch(seconds=100.0)
    here.accept(*(Device().message(reports(1)) for _ in range(30)))
    (file,) = (here.folder / "epochs").iterdir()
    assert (file.name, stat.S_IMODE(file.stat().st_mode)) == (f"{EPOCH.hex()}.secret", 0o600)
    secret = file.read_bytes()
    assert not [path for path in here.folder.iterdir() if path.is_file() and secret in path.read_bytes()]
    marks = [mark for (mark,) in here.ask("SELECT mark FROM accepted UNION ALL SELECT mark FROM quotas")]
    assert (len(secret), len(marks)) == (32, 60)
    here.tick(100)
    here.forwarded()
    here.swept()
    assert here.rows("accepted") == here.rows("quotas") == 0
    assert here.store.checkpoint("TRUNCATE")
    left = contents(here.folder)
    assert secret not in left
    assert not [mark for mark in marks if mark in left]  # overwritten, too
    assert here.accept(Device().message(reports(1))) == ["closed"]
    here.again()
    assert here.accept(Device().message(reports(1))) == ["closed"]


def test_an_epoch_without_its_secret_is_closed(kept: Callable[..., Kept]) -> None:
    """As after a power failure in the middle of closing it: nothing is taken, and what enough sent goes out."""
    here = kept(least_devices=2)
    here.epoch()
    here.accept(Device().message(reports(2)), Device().message(reports(1)))
    (here.folder / "epochs" / f"{EPOCH.hex()}.secret").unlink()
    assert here.accept(Device().message(reports(1))) == ["closed"]
    ticked = here.tick()
    assert (ticked.released, ticked.closed) == ([3], {EPOCH: 0})
    assert here.store.epochs()[EPOCH] is None


def test_a_secret_that_was_left_behind_goes_at_the_start(kept: Callable[..., Kept]) -> None:
    here = kept()
    here.epoch()
    stale = here.folder / "epochs" / f"{'77' * 16}.secret"
    stale.write_bytes(os.urandom(32))
    here.store.tidy_secrets()
    assert [path.name for path in stale.parent.iterdir()] == [f"{EPOCH.hex()}.secret"]
    assert here.accept(Device().message(reports(1))) == ["accepted"]


def test_lists_of_two_epochs_do_not_join(kept: Callable[..., Kept]) -> None:
    """The same device, number and content, in two epochs: nothing of the two lists is the same."""
    here = kept()
    other, device, number, sealed = bytes(16), Device(), os.urandom(16), reports(2)
    here.epoch()
    here.epoch(epoch=other)
    here.accept(*(device.message(sealed, epoch=epoch, number=number) for epoch in (EPOCH, other)))
    here.store.allow(device.key, device.sender)
    marks = [mark for (mark,) in here.ask("SELECT mark FROM quotas")]
    marks += [one for row in here.ask("SELECT mark, content FROM accepted") for one in row]
    marks += here.store.senders()
    assert len(set(marks)) == len(marks) == 7
    from hashlib import blake2b

    assert blake2b(device.key, digest_size=16).digest() not in marks


def test_what_has_left_is_overwritten(kept: Callable[..., Kept]) -> None:
    here = kept(least_devices=1, hold=0.0)
    here.epoch()
    sealed = reports(10)
    here.accept(Device().message(sealed))
    here.tick()
    here.store.checkpoint("TRUNCATE")
    assert split(sealed)[0] in (here.folder / DATABASE).read_bytes()
    here.forwarded()
    here.store.checkpoint("TRUNCATE")
    left = contents(here.folder)
    assert not [report for report in split(sealed) if report in left]


def test_what_is_released_goes_out_after_its_epoch_has_closed(kept: Callable[..., Kept]) -> None:
    here = kept(least_devices=1, hold=0.0, batch=2)
    here.epoch(seconds=100.0)
    here.accept(Device().message(reports(6)))
    here.tick()
    first = here.cut()
    assert first is not None
    here.tick(100)
    here.swept()
    here.again()
    assert here.store.under_way() == [first]
    assert sum(batch.size for batch in here.forwarded()) == 4
    assert here.store.counters()["forwarded_reports"] == 4  # the first is not done yet


def test_an_epoch_that_the_next_hop_has_closed_is_over_here_too(kept: Callable[..., Kept]) -> None:
    here = kept(least_devices=1, hold=10.0, batch=2)
    here.epoch()
    here.accept(Device().message(reports(6)))
    here.tick(10)
    batch = here.cut()
    here.accept(Device().message(reports(1)))
    assert batch is not None
    with here.store.transaction():
        here.store.finish(batch, "closed by the next hop")
        assert here.store.end_epoch(EPOCH, "closed by the next hop") == 5
    assert here.cut() is None
    assert here.store.counters()["dropped: closed by the next hop"] == 7
    assert here.accept(Device().message(reports(1))) == ["closed"]
    here.swept()
    assert here.store.held() == here.rows("held") == 0


def test_nothing_goes_out_before_it_is_of_as_many_people_as_the_server_counts_on(kept: Callable[..., Kept]) -> None:
    here = kept(hold=0.0, least_devices=1)
    with here.store.transaction():
        here.store.open_epoch(Epoch.read({**facts(here.now + 1000, k=4), "among": 3}), here.now)
    household = Device(people=2)
    here.accept(household.message(reports(8)))
    assert here.tick().released == []
    here.accept(Device().message(reports(4)))
    assert here.tick().released == [12]
    here.accept(Device().message(reports(4)))
    assert here.tick().released == [], "nor what comes after it"
    ticked = here.tick(1000)
    assert (ticked.closed, ticked.why) == ({EPOCH: 4}, {EPOCH: "too few reports: 4 of 9"})
    assert here.store.counters()["dropped: too few reports"] == 4


def test_a_clock_that_is_put_back_holds_nothing_for_ever(kept: Callable[..., Kept]) -> None:
    here = kept(hold=60.0, least_devices=1)
    here.epoch(seconds=100_000)
    here.accept(Device().message(reports(1)))
    here.now -= 50_000
    assert here.tick().released == []
    assert here.tick(59).released == []
    assert here.tick(1).released == [1]


def test_what_was_first_said_of_an_epoch_stands(kept: Callable[..., Kept]) -> None:
    here = kept()
    here.epoch(k=10)
    with here.store.transaction():
        here.store.open_epoch(Epoch.read({**facts(START + 5000, k=99), "key": "cd" * 32}), here.now)
    found = here.store.epochs()[EPOCH]
    assert found is not None
    assert (found.key.hex(), found.k) == ("ab" * 32, 10)


def test_a_proxys_batch_counts_for_as_many_devices_as_must_have_sent_it(kept: Callable[..., Kept]) -> None:
    here = kept(hold=0.0, least_devices=5)
    here.epoch(k=10)
    upstream, two = Upstream(), Upstream(devices=2)
    here.accept(upstream.message(reports(10)))  # of one device, for all that is known
    assert here.tick().released == []
    here.accept(upstream.message(reports(9)), two.message(reports(50)))  # of none for certain, and of two
    assert here.tick().released == []
    here.accept(two.message(reports(19)))  # each batch counts
    assert here.tick().released == []
    here.accept(Device().message(reports(1)))
    assert here.tick().released == [89]
    here.accept(upstream.message(reports(50)))
    assert here.tick().released == [50]


def test_batches_of_one_epoch_do_not_stand_in_the_way_of_another(kept: Callable[..., Kept]) -> None:
    here = kept(hold=0.0, least_devices=1, batch=1)
    other = bytes(16)
    here.epoch()
    here.epoch(epoch=other)
    here.accept(Device().message(reports(10)), Device().message(reports(2), epoch=other))
    here.tick()
    epochs = []
    while (batch := here.cut()) is not None:
        epochs.append(batch.epoch)
    assert (epochs.count(EPOCH), epochs.count(other)) == (4, 2)


def test_nobody_is_known_by_key(kept: Callable[..., Kept]) -> None:
    here = kept()
    devices = [Device() for _ in range(3)]
    for device in devices:
        here.store.allow(device.key, device.sender)
    assert here.store.senders() == {here.store.mark(device.key): device.sender for device in devices}
    assert here.store.forbid(devices[0].key)
    assert not here.store.forbid(devices[0].key)
    assert len(here.store.senders()) == 2
    here.store.checkpoint("TRUNCATE")
    assert not [d for d in devices if d.key in (here.folder / DATABASE).read_bytes()]


def test_a_lost_database_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(HomebodyError, match="has lost its database"):
        ProxyStore(tmp_path, ProxySettings(next="http://localhost:1"))


@contextmanager
def somewhere() -> Iterator[Path]:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        yield Path(folder)


@tried(max_examples=25, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.integers(0, 5), st.integers(1, 12)),
            st.tuples(st.just("repeat"), st.integers(0, 50), st.just(0)),
            st.tuples(st.just("wait"), st.integers(0, 80), st.just(0)),
            st.tuples(st.sampled_from(["cut", "lose", "finish", "kill", "sweep"]), st.just(0), st.just(0)),
        ),
        min_size=5,
        max_size=60,
    ),
    least=st.integers(1, 3),
    batch=st.integers(1, 9),
    heap=st.sampled_from([1, 10, 8192]),
)
def test_whatever_happens_each_report_arrives_once_or_is_counted(
    steps: list[tuple[str, int, int]], least: int, batch: int, heap: int
) -> None:
    """In any order of messages, repetitions, waits, batches whose answer is lost, and kills."""
    with somewhere() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("homebody.federation.proxy.store.HEAP", heap)
        here = Kept(folder, hold=30.0, least_devices=least, batch=batch)
        here.epoch(k=20, seconds=300.0)
        devices = [Device() for _ in range(6)]
        taken: dict[bytes, list[bytes]] = {}
        sent: list[VerifiedMessage] = []
        used = dict.fromkeys(range(6), 0)
        arrived: dict[bytes, bytes] = {}

        def pass_on(answered: bool) -> None:
            for one in here.store.under_way():
                arrived.setdefault(one.number, one.reports)
                if answered:
                    with here.store.transaction():
                        here.store.finish(one, "forwarded")

        for step, what, size in steps:
            if step == "send":
                sent.append(devices[what].message(reports(size)))
                (outcome,) = here.accept(sent[-1])
                if here.now >= START + 295:
                    assert outcome == "closed"
                elif used[what] + size > 20:
                    assert outcome == "limit"
                else:
                    assert outcome == "accepted"
                    used[what] += size
                    taken[sent[-1].envelope.number] = split(sent[-1].envelope.reports)
            elif step == "repeat" and what < len(sent):
                (outcome,) = here.accept(sent[what])
                if here.now < START + 295 and sent[what].envelope.number in taken:
                    assert outcome == "repeated"
            elif step == "wait":
                here.tick(what)
            elif step == "cut":
                here.cut()
            elif step in ("lose", "finish"):
                pass_on(step == "finish")
            elif step == "kill":
                here.again()
            else:
                here.swept()
        here.tick(400)
        while here.cut() is not None or here.store.under_way():
            pass_on(True)
        here.swept()
        came = [report for batch in arrived.values() for report in split(batch)]
        expected = {report for some in taken.values() for report in some}
        assert len(came) == len(set(came))
        assert set(came) <= expected
        assert len(came) + here.store.counters().get("dropped: too few devices", 0) == len(expected)
        assert here.store.held() == here.rows("held") == here.rows("accepted") == here.rows("quotas") == 0
        here.store.close()


def test_longer_reports_stay_whole_and_their_epoch_takes_no_others(tmp_path: Path) -> None:
    """Of 72 bytes, sealed; in batches of as many bytes as one-bit reports take, and of another length at no time."""
    kept = Kept(tmp_path, least_devices=1, hold=0.0, batch=5)
    with kept.store.transaction():
        kept.store.open_epoch(Epoch.read({**facts(kept.now + 1000, 4), "bytes": 24}), kept.now)
    sent = [os.urandom(72) for _ in range(4)]
    device, sender = os.urandom(32), Sender(False, 2)
    long = Envelope("message", EPOCH, os.urandom(16), b"".join(sent), each=72)
    short = Envelope("message", EPOCH, os.urandom(16), os.urandom(2 * 52))
    messages = [VerifiedMessage(device, sender, envelope) for envelope in (long, short, long)]
    assert kept.accept(*messages) == ["accepted", "other size", "repeated"]
    more = [os.urandom(72) for _ in range(4)]
    again = Envelope("message", EPOCH, os.urandom(16), b"".join(more), each=72)
    assert kept.accept(VerifiedMessage(device, sender, again)) == ["accepted"]
    kept.tick(1.0)
    kept.again()
    first = kept.cut()
    assert first is not None
    assert (first.size, len(first.reports)) == (5, 5 * 72)
    kept.again()
    assert kept.store.under_way() == [first]
    rest = kept.forwarded()
    whole = first.reports + b"".join(batch.reports for batch in rest)
    assert sorted(whole[at : at + 72] for at in range(0, len(whole), 72)) == sorted(sent + more)


def test_a_store_of_short_reports_alone_is_brought_forward(tmp_path: Path) -> None:
    """With a batch that is under way."""
    kept = Kept(tmp_path, least_devices=1, hold=0.0)
    kept.epoch()
    kept.accept(VerifiedMessage(os.urandom(32), Sender(False, 1), Envelope("message", EPOCH, bytes(16), bytes(3 * 52))))
    kept.tick(1.0)
    batch = kept.cut()
    kept.store.close()
    with closing(sqlite3.connect(tmp_path / "proxy.sqlite")) as database:
        (made,) = database.execute("SELECT sql FROM sqlite_master WHERE name = 'batches'").fetchone()
        database.executescript(
            "ALTER TABLE batches RENAME TO other; "
            + made.replace("length(reports) % size = 0", "length(reports) = 52 * size")
            + "; INSERT INTO batches SELECT * FROM other; DROP TABLE other; "
            "UPDATE homebody_schema SET version = 2 WHERE component = 'proxy';"
        )
    kept.again()
    assert kept.store.under_way() == [batch]
