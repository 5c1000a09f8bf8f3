"""Messages over real sockets: a SuperLink in its own process, with TLS and registered keys."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.proto import fleet_pb2 as fleet
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
from flwr.proto.node_pb2 import Node
from tests.processes import PATIENCE
from tests.warm import Nest

from homebody.errors import HomebodyError
from homebody.federation.flower import link as flower_link
from homebody.federation.flower.gateway import OPERATOR, operator_token
from homebody.federation.flower.link import Fleet, Letter, Link, LinkDown, Refused, Reply, Untrusted, fingerprint
from homebody.federation.flower.protocol import encode_message
from homebody.federation.service.certificates import make_authority

Joined = Callable[[], tuple[Fleet, int]]


@pytest.fixture
def link(ground: Any) -> Iterator[Link]:
    with Link(ground.address, ca=ground.ca, secret=ground.secret) as made:
        made.open()
        yield made


@pytest.fixture
def joined(ground: Any, link: Link) -> Iterator[Joined]:
    """Makes devices that have joined, and sees them leave."""
    with ExitStack() as stack:

        def join() -> tuple[Fleet, int]:
            private, public = ground.device()
            link.register(public, "a device")
            device = stack.enter_context(Fleet(ground.address, ca=ground.ca, key=private))
            return device, device.join()

        yield join


def ask(link: Link, node: int, body: bytes = b"", *, kind: str = "train", deadline: float = 30.0) -> str:
    (number,) = link.send({node: (kind, body)}, deadline)
    return number


def letter_of(device: Fleet) -> Letter:
    letter = device.pull(PATIENCE)
    assert letter is not None
    return letter


@pytest.mark.parametrize("size", [0, 200_000, 5_000_000])
def test_a_body_goes_there_and_back(link: Link, joined: Joined, size: int) -> None:
    device, node = joined()
    sent, answered = os.urandom(size), os.urandom(size)
    number = ask(link, node, sent, kind="query.hello")
    letter = letter_of(device)
    assert (letter.message, letter.kind, letter.body) == (number, "query.hello", sent)
    assert 0 < letter.created + letter.ttl - time.time() <= 30
    assert device.answer(letter, answered)
    assert link.receive([number], PATIENCE) == [Reply(number, node, answered, "")]
    # Each is given once.
    assert device.pull(0.0) is None


def test_devices_are_known_by_their_keys(ground: Any, link: Link) -> None:
    private, public = ground.device()
    link.register(public, "one")
    link.register(public + b" a comment", "the same again")
    before = link.nodes()
    assert fingerprint(public) not in before
    with Fleet(ground.address, ca=ground.ca, key=private) as device:
        node = device.join()
        assert link.nodes() == before | {fingerprint(public): node}
    assert link.nodes() == before


def test_several_are_asked_and_answer_in_any_order(link: Link, joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    # So small that each goes in a request of its own, and is asked about in one of its own.
    monkeypatch.setattr(flower_link, "_REQUEST", 1000)
    monkeypatch.setattr(flower_link, "_ASKED_AT_ONCE", 1)
    devices = dict(reversed(joined()) for _ in range(3))  # type: ignore[misc]
    sent = link.send({node: ("train", str(node).encode() * 50) for node in devices}, 30.0)
    assert sorted(sent.values()) == sorted(devices)
    for node, device in reversed(devices.items()):
        letter = letter_of(device)
        assert letter.body == str(node).encode() * 50
        assert device.answer(letter, b"from " + str(node).encode())
    replies: list[Reply] = []
    while len(replies) < 3:
        got = link.receive(set(sent) - {reply.message for reply in replies}, PATIENCE)
        assert got
        replies += got
    assert {reply.node: reply.body for reply in replies} == {node: b"from " + str(node).encode() for node in devices}


def test_pulls_are_held_until_there_is_something(link: Link, joined: Joined) -> None:
    device, node = joined()
    got: list[Letter | None] = []
    pulling = threading.Thread(target=lambda: got.append(device.pull(PATIENCE)))
    pulling.start()
    time.sleep(0.5)
    number = ask(link, node, b"now")
    pulling.join(300)
    assert not pulling.is_alive()
    assert got[0] is not None
    replies: list[Reply] = []
    receiving = threading.Thread(target=lambda: replies.extend(link.receive([number], PATIENCE)))
    receiving.start()
    time.sleep(0.5)
    assert device.answer(got[0], b"then")
    receiving.join(300)
    assert [reply.body for reply in replies] == [b"then"]


def test_nothing_comes_of_waiting_for_nothing(link: Link, joined: Joined) -> None:
    device, node = joined()
    assert device.pull(0.3) is None
    assert link.receive([], PATIENCE) == []
    assert link.receive([ask(link, node)], 0.3) == []


def test_a_node_that_does_not_exist_gets_nothing(link: Link, joined: Joined) -> None:
    _, node = joined()
    assert list(link.send({node: ("train", b""), 12345: ("train", b"")}, 30.0).values()) == [node]
    with pytest.raises(ValueError, match="'Train!'"):
        link.send({node: ("Train!", b"")}, 30.0)
    with pytest.raises(ValueError, match="deadline"):
        link.send({node: ("train", b"")}, 0.0)


def test_an_answer_after_the_deadline_is_not_taken(link: Link, joined: Joined) -> None:
    device, node = joined()
    number = ask(link, node, deadline=2.0)
    letter = letter_of(device)
    time.sleep(max(0.0, letter.created + letter.ttl - time.time()) + 0.1)
    assert not device.answer(letter, b"late")
    assert link.receive([number], PATIENCE) == [Reply(number, node, None, "It is too late for an answer.")]
    never_pulled = ask(link, node, deadline=1.5)
    time.sleep(1.7)
    assert device.pull(0.0) is None
    assert [reply.error for reply in link.receive([never_pulled], PATIENCE)] == ["It is too late for an answer."]


def test_only_the_first_answer_is_taken(link: Link, joined: Joined) -> None:
    device, node = joined()
    number = ask(link, node)
    letter = letter_of(device)
    assert device.answer(letter, b"first")
    # The same again, as after a connection that broke before it was heard that it was taken.
    assert device.answer(letter, b"first")
    assert not device.answer(letter, b"second")
    assert [reply.body for reply in link.receive([number], PATIENCE)] == [b"first"]
    assert not device.answer(letter, b"first")
    assert link.receive([number], 0.0) == []


def test_nobody_answers_in_anothers_name(link: Link, joined: Joined) -> None:
    asked, node = joined()
    other, others_node = joined()
    number = ask(link, node)
    letter = letter_of(asked)
    assert not other.answer(letter._replace(node=others_node), b"as itself")
    # What Flower lets pass: signed by one, in the name of the other. It takes the message's number, which cannot be
    # guessed; even then the nonce is wrong.
    metadata = Metadata(
        run_id=letter.run,
        message_id="f" * 64,
        src_node_id=node,
        dst_node_id=1,
        reply_to_message_id=number,
        message_type="train",
        created_at=letter.created,
        ttl=letter.ttl,
    )
    request = fleet.PushMessagesRequest(
        node=Node(node_id=others_node),
        messages_list=[Message(metadata=metadata, content=encode_message(bytes(16), b"forged"))],
        message_object_trees=[ObjectTree(object_id="f" * 64)],
    )
    assert other._ask("push-messages", request, fleet.PushMessagesResponse).objects_to_push
    (reply,) = link.receive([number], PATIENCE)
    assert reply == Reply(number, node, None, "The answer is not from the device that was asked.")


def test_pulling_for_another_is_refused(link: Link, joined: Joined) -> None:
    (_, node), (other, own) = joined(), joined()
    other._node = node
    with pytest.raises(Refused, match="401") as refused:
        other.pull(PATIENCE)
    assert refused.value.status == 401
    other._node = own


def test_what_is_no_answer_of_ours_is_an_error(link: Link, joined: Joined) -> None:
    device, node = joined()
    number = ask(link, node)
    letter = letter_of(device)
    metadata = Metadata(
        run_id=letter.run,
        message_id="e" * 64,
        src_node_id=node,
        dst_node_id=1,
        reply_to_message_id=number,
        message_type="train",
        created_at=letter.created,
        ttl=letter.ttl,
    )
    message = Message(metadata=metadata)
    message.content.SetInParent()
    request = fleet.PushMessagesRequest(
        node=Node(node_id=node), messages_list=[message], message_object_trees=[ObjectTree(object_id="e" * 64)]
    )
    device._ask("push-messages", request, fleet.PushMessagesResponse)
    assert [reply.error for reply in link.receive([number], PATIENCE)] == ["The answer is no message of Homebody's."]


def test_a_key_that_is_not_registered_stays_outside(ground: Any, link: Link) -> None:
    private, public = ground.device()
    with Fleet(ground.address, ca=ground.ca, key=private) as device:
        with pytest.raises(Refused) as refused:
            device.join()
        assert refused.value.status == 412
        link.register(public, "now it is")
        device.join()
        link.unregister(public)
        link.unregister(public)
        with pytest.raises(Refused) as refused:
            device.pull(PATIENCE)
        assert refused.value.status == 401
        with pytest.raises(Refused, match="taken off"):
            link.register(public, "again")


def test_no_key_registers_itself_even_past_the_door(ground: Any) -> None:
    private, _ = ground.device()
    with Fleet(ground.address, ca=ground.ca, key=private) as device:
        request = fleet.RegisterNodeFleetRequest(public_key=device._public)
        for shown, status in (({}, 404), ({OPERATOR: operator_token(ground.secret)}, 412)):
            headers = device._signed() | shown
            with pytest.raises(Refused) as refused:
                device._wire.ask("/v1/fleet/register-node", request, fleet.RegisterNodeFleetResponse, headers)
            assert refused.value.status == status


def test_too_large_an_answer_is_refused_and_a_smaller_one_is_not(link: Link, joined: Joined) -> None:
    device, node = joined()
    number = ask(link, node)
    letter = letter_of(device)
    with pytest.raises(Refused) as refused:
        device.answer(letter, bytes(9 << 20))
    assert refused.value.status == 413
    assert device.answer(letter, b"small")
    assert [reply.body for reply in link.receive([number], PATIENCE)] == [b"small"]


def test_a_device_reads_no_more_than_its_limit(ground: Any, link: Link) -> None:
    private, public = ground.device()
    link.register(public, "small")
    with Fleet(ground.address, ca=ground.ca, key=private, limit=100_000) as device:
        node = device.join()
        ask(link, node, bytes(100_000))
        with pytest.raises(Refused) as refused:
            device.pull(PATIENCE)
        assert refused.value.status == 413
        ask(link, node, b"fits")
        assert letter_of(device).body == b"fits"


def test_another_authority_is_not_trusted(ground: Any, tmp_path: Path) -> None:
    make_authority(tmp_path)
    other = (tmp_path / "ca.pem").read_bytes()
    with Link(ground.address, ca=other, secret=ground.secret) as link, pytest.raises(Untrusted, match="not accepted: "):
        link.open()
    with Fleet(ground.address, ca=other, key=ground.device()[0]) as device, pytest.raises(Untrusted):
        device.join()


def test_what_was_fetched_is_not_lost_when_the_rest_fails(
    link: Link, joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower_link, "_ASKED_AT_ONCE", 1)
    device, node = joined()
    numbers = [ask(link, node), ask(link, node)]
    assert device.answer(letter_of(device), b"first")
    asked, real = [], link._wire.ask

    def cut(path: str, *more: Any, **named: Any) -> Any:
        asked.append(path)
        if len(asked) == 2:
            raise LinkDown("cut")
        return real(path, *more, **named)

    monkeypatch.setattr(link._wire, "ask", cut)
    assert [reply.body for reply in link.receive(numbers, PATIENCE)] == [b"first"]


def test_without_the_secret_nothing_is_the_operators(ground: Any) -> None:
    with Link(ground.address, ca=ground.ca, secret=b"not the operator's") as link:
        with pytest.raises(Refused) as refused:
            link.register(ground.device()[1], "mine")
        assert refused.value.status == 404
        with pytest.raises(Refused) as refused:
            link.open()
        assert refused.value.status == 404


def test_a_wrong_clock_is_put_right(ground: Any, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    private, public = ground.device()
    link.register(public, "a week ahead")
    wrong = SimpleNamespace(time=lambda: time.time() + 7 * 86400, monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr("homebody.federation.flower.fleet.time", wrong)
    with Fleet(ground.address, ca=ground.ca, key=private) as device:
        number = ask(link, device.join())
        assert device.answer(letter_of(device), b"in time")
    assert link.receive([number], PATIENCE) != []


def test_opening_again_drops_what_was_under_way(ground: Any, link: Link, joined: Joined) -> None:
    device, node = joined()
    number = ask(link, node)
    letter = letter_of(device)
    # As a server does that was killed and comes back.
    with Link(ground.address, ca=ground.ca, secret=ground.secret) as next_link:
        next_link.open()
        assert not device.answer(letter, b"to the old run")
        with pytest.raises(Refused):
            link.receive([number], 0.0)
        again = ask(next_link, node, b"new")
        assert letter_of(device).body == b"new"
        assert next_link.receive([again], 0.0) == []


def test_a_run_is_renewed_when_it_has_carried_much(link: Link, joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_link, "_MESSAGES_OF_A_RUN", 2)
    device, node = joined()
    runs = set()
    for _ in range(4):
        number = ask(link, node)
        letter = letter_of(device)
        runs.add(letter.run)
        assert device.answer(letter, b"")
        assert [reply.error for reply in link.receive([number], PATIENCE)] == [""]
    assert len(runs) == 2
    # Never while somebody has still to answer.
    for _ in range(4):
        ask(link, node)
    assert len({letter_of(device).run for _ in range(4)} - runs) == 1


def test_a_killed_device_comes_back(ground: Any, link: Link, warm: Nest) -> None:
    private, public = ground.device()
    link.register(public, "killed")
    key = ground.folder / "killed.key"
    key.write_bytes(private)
    code = (
        "import sys, time; from pathlib import Path; from homebody.federation.flower.link import Fleet\n"
        "device = Fleet(sys.argv[1], ca=Path(sys.argv[2]).read_bytes(), key=Path(sys.argv[3]).read_bytes())\n"
        "print(device.join(), flush=True); print(device.pull(600.0).body.decode(), flush=True); device.pull(600.0)\n"
    )
    command = [sys.executable, "-c", code, ground.address, str(ground.folder / "ca.pem"), str(key)]
    with warm.popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        node = int(process.stdout.readline())
        lost = ask(link, node, b"lost")
        assert process.stdout.readline() == "lost\n"
        time.sleep(0.3)
        # Its next pull is held; what is sent from now on must not be given to it.
        process.kill()
        process.wait()
    kept = ask(link, node, b"kept")
    # Still held for online, it may join again only because it knows its number.
    with Fleet(ground.address, ca=ground.ca, key=private) as forgetful:
        with pytest.raises(Refused) as refused:
            forgetful.join()
        assert refused.value.status == 412
    with Fleet(ground.address, ca=ground.ca, key=private, last_node=node) as device:
        assert device.join() == node
        assert device.answer(letter_of(device), b"here")
        assert link.receive([lost, kept], PATIENCE) == [Reply(kept, node, b"here", "")]
        # Delivered once: it is for the deadline to end it.
        assert link.receive([lost], 0.0) == []
    assert link.receive([lost], 0.0) == [Reply(lost, node, None, "The device is gone.")]


def test_a_killed_superlink_comes_back_empty(own_ground: Any, warm: Nest) -> None:
    own_ground.popen = warm.popen
    private, public = own_ground.device()
    with (
        Link(own_ground.address, ca=own_ground.ca, secret=own_ground.secret) as link,
        Fleet(own_ground.address, ca=own_ground.ca, key=private) as device,
    ):
        with pytest.raises(LinkDown):
            link.open()
        with pytest.raises(LinkDown):
            device.join()
        own_ground.start()
        link.register(public, "a device")
        link.open()
        number = ask(link, device.join(), b"before")
        letter = letter_of(device)
        own_ground.kill()
        with pytest.raises(LinkDown):
            device.answer(letter, b"nobody there")
        with pytest.raises(LinkDown):
            link.receive([number], PATIENCE)
        own_ground.start()
        with pytest.raises(Refused) as refused:
            device.pull(PATIENCE)
        assert refused.value.status == 401
        with pytest.raises(Refused) as refused:
            device.answer(letter, bytes(1 << 20))
        assert refused.value.status == 401
        with pytest.raises(Refused):
            link.receive([number], PATIENCE)
        link.register(public, "a device")
        link.open()
        node = device.join()
        assert not device.answer(letter, b"to nobody")
        again = ask(link, node, b"after")
        assert device.answer(letter_of(device), b"back")
        assert link.receive([again], PATIENCE) == [Reply(again, node, b"back", "")]


def test_a_stock_superlink_carries_messages_too(own_ground: Any, tmp_path: Path) -> None:
    stock = Path(sys.executable).with_name("flower-superlink")
    if not stock.exists():
        pytest.skip("no flower-superlink beside this Python")
    command = [stock, "--insecure", "--isolation", "process", "--host", "127.0.0.1", "--port", str(own_ground.port)]
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(tmp_path / "flwr")}
    own_ground.process = subprocess.Popen(
        [*command, "--superexec-auth-secret-file", str(own_ground.folder / "secret")],
        env=os.environ | quiet,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    own_ground.await_port(own_ground.process)
    private, public = own_ground.device()
    with (
        Link(own_ground.address, ca=None, secret=own_ground.secret) as link,
        Fleet(own_ground.address, ca=None, key=private) as device,
    ):
        link.register(public, "a device")
        link.open()
        number = ask(link, device.join(), b"asked")
        letter = letter_of(device)
        assert (letter.body, device.answer(letter, b"answered")) == (b"asked", True)
        assert [reply.body for reply in link.receive([number], PATIENCE)] == [b"answered"]
        assert device.pull(0.2) is None
        assert fingerprint(public) in link.nodes()


@pytest.mark.parametrize("address", ["", "a b:1", "host", "host:port", "host:1/path", "me@host:1", "host:99999"])
def test_what_is_no_address_is_said(address: str, ground: Any) -> None:
    with pytest.raises(HomebodyError, match="not an address"):
        Link(address, ca=ground.ca, secret=ground.secret)


def test_without_tls_only_this_machine_is_spoken_to(ground: Any) -> None:
    with pytest.raises(HomebodyError, match="another machine"):
        Link("example.org:9092", ca=None, secret=ground.secret)
    with pytest.raises(HomebodyError, match="another machine"):
        Fleet("192.168.1.7:9092", ca=None, key=ground.device()[0])


def test_what_is_no_key_is_said(ground: Any) -> None:
    with pytest.raises(HomebodyError, match="no public key"):
        fingerprint(b"ssh-rsa nonsense")
    with pytest.raises(HomebodyError, match="no OpenSSH private key"):
        Fleet(ground.address, ca=ground.ca, key=b"nonsense")
    with pytest.raises(HomebodyError, match=r"ca\.pem"):
        Fleet(ground.address, ca=b"nonsense", key=ground.device()[0])


def test_threads_end_with_what_started_them(ground: Any, link: Link) -> None:
    before = threading.active_count()
    private, public = ground.device()
    link.register(public, "a device")
    device = Fleet(ground.address, ca=ground.ca, key=private)
    device.join()
    device.join()
    assert threading.active_count() == before + 1
    device.close()
    device.close()
    link.close()
    assert threading.active_count() == before - 1
