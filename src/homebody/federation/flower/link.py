"""Bytes to devices and back, over Flower: the server's `Link`, a device's `Fleet`.

Flower carries the messages and knows the devices' keys. The content of a message is ours, and no code travels. A
message and its answer are each delivered at most once; the server asks again if it needs more.

Each message has a random number and a secret nonce, and the answer must repeat the nonce: Flower checks that an answer
names the node that was asked, not that this node sent it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import io
import math
import re
import secrets
import time
import zipfile
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from homebody.federation.flower.fleet import Fleet, Letter
from homebody.federation.flower.gateway import LIMIT, OPERATOR, operator_token
from homebody.federation.flower.protocol import (
    Beat,
    LinkDown,
    Peer,
    Refused,
    Untrusted,
    Wire,
    decode_message,
    encode_message,
    fingerprint,
    load_public,
    pem,
)

# isort: split
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode, Status, SubStatus
from flwr.proto import control_pb2 as control
from flwr.proto import runtime_pb2 as runtime
from flwr.proto.fab_pb2 import Fab
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
from flwr.supercore.auth import create_superexec_auth_metadata, derive_auth_secret
from flwr.supercore.constant import TASK_TOKEN_HEADER, NodeStatus, TaskType

__all__ = ["Fleet", "Letter", "Link", "LinkDown", "Refused", "Reply", "Untrusted", "fingerprint"]

_REQUEST = 32 << 20
_ASKED_AT_ONCE = 16
# A SuperLink forgets what it noted of each message when its run ends, and not before.
_MESSAGES_OF_A_RUN = 10_000
_OURS = "homebody/homebody"

# A run must have a bundle. Ours holds no code: a device runs what is installed on it and never asks for the bundle.
_BUNDLE = b"""[project]
name = "homebody"
version = "0.0.1"
description = ""
dependencies = []

[tool.flwr.app]
publisher = "homebody"

[tool.flwr.app.components]
serverapp = "nothing:app"
clientapp = "nothing:app"

