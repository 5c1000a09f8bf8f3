"""A device's side of a SuperLink."""

from __future__ import annotations

import email.utils
import hashlib
import time
from base64 import b64encode
from contextlib import closing, suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from homebody.federation.flower.gateway import LIMIT
from homebody.federation.flower.protocol import (
    Beat,
    LinkDown,
    Peer,
    Refused,
    Wire,
    decode_message,
    encode_message,
    load_private,
    pem,
)

# isort: split
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import SUPERLINK_NODE_ID, TIMESTAMP_HEADER
from flwr.proto import fleet_pb2 as fleet
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER

__all__ = ["Fleet", "Letter"]

HEARTBEAT = 10.0
"""Seconds between heartbeats, at most. Flower takes no less, and holds a node for gone after twice that."""
Response = TypeVar("Response")


class Letter(NamedTuple):
    """A message as a device holds it, with what `answer` needs."""

    message: str
    kind: str
    body: bytes
    node: int
    run: int
    nonce: bytes
    created: float
    """Unix time by the server's clock."""
    ttl: float
    """Seconds after that for an answer."""


class Fleet(Peer):
    """A device's side of a SuperLink: it joins with its key, pulls messages, and answers them.

    last_node: what `join` returned last; a device that was killed still counts as online, and may not join twice.
    limit: longer messages are refused unread. One thread pulls and answers.
    """

    def __init__(
        self, address: str, *, ca: bytes | None, key: bytes, last_node: int | None = None, limit: int = LIMIT
    ) -> None:
        self._key = load_private(key)
        self._public = pem(self._key.public_key())
        self._wire = Wire(address, ca, limit, "SuperNode")
        self._node, self._ahead = last_node, 0.0

    def join(self) -> int:
        """Come online, and stay so by heartbeats; returns the node's number, to be stored beside the key. Refused with
        412: the key is not registered, or still counts as online under another number. May be called again at any
        time, as after a 401."""
        self._end_beat()
        if self._node is not None:
            request = fleet.DeactivateNodeRequest(node_id=self._node)
            with suppress(Refused):  # it was offline already, or is a number of another SuperLink
                self._ask("deactivate-node", request, fleet.DeactivateNodeResponse)
        activate = fleet.ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT)
        self._node = self._ask("activate-node", activate, fleet.ActivateNodeResponse).node_id
        self._beat = Beat(self._alive, 0.6 * HEARTBEAT)
        return self._node

    def pull(self, wait: float) -> Letter | None:
        """The next message as soon as there is one, or None after `wait` seconds."""
        end, pause = time.monotonic() + wait, 0.1
        request = fleet.PullMessagesRequest(node=Node(node_id=self._joined()))
        while True:
            begun = time.monotonic()
            hold = min(max(end - begun, 0.0), 20.0)
            said = self._ask("pull-messages", request, fleet.PullMessagesResponse, hold=hold)
            for message in said.messages_list:
                # One that is no message of ours is left to its deadline.
                if (letter := self._letter(message)) is not None:
                    return letter
            left = end - time.monotonic()
            if left <= 0:
                return None
            if time.monotonic() - begun < hold - 0.5:
                # A SuperLink of somebody else's holds nothing: ask again, ever more slowly.
                time.sleep(min(pause, left))
                pause = min(1.5 * pause, 2.0)

    def answer(self, letter: Letter, body: bytes) -> bool:
        """Send the answer; returns whether it was accepted, as a late or second one is not. It may be sent again after
        `LinkDown`."""
        if letter.node != self._joined():
            # The SuperLink that asked is gone, and its messages with it.
            return False
        # The server's own times: whether it is too late must not hang on the device's clock.
        metadata = Metadata(
            run_id=letter.run,
            message_id=hashlib.sha256(letter.message.encode() + letter.nonce + body).hexdigest(),
            src_node_id=letter.node,
            dst_node_id=SUPERLINK_NODE_ID,
            reply_to_message_id=letter.message,
            message_type=letter.kind,
            created_at=letter.created,
            ttl=letter.ttl,
        )
        request = fleet.PushMessagesRequest(
            node=Node(node_id=letter.node),
            messages_list=[Message(metadata=metadata, content=encode_message(letter.nonce, body))],
            message_object_trees=[ObjectTree(object_id=metadata.message_id)],
        )
        try:
            said = self._ask("push-messages", request, fleet.PushMessagesResponse)
        except Refused as refused:
            if refused.status == 403:
                return False
            raise
        # It says yes to an answer that it drops as well, but then asks for nothing that belongs to it.
        return bool(said.objects_to_push)

    def close(self) -> None:
        """Go offline and disconnect. An answer that the server has not fetched yet is lost."""
        beat, self._beat = self._beat, None
        with closing(self._wire), suppress(LinkDown, Refused):  # it is held for gone soon enough
            if beat is not None:
                beat.end()
                request = fleet.DeactivateNodeRequest(node_id=self._joined())
                self._ask("deactivate-node", request, fleet.DeactivateNodeResponse, timeout=5.0)

    def _letter(self, message: Message) -> Letter | None:
        metadata, content = message.metadata, decode_message(message)
        if content is None:
            return None
        nonce, body = content
        return Letter(
            message=metadata.message_id,
            kind=metadata.message_type,
            body=body,
            node=metadata.dst_node_id,
            run=metadata.run_id,
            nonce=nonce,
            created=metadata.created_at,
            ttl=metadata.ttl,
        )

    def _joined(self) -> int:
        if self._node is None:
            raise RuntimeError("the device has not joined")
        return self._node

    def _alive(self) -> None:
        node = Node(node_id=self._joined())
        request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT)
        self._ask("send-node-heartbeat", request, SendNodeHeartbeatResponse, timeout=5.0)

    def _ask(self, name: str, request: Any, response: type[Response], **patience: float) -> Response:
        path = f"/v1/fleet/{name}"
        try:
            return self._wire.ask(path, request, response, self._signed(), **patience)
        except Refused as refused:
            # A signature holds for minutes in the past and seconds in the future: by the SuperLink's clock, then.
            ahead = _seconds_ahead(refused.date)
            if refused.status != 401 or abs(ahead - self._ahead) < 3:
                raise
            self._ahead = ahead
        return self._wire.ask(path, request, response, self._signed(), **patience)

    def _signed(self) -> dict[str, str]:
        now = datetime.fromtimestamp(time.time() + self._ahead, UTC).isoformat()
        signature = self._key.sign(now.encode(), ec.ECDSA(hashes.SHA256()))
        return {
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(self._public).decode(),
            TIMESTAMP_HEADER: now,
            FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode(),
        }


def _seconds_ahead(date: str) -> float:
    """How far the server's clock is ahead of ours; 0 if there is no date."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp() - time.time()
    except ValueError:
        return 0.0
