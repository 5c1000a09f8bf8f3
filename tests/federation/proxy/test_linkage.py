"""Unlinkability: what the server gets from a real proxy tells no more than a bag of reports."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.federation.proxy.conftest import Device, Process, Sink, split
from tests.processes import PATIENCE, wait_until

from homebody.adversary.linkage import ReportBatch, as_they_come, linkage, reported
from homebody.federation.envelopes import epoch_keys, seal_reports, unseal_reports
from homebody.federation.proxy.rehearsal import rehearse_reports
from homebody.federation.proxy.settings import ProxySettings
from homebody.methods.fmf_ldp import FMFLDP
from homebody.privacy import Channel, OneBit, Shuffle
from homebody.simulation import Simulator
from homebody.testing import population
from homebody.training import fit

PEOPLE, K = 150, 40
TOO_MUCH = 0.02
"""Of an AUC. The proxy draws from the operating system, and by chance the difference varies by 0.0008 (one σ): 25 of
them have a chance below 1e-100."""


@pytest.mark.random_draws
def test_the_servers_view_of_a_real_proxy(
    made: Callable[..., tuple[Path, ProxySettings]], started: Callable[[Path, ProxySettings], Process], sink: Sink
) -> None:
    """Devices report over sockets, one after the other; the server opens what arrives, batch by batch."""
    method, simulator = FMFLDP(uplink=Channel(OneBit(2.5, k=K), Shuffle())), Simulator(population())
    shared = fit(method, simulator, rounds=4, evaluate_every=0).shared
    round_ = reported(method, simulator, shared, users=PEOPLE)
    public, secret = epoch_keys()
    devices = [Device() for _ in round_.messages]
    sink.k = K
    folder, settings = made(*devices, least_devices=PEOPLE, batch=1000)
    proxy = started(folder, settings)
    owner = {}
    for number, (device, pairs) in enumerate(zip(devices, round_.messages, strict=True)):
        sealed = seal_reports(pairs, public)
        owner |= dict.fromkeys(split(sealed), number)
        connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=PATIENCE)
        connection.request("POST", "/v1/reports", device.body(sealed))
        assert connection.getresponse().status == 200
        connection.close()
    wait_until(lambda: len(sink.came()) == PEOPLE * K, "everything has arrived")
    view = [
        ReportBatch(float(place), unseal_reports(batch, public, secret).astype(np.int64))
        for place, batch in enumerate(sink.batches.values())
    ]
    truth = np.array([owner[report] for report in sink.came()])
    assert len(view) == 6
    found = linkage(view, truth, round_.worked_out, round_.epsilon)
    assert found.difference.value < TOO_MUCH, found
    without = linkage(*as_they_come(round_.messages), round_.worked_out, round_.epsilon)
    assert without.difference.low > 0.3


@pytest.mark.slow
@pytest.mark.random_draws
def test_a_rehearsal_leaves_every_report_anywhere() -> None:
    """Where the reports of the first of 20 devices stand, over 40 times: as if dealt.

    By Hoeffding's bound, which holds for draws without replacement too, the mean of 400 places from 0 to 199 is 36 away
    with a probability of at most 2 exp(-2 · 400 · 36² / 199²) < 1e-11; in the order of arrival it is 95 away. A place
    stays empty with probability 0.95⁴⁰ = 0.13: 100 of 200 do with less than e⁻⁸⁰.
    """
    messages = [np.arange(10) + 20 * device for device in range(20)]
    places = []
    for _ in range(40):
        batches, whose = rehearse_reports(messages, batch=64)
        assert sorted(np.concatenate(batches).tolist()) == sorted(np.concatenate(messages).tolist())
        assert [len(batch) for batch in batches] == [64, 64, 64, 8]
        assert (np.concatenate(batches) // 20 == whose).all()
        places += np.flatnonzero(whose == 0).tolist()
    assert len(places) == 400
    assert abs(np.mean(places) - 99.5) < 36
    assert len(set(places)) > 100