[tool.flwr.app.config]
"""

_ERRORS = {
    ErrorCode.NODE_UNAVAILABLE: "The device is gone.",
    ErrorCode.MESSAGE_UNAVAILABLE: "It is too late for an answer.",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "The answer came too late.",
}

Response = TypeVar("Response")


class Reply(NamedTuple):
    """The answer to a message: a body, or a sentence why there is none."""

    message: str
    node: int
    body: bytes | None
    error: str


class _Sent(NamedTuple):
    node: int
    nonce: bytes
    until: float
    """By the monotonic clock."""
    since: str
    """When the node had come online, if known."""


class Link(Peer):
    """The server's side of a SuperLink: it registers devices' keys, and as a run's ServerApp sends and receives.

    `secret` is the operator's: that of our own SuperLink's gateway, or of another's `--superexec-auth-secret-file`.
    Methods may be called from several threads, `open` and `close` from one.
    """

    def __init__(self, address: str, *, ca: bytes | None, secret: bytes) -> None:
        # What a device may send is limited at the gateway; so many answers come at once, and each may be that long.
        self._wire = Wire(address, ca, (_ASKED_AT_ONCE + 1) * LIMIT, "homebody")
        self._secret = secret
        self._operator = {OPERATOR: operator_token(secret)}
        self._run, self._token = 0, ""
        self._sent: dict[str, _Sent] = {}
        self._since: dict[int, str] = {}
        self._count = 0

    def register(self, public_key: bytes, name: str) -> None:
        """Let a device with this key join; the key may be registered already."""
        key = pem(load_public(public_key))
        try:
            self._control("register-node", control.RegisterNodeRequest(public_key=key, name=name))
        except Refused as refused:
            if refused.status != 412:
                raise
            if self._number(key) is None:
                raise Refused(412, "the key was taken off, and may come back when the SuperLink is restarted") from None

    def unregister(self, public_key: bytes) -> None:
        """Refuse a device from now on; a key that is not registered is no error."""
        number = self._number(pem(load_public(public_key)))
        if number is not None:
            self._control("unregister-node", control.UnregisterNodeRequest(node_id=number))

    def open(self) -> None:
        """Begin a run of our own, and stop earlier ones that were not ended. Messages of earlier runs are lost, and
        their answers refused. May be called again at any time."""
        self._end_beat()
        self._sent.clear()
        self._count = 0
        listed = self._control("list-runs", control.ListRunsRequest(limit=1000))
        for number, run in listed.run_dict.items():
            if run.fab_id == _OURS and run.status.status != Status.FINISHED:
                # Refused: it has ended meanwhile.
                with contextlib.suppress(Refused):
                    self._control("stop-run", control.StopRunRequest(run_id=number))
        self._run = self._control("start-run", control.StartRunRequest(fab=_bundle())).run_id
        self._token = self._claim()
        self._runtime("pull-task-input", runtime.PullTaskInputRequest(), runtime.PullTaskInputResponse)
        # The run is held for lost after 60 s.
        self._beat = Beat(self._alive, 15.0)

    def nodes(self) -> dict[str, int]:
        """The nodes that count as online, by their keys' fingerprints; one that was killed, for twice its heartbeat."""
        answer = self._runtime("get-nodes", runtime.GetNodesRequest(), runtime.GetNodesResponse)
        self._since = {node.node_id: node.last_activated_at for node in answer.nodes}
        return {fingerprint(node.public_key): node.node_id for node in answer.nodes}

    def send(self, letters: Mapping[int, tuple[str, bytes]], deadline: float) -> dict[str, int]:
        """Send each node a kind (train, evaluate or query, or such as query.hello) and a body, to be answered within
        `deadline` seconds. Returns the node of each message; a node that does not exist gets none. After `LinkDown`
        some may have been sent."""
        if not 0 < deadline < math.inf:
            raise ValueError(f"the deadline is {deadline} seconds")
        now = time.monotonic()
        for kind, _ in letters.values():
            if not re.fullmatch(r"(train|evaluate|query)(\.[a-z][a-z0-9_]*)?", kind):
                raise ValueError(f"'{kind}' is no kind of message")
        for number in [number for number, sent in self._sent.items() if sent.until <= now]:
            self._sent.pop(number, None)
        if self._count >= _MESSAGES_OF_A_RUN and not self._sent:
            self.open()
        accepted: dict[str, int] = {}
        for batch in _batches(letters):
            messages = []
            for node, (kind, body) in batch:
                number, nonce = secrets.token_hex(32), secrets.token_bytes(16)
                metadata = Metadata(
                    run_id=self._run,
                    message_id=number,
                    src_node_id=SUPERLINK_NODE_ID,
                    dst_node_id=node,
                    message_type=kind,
                    created_at=time.time(),
                    ttl=deadline,
                )
                self._sent[number] = _Sent(node, nonce, time.monotonic() + deadline, self._since.get(node, ""))
                messages.append(Message(metadata=metadata, content=encode_message(nonce, body)))
            trees = [ObjectTree(object_id=message.metadata.message_id) for message in messages]
            request = runtime.PushAppMessagesRequest(messages_list=messages, message_object_trees=trees)
            said = self._runtime("push-messages", request, runtime.PushAppMessagesResponse)
            taken = set(said.message_ids)
            for message in messages:
                if (number := message.metadata.message_id) in taken:
                    accepted[number] = message.metadata.dst_node_id
                else:
                    del self._sent[number]
            self._count += len(messages)
        return accepted

    def receive(self, messages: Collection[str], wait: float) -> list[Reply]:
        """New answers to these messages, as soon as there are any, or none after `wait` seconds. A device that came
        online again since a message was sent may have lost it: that is an answer too."""
        numbers, end = list(messages), time.monotonic() + wait
        pieces = [numbers[at : at + _ASKED_AT_ONCE] for at in range(0, len(numbers), _ASKED_AT_ONCE)]
        pause = 0.05
        while pieces:
            left = max(end - time.monotonic(), 0.0)
            # Only one request can be held: with more, none is, for long.
            hold = min(left, 20.0) if len(pieces) == 1 else 0.0
            begun = time.monotonic()
            replies: list[Reply] = []
            for piece in pieces:
                try:
                    replies += self._pull(piece, hold)
                except (LinkDown, Refused):
                    # What was fetched is nowhere else any more; the next call fails as well.
                    if not replies:
                        raise
                    break
            left = end - time.monotonic()
            if replies or left <= 0:
                return replies or self._lost(numbers)
            if time.monotonic() - begun < hold - 0.5 or not hold:
                # A SuperLink of somebody else's holds nothing: ask again, ever more slowly.
                time.sleep(min(pause, left))
                pause = min(1.5 * pause, 0.5)
        return []

    def close(self) -> None:
        """End the run and hang up."""
        self._end_beat()
        try:
            if self._token:
                output = runtime.PushTaskOutputRequest(sub_status=SubStatus.COMPLETED)
                self._runtime("push-task-output", output, runtime.PushTaskOutputResponse, timeout=5.0)
        except (LinkDown, Refused):
            # Whoever opens the next run stops this one.
            pass
        finally:
            self._token = ""
            self._wire.close()

    def _pull(self, numbers: list[str], hold: float) -> Iterator[Reply]:
        request = runtime.PullAppMessagesRequest(message_ids=numbers)
        said = self._runtime("pull-messages", request, runtime.PullAppMessagesResponse, hold=hold)
        for message in said.messages_list:
            number = message.metadata.reply_to_message_id
            if (sent := self._sent.pop(number, None)) is not None:
                yield _reply(number, sent, message)

    def _lost(self, numbers: list[str]) -> list[Reply]:
        self.nodes()
        lost = []
        for number in numbers:
            sent = self._sent.get(number)
            if sent is not None and sent.since and self._since.get(sent.node, sent.since) != sent.since:
                self._sent.pop(number, None)
                lost.append(Reply(number, sent.node, None, "The device was away, and may have lost the letter."))
        return lost

    def _claim(self) -> str:
        """The token of our run's task. Tasks are given out oldest first; those of others fall back if not begun."""
        request = runtime.AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
        method, secret = "/flwr.proto.Runtime/AcquireTask", derive_auth_secret(self._secret)
        for _ in range(100):
            proof = create_superexec_auth_metadata(auth_secret=secret, method=method, request=request)
            shown = self._operator | proof
            got = self._wire.ask("/v1/runtime/acquire-task", request, runtime.AcquireTaskResponse, shown)
            if got.token and got.task.run_id == self._run:
                return got.token
            if not got.token:
                break
        raise Refused(409, "another process has claimed the run: does the SuperLink run with --isolation process?")

    def _number(self, key: bytes) -> int | None:
        listed = self._control("list-nodes", control.ListNodesRequest())
        known = (node for node in listed.nodes_info if node.status != NodeStatus.UNREGISTERED)
        return next((node.node_id for node in known if node.public_key == key), None)

    def _alive(self) -> None:
        self._runtime("send-task-heartbeat", runtime.SendTaskHeartbeatRequest(), runtime.SendTaskHeartbeatResponse)

    def _control(self, name: str, request: Any) -> Any:
        response = type(request).__name__.removesuffix("Request") + "Response"
        return self._wire.ask(f"/v1/control/{name}", request, getattr(control, response), self._operator)

    def _runtime(self, name: str, request: Any, response: type[Response], **patience: float) -> Response:
        if not self._token:
            raise RuntimeError("the link is not open")
        shown = self._operator | {TASK_TOKEN_HEADER: self._token}
        return self._wire.ask(f"/v1/runtime/{name}", request, response, shown, **patience)


