"""A SuperLink of our own in a real process, and devices with keys."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest


class Ground:
    """A folder of keys, and a SuperLink that can be started, killed and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        from homebody.deploy.keys import make_authority

        self.folder = folder
        make_authority(folder)
        self.ca, self.secret = (folder / "ca.pem").read_bytes(), (folder / "secret").read_bytes()
        with closing(socket.socket()) as taken:
            taken.bind(("127.0.0.1", 0))
            self.port = int(taken.getsockname()[1])
        self.address = f"localhost:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self._devices = 0

    def device(self) -> tuple[bytes, bytes]:
        """The two halves of a new key: private, public."""
        from homebody.deploy.keys import make_device_key

        self._devices += 1
        public = make_device_key(self.folder / f"device{self._devices}")
        return public.with_suffix(".key").read_bytes(), public.read_bytes()

    def start(self, *more: str, tls: bool = True) -> None:
        command = [sys.executable, "-m", "homebody.runtime.superlink", "--port", str(self.port), "--follow-parent"]
        command += ["--secret", str(self.folder / "secret"), *more]
        if tls:
            command += ["--cert", str(self.folder / "server.pem"), "--key", str(self.folder / "server.key")]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.await_port(self.process)

    def await_port(self, process: subprocess.Popen[bytes]) -> None:
        _until(lambda: process.poll() is not None or _answers(self.port))
        assert process.poll() is None, process.communicate()[1].decode()

    def kill(self) -> str:
        """Kill -9; gives what it had written."""
        assert self.process is not None
        self.process.kill()
        _, said = self.process.communicate()
        self.process = None
        return said.decode()


def _answers(port: int) -> bool:
    with closing(socket.socket()) as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def _until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """One SuperLink for a module, with TLS and registered keys only."""
    made = Ground(tmp_path_factory.mktemp("ground"))
    made.start("--limit", str(8 << 20))
    yield made
    said = made.kill()
    assert said == "", said


@pytest.fixture
def own_ground(tmp_path: Path) -> Iterator[Ground]:
    """A SuperLink for one test, which starts and kills it."""
    made = Ground(tmp_path / "ground")
    yield made
    if made.process is not None:
        made.kill()
