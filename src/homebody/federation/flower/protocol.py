"""A client of Flower's protocol, protobuf over HTTP.

Flower's own clients end their process when they are refused, retry without limit, and read answers of any size. Here a
request is sent once, an answer has a size limit, and there are two errors: `LinkDown` and `Refused`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self, TypeVar

from homebody.errors import HomebodyError, install
from homebody.federation.flower.gateway import WAIT, quiet_flower
from homebody.federation.service.text import is_loopback, split_address

quiet_flower()
try:
    import httpx
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from flwr.proto.message_pb2 import Message
    from flwr.proto.recorddict_pb2 import ConfigRecord, ConfigRecordValue, RecordDict
    from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata
    from google.protobuf.message import DecodeError
except ImportError as error:
    raise HomebodyError(f"Federation over Flower needs the extra: {install('deploy')}.") from error

__all__ = [
    "TIMEOUT",
    "Beat",
    "LinkDown",
    "Peer",
    "Refused",
    "Untrusted",
    "Wire",
    "decode_message",
    "encode_message",
    "fingerprint",
    "load_private",
    "load_public",
    "pem",
]

TIMEOUT = 30.0

Response = TypeVar("Response")
Strings = Mapping[str, str]


class LinkDown(Exception):
    """The server does not answer, or the connection broke: try again later."""


class Untrusted(LinkDown):
    """The server has no certificate of the given authority, or one for another name."""


class Refused(Exception):
    """The server refused. 401: unknown (join or open again); 403: the run is over; 412: not now, or no registered key;
    413: too many bytes."""

    def __init__(self, status: int, reason: str, date: str = "") -> None:
        super().__init__(f"{status}: {reason}" if reason else str(status))
        self.status, self.reason, self.date = status, reason, date
        """The date of the answer by the server's clock, as HTTP writes it; empty if it has none."""


def fingerprint(public_key: bytes) -> str:
    """SHA-256, in hexadecimal, of a public key's DER SubjectPublicKeyInfo; the key as OpenSSH text or PEM.

    >>> from cryptography.hazmat.primitives.asymmetric import ec
    >>> from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    >>> key = ec.generate_private_key(ec.SECP384R1()).public_key()
    >>> first = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b" somebody@somewhere"
    >>> other = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    >>> fingerprint(first) == fingerprint(other), len(fingerprint(first))
    (True, 64)
    """
    return _fingerprint(bytes(public_key))


@functools.lru_cache(100_000)
def _fingerprint(public_key: bytes) -> str:
    key = load_public(public_key)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def load_public(text: bytes) -> ec.EllipticCurvePublicKey:
    load = serialization.load_pem_public_key if b"-----BEGIN" in text else serialization.load_ssh_public_key
    try:
        key = load(text)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise HomebodyError("This is no public key: give OpenSSH text or PEM.") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise HomebodyError("A device's key is an elliptic one (ECDSA P-384): `homebody keys device` makes one.")
    return key