def _bundle() -> Fab:
    """As `flwr build` packs it: the files, and a list of them."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("pyproject.toml", _BUNDLE)
        file.writestr(".info/CONTENT", f"pyproject.toml,{hashlib.sha256(_BUNDLE).hexdigest()},{8 * len(_BUNDLE)}")
    content = packed.getvalue()
    return Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content)


def _batches(letters: Mapping[int, tuple[str, bytes]]) -> Iterator[list[tuple[int, tuple[str, bytes]]]]:
    """Letters in groups that fit a request; a larger one goes alone."""
    batch: list[tuple[int, tuple[str, bytes]]] = []
    size = 0
    for node, letter in letters.items():
        if batch and size + len(letter[1]) > _REQUEST:
            yield batch
            batch, size = [], 0
        batch.append((node, letter))
        size += len(letter[1])
    if batch:
        yield batch


def _reply(number: str, sent: _Sent, message: Message) -> Reply:
    body, why = None, ""
    if message.HasField("error"):
        why = _ERRORS.get(message.error.code, f"The device could not answer (Flower's error {message.error.code}).")
    elif (content := decode_message(message)) is None:
        why = "The answer is no message of Homebody's."
    elif message.metadata.src_node_id != sent.node or not hmac.compare_digest(content[0], sent.nonce):
        why = "The answer is not from the device that was asked."
    else:
        body = content[1]
    return Reply(number, sent.node, body, why)
