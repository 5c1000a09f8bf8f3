"""Kill -9 under load, again and again: every report that was acknowledged arrives exactly once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.federation.proxy.conftest import Device, Load, Process, Sink
from tests.processes import free_port, wait_until

from homebody.federation.proxy.admin import allow, make, report
from homebody.federation.proxy.settings import ProxySettings

pytestmark = pytest.mark.faults

Made = Callable[..., tuple[Path, ProxySettings]]
Started = Callable[[Path, ProxySettings], Process]


def test_a_proxy_killed_thirty_times_at_any_moment(made: Made, started: Started, sink: Sink) -> None:
    """While it takes in, mixes, cuts and passes on; some kills come in the middle of the start."""
    rng = np.random.default_rng(1)
    sink.k, sink.cut = 1_000_000, 0.2
    devices = [Device() for _ in range(8)]
    proxy = started(*made(*devices, hold=0.2, most=1_000_000, batch=2000))
    load = Load(proxy.port, devices, size=100)
    for _ in range(30):
        time.sleep(rng.uniform(0.0, 1.5))
        proxy.kill()
        proxy.start()
    accepted = load.stop()
    wait_until(lambda: report(proxy.folder)["held"] == 0, "everything has gone out")
    assert sorted(sink.came()) == accepted
    assert len(accepted) == len(set(accepted)) > 1000
    counted = report(proxy.folder)
    assert counted["accepted"] == counted["forwarded"] == len(accepted)


def test_a_next_hop_that_goes_away_gets_everything_when_it_is_back(
    tmp_path: Path, made: Made, started: Started, sink: Sink
) -> None:
    """Two proxies in a row, each killed again and again while the other runs."""
    rng = np.random.default_rng(2)
    sink.k, sink.cut = 10, 0.1  # a batch counts for as many devices as it has reports of k
    devices = [Device() for _ in range(6)]
    folder, last_settings = made(name="last", hold=0.3, most=1_000_000, batch=3000)
    settings = ProxySettings(
        next=f"http://127.0.0.1:{last_settings.port}", listen=f"127.0.0.1:{free_port()}", tls=False, hold=0.2,
        least_devices=1, most=1_000_000, batch=1000,
    )  # fmt: skip
    public = make(tmp_path / "first", settings)
    allow(tmp_path / "first", [device.file(tmp_path) for device in devices], people=100_000)
    allow(folder, [public], proxy=True)
    first, last = started(tmp_path / "first", settings), started(folder, last_settings)
    load = Load(first.port, devices, size=50)
    for _ in range(12):
        for one in (first, last):
            time.sleep(rng.uniform(0.0, 1.0))
            one.kill()
            if rng.random() < 0.5:
                time.sleep(rng.uniform(0.0, 1.0))
            one.start()
    accepted = load.stop()
    wait_until(lambda: not report(first.folder)["held"] + report(last.folder)["held"], "everything has gone out")
    assert sorted(sink.came()) == accepted
    assert len(accepted) == len(set(accepted)) > 1000