def pem(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def load_private(text: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_ssh_private_key(text, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise HomebodyError(
            "This is no OpenSSH private key without a passphrase: `homebody keys device` makes one."
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise HomebodyError("A device's key is an elliptic one (ECDSA P-384): `homebody keys device` makes one.")
    return key


class Wire:
    """Protobuf over HTTP: one request, one response; nothing is retried, followed, or read beyond its limit."""

    def __init__(self, address: str, ca: bytes | None, limit: int, role: str) -> None:
        self._limit = limit
        self._version = dict(RuntimeVersionMetadata.from_local_component(role).as_metadata())
        self._base = f"{'http' if ca is None else 'https'}://{address}"
        parts = split_address(address)
        if parts is None:
            raise HomebodyError(f"'{address}' is not an address: give HOST:PORT.")
        if ca is None and not is_loopback(parts[0]):
            raise HomebodyError(f"{parts[0]} is another machine: give the certificate of its authority (ca.pem).")
        self._client = httpx.Client(
            verify=True if ca is None else _trusting(ca),
            # On this machine no proxy is asked.
            trust_env=ca is not None,
            follow_redirects=False,
            limits=httpx.Limits(keepalive_expiry=30.0),
        )

    def ask(
        self, path: str, request: Any, kind: type[Response], headers: Strings, hold: float = 0, timeout: float = TIMEOUT
    ) -> Response:
        """hold: seconds for which the server may keep the request until there is something to answer."""
        form = "application/protobuf"
        shown = {"content-type": form, "accept": form, "accept-encoding": "identity", **self._version, **headers}
        if hold:
            shown[WAIT] = f"{hold:.3f}"
        content, limit = request.SerializeToString(deterministic=True), timeout + hold
        patience = httpx.Timeout(limit, connect=min(limit, 10.0))
        try:
            with self._client.stream(
                "POST", f"{self._base}{path}", content=content, headers=shown, timeout=patience
            ) as response:
                body = self._read(response)
        except httpx.HTTPError as error:
            if (why := re.search(r"certificate verify failed: ([^(]*)", str(error))) is not None:
                raise Untrusted(f"The certificate at {self._base} is not accepted: {why[1].strip()}.") from error
            raise LinkDown(f"{self._base}: {str(error) or type(error).__name__}") from error
        except RuntimeError as error:
            # A request on a client that another thread has closed.
            raise LinkDown(f"{self._base}: closed") from error
        if response.status_code in {502, 503, 504}:
            raise LinkDown(f"{self._base}: {response.status_code}")
        if response.status_code != 200:
            raise _refusal(response, body)
        said: Any = kind()
        try:
            said.ParseFromString(body)
        except DecodeError as error:
            raise LinkDown(f"{self._base} does not speak Flower's protocol.") from error
        return said

    def _read(self, response: httpx.Response) -> bytes:
        parts, size = [], 0
        for part in response.iter_raw():
            size += len(part)
            if size > self._limit:
                raise Refused(413, f"what it sent is longer than {self._limit} bytes")
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        self._client.close()


def _trusting(ca: bytes) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cadata=ca.decode("ascii"))
    except (ValueError, ssl.SSLError) as error:
        raise HomebodyError("The authority's certificate (ca.pem) cannot be read: give a PEM certificate.") from error


def _refusal(response: httpx.Response, body: bytes) -> Refused:
    try:
        reason = str(json.loads(body[:4096])["detail"])[:200]
    except (ValueError, KeyError, TypeError):
        reason = ""
    return Refused(response.status_code, reason, response.headers.get("date", ""))


class Beat:
    """Sends a heartbeat at intervals. It ignores failures: the next request shows them."""

    def __init__(self, say: Callable[[], Any], interval: float) -> None:
        self._say, self._interval, self._stop = say, interval, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            with suppress(LinkDown, Refused):
                self._say()

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


class Peer(ABC):
    """One side of a SuperLink, as a context: it hangs up at the end, and its heartbeat ends with it."""

    _beat: Beat | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """End what was begun, and hang up."""

    def _end_beat(self) -> None:
        if self._beat is not None:
            self._beat.end()
            self._beat = None


def encode_message(nonce: bytes, body: bytes) -> RecordDict:
    value, item = ConfigRecordValue, ConfigRecord.Item
    items = [item(key="nonce", value=value(bytes=nonce)), item(key="body", value=value(bytes=body))]
    record = ConfigRecord(items=items)
    return RecordDict(items=[RecordDict.Item(key="homebody", config_record=record)])


def decode_message(message: Message) -> tuple[bytes, bytes] | None:
    """Nonce and body; None if the message is not one of ours."""
    if len(message.content.items) != 1:
        return None
    (record,) = message.content.items
    values = {item.key: item.value for item in record.config_record.items}
    if record.key != "homebody" or values.keys() != {"nonce", "body"}:
        return None
    if any(value.WhichOneof("value") != "bytes" for value in values.values()):
        return None
    return values["nonce"].bytes, values["body"].bytes
