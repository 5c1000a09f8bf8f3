"""How a device reports to its proxy: it checks that all devices are asked the same, and sends until it is accepted."""

from __future__ import annotations

import json
import math
import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
import numpy.typing as npt

from homebody.errors import HomebodyError
from homebody.federation.device.settings import HomeSettings
from homebody.federation.envelopes import Envelope, seal_contents, seal_reports, sign_envelope
from homebody.federation.epoch import SEAL_BYTES, BadEpoch, Epoch
from homebody.federation.secure_sum.helped import HelpedParty, HelperEpoch
from homebody.federation.service.keys import read_report_key

__all__ = ["NotReported", "Reporter"]

TIMEOUT = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0
"""Seconds before a proxy that cannot be reached is tried again."""
WHY = {
    401: "it does not know this device's key, which its operator adds with `homebody proxy allow`",
    404: "it knows no such epoch",
    410: "the epoch is closed",
    429: "it takes no more from this device now, or for fewer people (`homebody proxy allow --people`)",
}
LONGEST_ANSWER = 1 << 16
"""Bytes of a proxy's answer."""


class NotReported(HomebodyError):
    """The proxy accepted nothing; the message says why, for the device's own log."""


class Reporter:
    """Sends the reports of a device's people.

    silent: whether nothing may leave any more, asked before each attempt.
    """

    def __init__(self, url: str, *, ca: str | None, secret: bytes, silent: Callable[[], bool] = lambda: False) -> None:
        self._url, self._secret, self._silent = url, secret, silent
        context: ssl.SSLContext | bool = ssl.create_default_context(cadata=ca) if url.startswith("https:") else False
        # Nothing of the environment: it could send reports through somebody else.
        self._http = httpx.Client(
            base_url=url, verify=context, trust_env=False, timeout=TIMEOUT, headers={"user-agent": "homebody"}
        )

    @classmethod
    def of(cls, folder: Path, settings: HomeSettings, silent: Callable[[], bool]) -> Self:
        """The reporter of a folder whose device has a proxy."""
        ca = folder / "proxy-ca.pem"
        known = ca.read_text("ascii") if ca.exists() else None
        _, secret = read_report_key(folder / "reports.key")
        return cls(settings.proxy, ca=known, secret=secret, silent=silent)

    def close(self) -> None:
        self._http.close()

    def confirm(self, epoch: Epoch, until: float = math.inf) -> None:
        """Refuse an epoch that differs from the proxy's: a server that gave every device a key or a model of its own
        could tell their reports apart."""
        what = "another key or another model than the proxy"
        self._confirm(f"/v1/epochs/{epoch.id.hex()}", lambda said: Epoch.read(said).agrees(epoch), what, until)

    def confirm_sum(self, epoch: HelperEpoch, until: float = math.inf) -> None:
        """Refuse a helper's epoch that differs from what the helper itself says: a server could name a key of its own,
        or have less noise added."""
        what = "another key or other terms of the sum than the helper"
        self._confirm(f"/v1/sums/{epoch.id.hex()}", lambda said: HelperEpoch.read(said).agrees(epoch), what, until)

    def _confirm(self, path: str, agrees: Callable[[object], bool], what: str, until: float) -> None:
        reply = self._persist("GET", path, None, until)
        try:
            same = agrees(reply)
        except (BadEpoch, HomebodyError):
            same = False
        if not same:
            raise NotReported(f"The server's letter names {what}.")

    def helped(self, epoch: HelperEpoch, message: bytes | None) -> HelpedParty:
        """This device in a sum that the helper opens. message: what it gave before."""
        return HelpedParty(epoch, self._secret, message)

    def sealed(self, epoch: Epoch, pairs: npt.NDArray[np.int64]) -> bytes:
        """One person's reports, each encrypted so that only the server can open it."""
        return seal_reports(pairs, epoch.key)

    def sealed_message(self, epoch: Epoch, content: bytes) -> bytes:
        """One person's report of more than a bit, encrypted likewise."""
        return seal_contents([content], epoch.key)

    def message(self, epoch: Epoch, reports: bytes) -> bytes:
        """A message to the proxy. It does not show which report belongs to whom."""
        each = epoch.size + SEAL_BYTES
        parts = sorted(reports[at : at + each] for at in range(0, len(reports), each))
        content = Envelope("message", epoch.id, os.urandom(16), b"".join(parts), each)
        return sign_envelope(content, self._secret)

    def send(self, message: bytes, until: float = math.inf, wanted: Callable[[], bool] = lambda: True) -> None:
        """Send the proxy a message again and again, until it is accepted. The proxy counts a message once.

        wanted: whether this one may still leave, asked before each attempt.
        """
        self._persist("POST", "/v1/reports", message, until, wanted)

    def _persist(
        self, method: str, path: str, body: bytes | None, until: float, wanted: Callable[[], bool] = lambda: True
    ) -> dict[str, Any]:
        pause, why = FIRST_PAUSE, "it was not asked"
        while not self._silent() and wanted() and time.monotonic() < until:
            wait = pause
            try:
                status, reply, after = self._once(method, path, body)
                if status == 200:
                    return reply
                why = WHY.get(status, f"it answered {status}")
                if status < 500 and (status != 429 or reply.get("limit") is True):
                    raise NotReported(f"The proxy took nothing: {why}.")
                wait = max(pause, after)
            except httpx.HTTPError as error:
                why = self._away(error)
            self._rest(min(wait, LONGEST_PAUSE), until)
            pause = min(2 * pause, LONGEST_PAUSE)
        raise NotReported(f"The proxy took nothing in time: {why}.")

    def _away(self, error: httpx.HTTPError) -> str:
        """Why the proxy could not be reached, and what to do about it."""
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return f"{self._url} shows another certificate than this device trusts (`homebody client init --proxy-ca`)"
        return (
            f"{self._url} cannot be reached ({type(error).__name__}): see that the proxy runs there "
            "(`homebody proxy run`), and that this machine reaches it"
        )

    def _once(self, method: str, path: str, body: bytes | None) -> tuple[int, dict[str, Any], float]:
        # Nothing is unpacked: a few bytes could become more than there is memory for.
        headers = {"content-type": "application/octet-stream", "accept-encoding": "identity"}
        with self._http.stream(method, path, content=body, headers=headers) as answer:
            text = b""
            for part in answer.iter_raw():
                text += part
                if len(text) > LONGEST_ANSWER:
                    raise httpx.RemoteProtocolError("too long an answer")
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError):
            reply = {}
        after = answer.headers.get("retry-after", "")
        return answer.status_code, reply if isinstance(reply, dict) else {}, float(after) if after.isdecimal() else 0.0

    def _rest(self, seconds: float, until: float) -> None:
        end = min(until, time.monotonic() + seconds)
        while not self._silent() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
