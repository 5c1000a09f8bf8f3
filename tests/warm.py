"""Processes of Homebody that begin without importing anything: most of what a start costs is imports.

A process that has imported all of Homebody, and compiled what is compiled, forks whenever it is asked to start a
command. Commands that it started fork likewise where they would start a part of theirs. What comes of it is a process
as any other: it has its own memory, files and locks, and is killed by itself.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

MODULES = (
    "dp_accounting.pld",
    "homebody.cli",
    "homebody.federation.app.process",
    "homebody.federation.device.client",
    "homebody.federation.server.intake",
    "homebody.federation.device.reporter",
    "homebody.federation.server.supervisor",
    "homebody.federation.server.trainer",
    "homebody.methods.fedmf",
    "homebody.methods.fl_mv_dssm",
    "homebody.methods.pfedrec",
    "homebody.federation.proxy.app",
    "homebody.report.terminal",
    "homebody.run",
    "homebody.federation.flower.superlink",
    "homebody.studies.reproduce",
    "homebody.studies.tune",
    "homebody.studies.workers",
    "flwr.superlink.main",
    "torch.func",
    "uvicorn",
)
COMMAND = "from homebody.cli import main; main()"
CALM = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "POLARS_MAX_THREADS": "1",
    "NUMBA_THREADING_LAYER": "workqueue",
}
"""One thread for each process, and compiled loops that may be used before and after a fork."""
PAUSES = {
    "homebody.federation.device.client": {"LONGEST_PAUSE": 0.5},
    "homebody.federation.device.limits": {"BASE_SECONDS": 0.05, "PERSON_SECONDS": 0.05},
    "homebody.federation.device.reporter": {"LONGEST_PAUSE": 0.5},
    "homebody.federation.server.supervisor": {"SLOWEST": 0.5},
    "homebody.federation.proxy.forward": {"_LONGEST_PAUSE": 0.5},
    "homebody.federation.server.letters": {"LOOK_SECONDS": 0.2},
}
"""Seconds that somebody waits: those who are killed all the time would mostly wait."""
PR_SET_NAME = 15
FILES = 3


class Process:
    """What `subprocess.Popen` gives, of a process that the warm one started."""

    def __init__(self, nest: Nest, pid: int) -> None:
        self.pid, self.returncode, self._nest = pid, None, nest

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nest.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float = 600.0) -> int:
        until, pause = time.monotonic() + timeout, 0.001
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nest:
    """The warm process, as the test sees it."""

    def __init__(self, line: socket.socket) -> None:
        self._line, self._lock = line, threading.Lock()
        assert self.ask({}) == "warm"

    def popen(
        self,
        args: Sequence[str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: Any = subprocess.DEVNULL,
        stderr: Any = subprocess.DEVNULL,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> Any:
        """As `subprocess.Popen`; standard input is empty."""
        with Path(os.devnull).open("r+b") as nothing:
            files = [nothing if one == subprocess.DEVNULL else one for one in (stdin, stdout, stderr)]
            told = {"args": list(args), "env": dict(env or os.environ), "cwd": None if cwd is None else str(cwd)}
            return Process(self, self.ask(told, [one.fileno() for one in files]))

    def ask(self, what: dict[str, Any], files: Sequence[int] = ()) -> Any:
        with self._lock:
            body = json.dumps(what).encode()
            self._line.sendall(len(body).to_bytes(4, "big"))
            if files:
                socket.send_fds(self._line, [body], files)
            else:
                self._line.sendall(body)
            said = _received(self._line, int.from_bytes(_received(self._line, 4), "big"))
        return json.loads(said)


@contextmanager
def warmed() -> Iterator[Nest]:
    """A warm process for as long as the block lasts; what it started ends with it."""
    here, there = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__)), str(there.fileno())], env=CALM, pass_fds=[there.fileno()]
    )
    there.close()
    with here:
        yield Nest(here)
    process.wait(300)


def _received(line: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        piece = line.recv(size - len(found))
        if not piece:
            raise EOFError
        found += piece
    return found


class _Forked(subprocess.Popen[bytes]):
    """A process of Homebody begins as a fork of this one; any other as always."""

    def _execute_child(self, *given: Any) -> None:
        plain = super()._execute_child  # type: ignore[misc]
        one = inspect.signature(plain).bind(*given).arguments
        entry = _entry(list(map(str, one["args"]))) if isinstance(one["args"], list) else None
        if entry is None:
            plain(*given)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            _become(entry, one)
        self.pid, self._child_created = pid, True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(one[end] for end in ends))  # type: ignore[attr-defined]


def _entry(args: list[str]) -> tuple[str, list[str]] | None:
    """The module whose `main` is called, and the arguments."""
    if args[:2] != [sys.executable, "-P"]:
        return None
    if args[2] == "-m":
        return args[3], args[4:]
    return ("homebody.cli", args[4:]) if args[2:4] == ["-c", COMMAND] else None


def _become(entry: tuple[str, list[str]], one: Mapping[str, Any]) -> NoReturn:
    """The process that was asked for; it never returns to what it was forked from, whose objects stay untouched."""
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        if one.get("process_group") is not None and one["process_group"] >= 0:
            os.setpgid(0, one["process_group"])
        for target, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
            if one[name] >= 0:
                os.dup2(one[name], target)
        keep = {0, 1, 2, *one["pass_fds"]}
        for number in [int(file.name) for file in Path("/proc/self/fd").iterdir()]:
            if number not in keep:
                try:
                    os.close(number)
                except OSError:
                    continue
        if one["cwd"] is not None:
            os.chdir(one["cwd"])
        if one["env"] is not None:
            os.environ.clear()
            os.environ.update(one["env"])
        module, arguments = entry
        name = module if module != "homebody.cli" else f"hb {arguments[0]}"
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.rpartition(".")[2][:15].encode())
        sys.argv = [module, *arguments]
        importlib.import_module(module).main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _compile(method: str) -> None:
    """As a simulation does on its way, and a device for its toy."""
    from homebody.data import load
    from homebody.data.partitions import leave_one_out
    from homebody.federation import wire
    from homebody.federation.device.household import Household
    from homebody.fit import fit
    from homebody.recipe import Recipe
    from homebody.rng import Rng
    from homebody.simulation import Simulator

    toy = leave_one_out(load("synthetic:users=20,items=30,mean=8"), how="latest", negatives=2)
    for stages in ([], ["clip:norm=0.5", "secure-sum", "gaussian:z=2"]):
        fit(Recipe(method, "toy", stages=stages).build(), Simulator(toy), rounds=1, seed=0)
    acting, rng, household = Recipe(method, "toy").build(), Rng.of(0), Household(toy)
    household.begin(acting, rng)
    shared = acting.init_shared(household.catalogue, rng)
    household.train(acting, shared, 0, rng)
    household.measure(acting, shared, 0)
    wire.expected(acting, shared, household.catalogue)
    wire.nothing(acting, shared, household.catalogue)


def main() -> None:
    """The warm process: import, compile, and fork on demand, until nobody asks any more."""
    from homebody.federation.flower.gateway import quiet_flower

    quiet_flower()
    for module in MODULES:
        importlib.import_module(module)
    for module, pauses in PAUSES.items():
        vars(importlib.import_module(module)).update(pauses)
    for method in ("fedmf", "pfedrec"):
        _compile(method)
    assert threading.active_count() == 1, "What has threads cannot be forked."
    subprocess.Popen = _Forked  # type: ignore[misc]
    children: dict[int, subprocess.Popen[bytes]] = {}
    with socket.socket(fileno=int(sys.argv[1])) as line:
        try:
            while True:
                size = int.from_bytes(_received(line, 4), "big")
                body, files, _, _ = socket.recv_fds(line, size, FILES)
                asked = json.loads(body + _received(line, size - len(body)))
                if "args" in asked:
                    given = dict(zip(("stdin", "stdout", "stderr"), files, strict=True))
                    child = _Forked(asked["args"], env=asked["env"], cwd=asked["cwd"], **given)
                    children[child.pid] = child
                    said: Any = child.pid
                elif "poll" in asked:
                    said = children[asked["poll"]].poll()
                else:
                    said = "warm"
                for file in files:
                    os.close(file)
                told = json.dumps(said).encode()
                line.sendall(len(told).to_bytes(4, "big") + told)
        except EOFError:
            pass
    for child in children.values():
        child.kill()
    for child in children.values():
        child.wait()


if __name__ == "__main__":
    main()
