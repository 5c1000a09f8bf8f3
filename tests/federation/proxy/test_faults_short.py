"""The shortest of the faults that `make test-faults` causes: a proxy killed under load, and one without room."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.federation.proxy.conftest import Device, Load, Process, Sink
from tests.processes import wait_until

from homebody.federation.proxy.admin import report
from homebody.federation.proxy.settings import ProxySettings

Made = Callable[..., tuple[Path, ProxySettings]]
Started = Callable[[Path, ProxySettings], Process]


def test_a_proxy_killed_under_load_loses_nothing_and_repeats_nothing(made: Made, started: Started, sink: Sink) -> None:
    sink.k, sink.cut = 100_000, 0.2  # answers of the next hop are lost, too
    devices = [Device() for _ in range(4)]
    proxy = started(*made(*devices, hold=0.2, most=100_000, batch=512))
    load = Load(proxy.port, devices)
    for pause in (0.9, 0.7):
        time.sleep(pause)
        proxy.kill()
        proxy.start()
    time.sleep(0.5)
    accepted = load.stop()
    wait_until(lambda: report(proxy.folder)["held"] == 0, "everything has gone out")
    assert sorted(sink.came()) == accepted
    assert len(accepted) == len(set(accepted)) > 0
    assert load.answers[0] > 0  # it was down
    assert sink.asked["batch"] > len(sink.batches)  # batches were sent again


@pytest.mark.skipif(sys.platform != "linux", reason="limits another process")
def test_a_disk_that_takes_no_more_acknowledges_no_more(made: Made, started: Started, sink: Sink) -> None:
    sink.k = 100_000
    devices = [Device() for _ in range(2)]
    proxy = started(*made(*devices, hold=0.1, most=100_000, batch=512))
    load = Load(proxy.port, devices)
    wait_until(lambda: sink.batches, "batches come")
    assert proxy.process
    resource.prlimit(proxy.process.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    wait_until(lambda: load.answers[503] > 3, "it says that it cannot keep anything")
    resource.prlimit(proxy.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    before = load.answers[200]
    wait_until(lambda: load.answers[200] > before + 3, "it takes more again")
    accepted = load.stop()
    wait_until(lambda: report(proxy.folder)["held"] == 0, "everything has gone out")
    assert sorted(sink.came()) == accepted
    assert "cannot write" in proxy.log.read_text()
