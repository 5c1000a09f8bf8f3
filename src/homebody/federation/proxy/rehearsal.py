"""Messages through a proxy's own tables, without a network: what the next hop would get, for audits."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt

from homebody.federation.envelopes import EPOCH_BYTES, REPORT_BYTES, Envelope, epoch_keys, seal_reports, unseal_reports
from homebody.federation.epoch import Epoch
from homebody.federation.proxy.settings import ProxySettings
from homebody.federation.proxy.store import ProxyStore, Sender, VerifiedMessage, create

__all__ = ["rehearse_reports"]

Longs = npt.NDArray[np.int64]


def rehearse_reports(messages: Sequence[Longs], batch: int = 4096) -> tuple[list[Longs], Longs]:
    """The reports of these devices as the server opens them, batch by batch; and the device of each, in that order. All
    of them are in one release.

    >>> batches, whose = rehearse_reports([np.array([4, 7]), np.array([9])], batch=2)
    >>> opened = np.concatenate(batches)
    >>> [len(batch) for batch in batches], sorted(zip(opened.tolist(), whose.tolist()))
    ([2, 1], [(4, 0), (7, 0), (9, 1)])
    """
    public, secret = epoch_keys()
    sealed = [seal_reports(message, public) for message in messages]
    owner = {report: device for device, message in enumerate(sealed) for report in _single(message)}
    epoch, now, batches = os.urandom(EPOCH_BYTES), time.time(), list[bytes]()
    k = max(map(len, messages))
    settings = ProxySettings(
        next="http://127.0.0.1:1", tls=False, hold=0, least_devices=len(messages), batch=batch, most=max(1000, k)
    )
    described = Epoch(epoch, bytes(32), "0" * 32, k, entries=1, among=1, closes=now + 3600)
    with tempfile.TemporaryDirectory(prefix="hb-") as folder:
        create(Path(folder))
        with closing(ProxyStore(Path(folder), settings)) as store:
            with store.transaction():
                store.open_epoch(described, now)
                envelopes = (Envelope("message", epoch, os.urandom(16), message) for message in sealed)
                sent = [VerifiedMessage(os.urandom(32), Sender(False, 1), envelope) for envelope in envelopes]
                outcomes = set(store.accept(sent, now))
                assert outcomes == {"accepted"}, outcomes
                store.tick(now)
            while True:
                with store.transaction():
                    if (cut := store.cut()) is None:
                        break
                    store.finish(cut, "forwarded")
                batches.append(cut.reports)
    whose = [owner[report] for part in batches for report in _single(part)]
    return [unseal_reports(part, public, secret).astype(np.int64) for part in batches], np.array(whose)


def _single(reports: bytes) -> list[bytes]:
    return [reports[at : at + REPORT_BYTES] for at in range(0, len(reports), REPORT_BYTES)]
