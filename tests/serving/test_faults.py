"""A service as a process: killed at any moment, without room on its disk, or started twice, it loses nothing."""

from __future__ import annotations

import http.client
import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes import COMMAND, PATIENCE, free_port, wait_until
from tests.serving.conftest import films, made

from homebody.errors import HomebodyError
from homebody.files import holding
from homebody.serving.app import Service, run
from homebody.serving.operator import LOCK, add_token, install, report
from homebody.serving.store import ServiceStore


class Process:
    """`homebody serve start`, as a person starts it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.port, self.log = folder, free_port(), folder.with_suffix(".log")
        made(folder, films(), listen=f"127.0.0.1:{self.port}", **settings)
        self.token = add_token(folder, "operator", operator=True)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Process:
        with self.log.open("ab") as log:
            command = [*COMMAND, "serve", "start", str(self.folder)]
            process = self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        def answers() -> bool:
            assert process.poll() is None, self.log.read_text()
            return self.ask("GET", "/health") is not None

        wait_until(answers, "the service answers")
        return self

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any] | None:
        """Status and answer; None if the service is away."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        with suppress(OSError, http.client.HTTPException), closing(connection):
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"authorization": f"Bearer {self.token}"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        return None

    def kill(self) -> None:
        assert self.process
        self.process.kill()
        self.process.wait()
        self.process = None

    def everything(self) -> list[Any]:
        """All that is the same for everybody."""
        model = self.ask("GET", "/v1/model")
        assert model is not None
        digest = model[1]["model"]
        paths = ["/v1/shelf", *(f"/v1/lists/{digest}/{choice:03d}" for choice in range(6))]
        return [model, *(self.ask("GET", path) for path in paths)]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    running: list[Process] = []

    def process(**settings: Any) -> Process:
        running.append(Process(tmp_path / "service", **settings))
        return running[-1].start()

    yield process
    for one in running:
        if one.process:
            one.kill()


class Changes:
    """An operator who adds and removes items, each until it is acknowledged, whatever happens to the service."""

    def __init__(self, service: Process) -> None:
        self._service, self._stop = service, threading.Event()
        self.there: set[str] = set()
        """Ids that must be there: those that were added and not removed, as acknowledged."""
        self.failed = 0
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            id_ = f"new-{number}"
            item = {"items": [{"id": id_, "vector": [float(number)] * 16}]}
            if self._done("POST", "/v1/items", item, repeated=409):
                self.there.add(id_)
            if number % 3 == 0 and self._done("DELETE", f"/v1/items/{id_}", None, repeated=404):
                self.there.discard(id_)

    def _done(self, method: str, path: str, body: Any, repeated: int) -> bool:
        """Ask until it is answered. What was done before the answer was lost is `repeated`."""
        while True:
            answer = self._service.ask(method, path, body)
            if answer is not None and answer[0] in (200, repeated):
                return True
            assert answer is None or answer[0] == 503, answer
            self.failed += 1
            if self._stop.is_set():
                return False
            time.sleep(0.02)

    def stop(self) -> set[str]:
        self._stop.set()
        self._thread.join(PATIENCE)
        return self.there


def added(service: Process) -> set[str]:
    with closing(ServiceStore(service.folder)) as store:
        return {item.id for item in store.changes(-1).added}


def test_a_service_killed_while_items_come_loses_none(process: Callable[..., Process]) -> None:
    service = process()
    changes = Changes(service)
    wait_until(lambda: len(changes.there) > 5, "items come")
    service.kill()
    service.start()
    seen = len(changes.there)
    wait_until(lambda: len(changes.there) > seen + 5, "items come again")
    there = changes.stop()
    assert added(service) == there
    assert service.ask("GET", "/v1/model")[1]["items"] == 300 + len(there)  # type: ignore[index]


@pytest.mark.faults
def test_a_service_killed_ten_times_at_any_moment_loses_nothing(process: Callable[..., Process]) -> None:
    """While items come and go, and while it is given other models."""
    draw, service = np.random.default_rng(0), process()
    changes = Changes(service)
    for turn in range(10):
        time.sleep(draw.uniform(0.0, 2.0))
        if turn % 3 == 0:
            install(service.folder, films())  # the same model: what was added to it is lost, and named
            changes.there.clear()
        service.kill()
        service.start()
    there = changes.stop()
    assert there <= added(service)
    assert changes.failed > 0
    before = service.everything()
    service.kill()
    assert service.start().everything() == before


@pytest.mark.skipif(sys.platform != "linux", reason="limits another process")
def test_a_disk_that_takes_no_more_acknowledges_no_item(process: Callable[..., Process]) -> None:
    service = process()
    item = {"items": [{"id": "new", "vector": [1.0] * 16}]}
    before = service.everything()
    assert service.process
    resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    assert service.ask("POST", "/v1/items", item) == (
        503, {"error": "Nothing can be written here now; send it again later."},
    )  # fmt: skip
    assert service.everything() == before
    resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    answer = service.ask("POST", "/v1/items", item)
    assert answer is not None
    assert answer[0] == 200
    assert added(service) == {"new"}


def test_one_process_at_a_time_serves_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homebody.serving.app._FAREWELL", 0.1)
    made(tmp_path / "service", films(), listen=f"127.0.0.1:{free_port()}")
    with holding(tmp_path / "service" / LOCK, ""):
        assert report(tmp_path / "service")["running"]
        with pytest.raises(HomebodyError, match=r"A service runs in .*service already"):
            run(tmp_path / "service")
    assert not report(tmp_path / "service")["running"]


@pytest.mark.parametrize("step", ["write_model", "replace_model"])
def test_a_reload_that_is_cut_short_leaves_the_model_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    folder, first = tmp_path / "service", films()
    settings = made(folder, first)

    def cut(*_: Any) -> None:
        raise OSError("cut")

    with monkeypatch.context() as patched:
        patched.setattr(ServiceStore, step, cut)
        with pytest.raises(OSError, match="cut"):
            install(folder, films(seed=1))
    assert report(folder)["model"] == first.digest
    service = Service(folder, settings)
    service.close()
    assert len([*(folder / "models").iterdir()]) == 1  # what was written for nothing is gone


def test_a_damaged_model_is_not_served(tmp_path: Path) -> None:
    folder = tmp_path / "service"
    settings = made(folder, films())
    (file,) = (folder / "models").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(HomebodyError, match="is damaged: `homebody serve reload` writes another"):
        Service(folder, settings)
    install(folder, films(seed=1))
    Service(folder, settings).close()
