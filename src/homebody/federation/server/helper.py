"""The server's connection to the helper that opens its secure sums: a proxy (`homebody.federation.proxy.helper`)."""

from __future__ import annotations

import json
import ssl
import struct
import time
from pathlib import Path
from typing import Any, Self

import httpx

from homebody.errors import Abandoned, HomebodyError
from homebody.federation.secure_sum.helped import EPOCH_BYTES, HelpedTerms, HelperEpoch, SetRefused
from homebody.federation.secure_sum.messages import BadMessage
from homebody.federation.secure_sum.requests import sign_request
from homebody.federation.service.keys import read_report_key

__all__ = ["HelperClient"]

_SECONDS = struct.Struct("<d")
_TIMEOUT = 60.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_LONGEST_WORDS = 1 << 24
"""Bytes of an answer that is no vector: it may name each device of a set."""


class HelperClient:
    """Asks a helper, again and again while it cannot be reached: it answers the same to the same.

    ca: the certificate of the helper's authority, where the system does not know it. secret: the key that signs.
    """

    def __init__(self, url: str, *, ca: str | None, secret: bytes) -> None:
        self._url, self._secret = url, secret
        context: ssl.SSLContext | bool = ssl.create_default_context(cadata=ca) if url.startswith("https:") else False
        self._http = httpx.Client(
            base_url=url, verify=context, trust_env=False, timeout=_TIMEOUT, headers={"user-agent": "homebody"}
        )

    @classmethod
    def of(cls, folder: Path, url: str) -> Self:
        """The client of a server's folder."""
        ca = folder / "keys" / "helper-ca.pem"
        _, secret = read_report_key(folder / "keys" / "reports.key")
        return cls(url, ca=ca.read_text("ascii") if ca.exists() else None, secret=secret)

    def close(self) -> None:
        self._http.close()

    def begin(self, number: bytes, terms: HelpedTerms, seconds: float, until: float) -> HelperEpoch:
        """The epoch of this number, open for so long. until: how long it is tried, by the monotonic clock."""
        assert len(number) == EPOCH_BYTES
        body = sign_request("epoch", number, _SECONDS.pack(seconds) + terms.encode(), self._secret)
        status, said = self._persist("/v1/sums", body, _LONGEST_WORDS, until)
        if status in (404, 409, 410):
            raise Abandoned(f"The helper {self._url} opens no such sum: {_sentence(said)}")
        if status != 200:
            raise HomebodyError(f"The helper {self._url} refuses the sum: {_sentence(said)}")
        try:
            epoch = HelperEpoch.read(_words(said))
        except BadMessage as error:
            raise Abandoned(f"The helper {self._url} describes no sum: {error}") from error
        if (epoch.id, epoch.terms) != (number, terms):
            raise Abandoned(f"The helper {self._url} describes another sum than was asked for.")
        return epoch

    def open(self, epoch: HelperEpoch, request: bytes, until: float) -> bytes:
        """The answer to the one set of an epoch; `SetRefused` where it cannot be opened."""
        body = sign_request("set", epoch.id, request, self._secret)
        most = max(_LONGEST_WORDS, epoch.terms.entries * epoch.terms.width)
        status, said = self._persist(f"/v1/sums/{epoch.id.hex()}/set", body, most, until)
        if status == 200:
            return said
        if status == 422:
            faulty = _words(said).get("faulty")
            places = faulty.items() if isinstance(faulty, dict) else ()
            named = {int(place): str(why)[:200] for place, why in places if str(place).isdecimal()}
            raise SetRefused(_sentence(said), named)
        raise Abandoned(f"The helper {self._url} opens no set: {_sentence(said)}")

    def _persist(self, path: str, body: bytes, most: int, until: float) -> tuple[int, bytes]:
        pause, why = _FIRST_PAUSE, "it was not asked"
        while True:
            try:
                status, said = self._once(path, body, most)
                if status == 401:
                    raise HomebodyError(
                        f"The helper {self._url} does not know this server: have its operator let keys/reports.pub in "
                        "with `homebody proxy allow PROXY reports.pub --server`."
                    )
                if status < 500 and status != 429:
                    return status, said
                why = f"it answered {status}"
            except httpx.HTTPError as error:
                why = self._away(error)
            if time.monotonic() + pause >= until:
                raise Abandoned(f"The helper opened nothing in time: {why}.")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _away(self, error: httpx.HTTPError) -> str:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return f"{self._url} shows another certificate than this server trusts (`homebody server init --helper-ca`)"
        return (
            f"{self._url} cannot be reached ({type(error).__name__}): see that the proxy runs there "
            "(`homebody proxy run`), and that this machine reaches it"
        )

    def _once(self, path: str, body: bytes, most: int) -> tuple[int, bytes]:
        headers = {"content-type": "application/octet-stream", "accept-encoding": "identity"}
        parts, size = list[bytes](), 0
        with self._http.stream("POST", path, content=body, headers=headers) as answer:
            for part in answer.iter_raw():
                size += len(part)
                if size > most:
                    raise httpx.RemoteProtocolError("too long an answer")
                parts.append(part)
        return answer.status_code, b"".join(parts)


def _words(said: bytes) -> dict[str, Any]:
    try:
        words = json.loads(said)
    except (ValueError, RecursionError):
        words = None
    return words if isinstance(words, dict) else {}


def _sentence(said: bytes) -> str:
    return str(_words(said).get("error", "It does not say why."))[:300]
