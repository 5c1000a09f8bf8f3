"""Processes of Homebody that begin without importing anything: most of what a start costs is imports.

A process that has imported all of Homebody, and compiled what is compiled, forks whenever it is asked to start a
command. Commands that it started also fork where they would start a process. The result is a process like
any other: it has its own memory, files and locks, and is killed alone.

All workers of the tests share the warm process. Whoever wants a process connects to its socket, sends the command and
the three standard files, and gets the number of the process and, at its end, its exit code. Where that connection ends
first, the process is killed. `Nest.popen` and `Nest.run` do this in Python; a script called `homebody` in the folder
`Nest.programs` does it for a shell.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

MODULES = (
    "anyio._backends._asyncio",
    "cryptography.hazmat.backends.openssl.backend",
    "dp_accounting.pld",
    "encodings.ascii",
    "encodings.utf_8_sig",
    "flwr.superlink.main",
    "homebody.cli",
    "homebody.cli.info",
    "homebody.data.export",
    "homebody.federation.app.process",
    "homebody.federation.device.client",
    "homebody.federation.device.disclosures",
    "homebody.federation.device.history_files",
    "homebody.federation.device.reporter",
    "homebody.federation.device.serving",
    "homebody.federation.flower.superlink",
    "homebody.federation.proxy.admin",
    "homebody.federation.proxy.app",
    "homebody.federation.server.admin",
    "homebody.federation.server.intake",
    "homebody.federation.server.rosters",
    "homebody.federation.server.supervisor",
    "homebody.federation.server.trainer",
    "homebody.federation.service.certificates",
    "homebody.methods.baselines",
    "homebody.methods.dp_privrec",
    "homebody.methods.fedmf",
    "homebody.methods.fl_mv_dssm",
    "homebody.methods.fmf_ldp",
    "homebody.methods.pfedrec",
    "homebody.report.terminal",
    "homebody.run",
    "homebody.serving.app",
    "homebody.studies.reproduce",
    "homebody.studies.tune",
    "homebody.studies.workers",
    "httpcore",
    "polars._utils.parquet",
    "rich._emoji_codes",
    "torch.func",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
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
"""Shorter waits: processes that tests kill all the time would mostly wait."""
PR_SET_NAME = 15
ENDS = ("p2cread", "c2pwrite", "errwrite")
"""What `subprocess` calls the standard files of a process that it starts."""
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
SCRIPT = """#!{python} -IS
import json, os, signal, socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect({address!r})
asked = {{"args": ["homebody", *sys.argv[1:]], "env": dict(os.environ), "cwd": os.getcwd()}}
body = json.dumps(asked).encode()
line.sendall(len(body).to_bytes(4, "big"))
socket.send_fds(line, [body[:1]], [0, 1, 2])
line.sendall(body[1:])
said = line.makefile()
pid = json.loads(said.readline())
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = json.loads(said.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
"""`homebody` for a shell: its end is the end of the process that it stands for, and the other way round."""


class _Started(subprocess.Popen[Any]):
    """A process that the warm one starts; everything else is as `subprocess.Popen` does it."""

    def __init__(self, address: str, args: Sequence[str], **given: Any) -> None:
        self._address, self._listening = address, threading.Lock()
        super().__init__(args, **given)

    def _execute_child(self, *given: Any) -> None:
        asked = inspect.signature(super()._execute_child).bind(*given).arguments  # type: ignore[misc]
        args, cwd = list(map(str, asked["args"])), str(asked["cwd"] or Path.cwd())
        _asked_for(args)
        body = {"args": args, "cwd": cwd, "env": dict(os.environ if asked["env"] is None else asked["env"])}
        if asked.get("process_group") is not None:
            body["process_group"] = asked["process_group"]
        files = [asked[end] if asked[end] >= 0 else number for number, end in enumerate(ENDS)]
        self._line = _connected(self._address)
        self._said = self._line.makefile()
        _send(self._line, body, files)
        self.pid, self._child_created = json.loads(self._said.readline()), True
        self._close_pipe_fds(*(asked[end] for end in PIPES))  # type: ignore[attr-defined]

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        self._heard(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if not self._heard(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def _heard(self, timeout: float | None) -> bool:
        """Whether the process has ended; waits up to `timeout` seconds for that."""
        with self._listening:
            if self.returncode is not None:
                return True
            with selectors.DefaultSelector() as selector:
                selector.register(self._line, selectors.EVENT_READ)
                if not selector.select(timeout):
                    return False
            self.returncode = json.loads(self._said.readline())
            self._said.close()
            self._line.close()
            return True


class Nest:
    """The warm process, as the tests see it."""

    def __init__(self, folder: Path) -> None:
        self.programs = folder
        """A folder for the front of `PATH`: its `homebody` starts warm."""
        self._address = str(folder / "socket")

    def popen(self, args: Sequence[str], **given: Any) -> Any:
        """As `subprocess.Popen`, for `homebody …`, `python -m homebody.…` and `python -c …`."""
        return _Started(self._address, args, **given)

    def run(
        self, args: Sequence[str], *, capture_output: bool = False, check: bool = False, **given: Any
    ) -> subprocess.CompletedProcess[Any]:
        """As `subprocess.run`, for the same commands."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} if capture_output else {}
        process = self.popen(args, **given, **pipes)
        with process:
            done = subprocess.CompletedProcess(args, 0, *process.communicate())
        done.returncode = process.returncode
        if check:
            done.check_returncode()
        return done


@contextmanager
def warmed(place: Path) -> Iterator[Nest]:
    """The warm process of all who name this place, for as long as one of their blocks lasts.

    Call it while nobody else of them begins. What somebody started ends with them.
    """
    process: subprocess.Popen[bytes] | None = None
    with contextlib.ExitStack() as stack:
        try:
            folder = Path(place.read_text())
            session = stack.enter_context(_connected(str(folder / "socket")))
            _send(session, {})
            _received(session, 1)
        except (OSError, EOFError):  # nobody has it, or whoever had it is done
            folder = Path(tempfile.mkdtemp(prefix="hb-"))
            address = str(folder / "socket")
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(address)
                listening.listen(64)
                command = [sys.executable, "-P", str(Path(__file__)), str(listening.fileno())]
                process = subprocess.Popen(command, env=CALM, pass_fds=[listening.fileno()])
            script = folder / "homebody"
            script.write_text(SCRIPT.format(python=sys.executable, address=address))
            script.chmod(0o755)
            session = stack.enter_context(_connected(address))
            _send(session, {})
            _received(session, 1)
            place.write_text(str(folder))
        yield Nest(folder)
    if process is not None:
        process.wait(600)
        shutil.rmtree(folder)


def _connected(address: str) -> socket.socket:
    line = socket.socket(socket.AF_UNIX)
    try:
        line.connect(address)
    except OSError:
        line.close()
        raise
    return line


def _send(line: socket.socket, what: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    body = json.dumps(what).encode()
    line.sendall(len(body).to_bytes(4, "big"))
    if files:
        socket.send_fds(line, [body[:1]], files)
        body = body[1:]
    line.sendall(body)


def _received(line: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        piece = line.recv(size - len(content))
        if not piece:
            raise EOFError
        content += piece
    return content


class _Forked(subprocess.Popen[bytes]):
    """A process of Homebody begins as a fork of this one; any other as always."""

    def _execute_child(self, *given: Any) -> None:
        plain = super()._execute_child  # type: ignore[misc]
        asked = inspect.signature(plain).bind(*given).arguments
        entry = _entry(list(map(str, asked["args"]))) if isinstance(asked["args"], list) else None
        if entry is None:
            plain(*given)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            _become(entry, asked)
        self.pid, self._child_created = pid, True
        self._close_pipe_fds(*(asked[end] for end in PIPES))  # type: ignore[attr-defined]


def _entry(args: list[str]) -> tuple[str, list[str]] | None:
    """The module whose `main` is called, and its arguments, for a part of Homebody that another part starts."""
    if args[:2] != [sys.executable, "-P"]:
        return None
    if args[2] == "-m":
        return args[3], args[4:]
    return ("homebody.cli", args[4:]) if args[2:4] == ["-c", COMMAND] else None


def _asked_for(args: list[str]) -> tuple[str, list[str]]:
    """As `_entry`, for what a test starts. That may also be code: `-c` then stands for the module."""
    program, *words = args
    if Path(program).name == "homebody":
        return "homebody.cli", words
    words = words[words[0] == "-P" :]
    if program != sys.executable or words[0] not in ("-m", "-c") or len(words) < 2:
        raise ValueError(f"{args} is no process of Homebody.")
    if words[:2] == ["-c", COMMAND]:
        return "homebody.cli", words[2:]
    return (words[1], words[2:]) if words[0] == "-m" else ("-c", words[1:])


def _become(entry: tuple[str, list[str]], asked: Mapping[str, Any]) -> NoReturn:
    """Become the process that was asked for. It never returns, and leaves the objects of its parent untouched."""
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if asked.get("process_group") is not None and asked["process_group"] >= 0:
            os.setpgid(0, asked["process_group"])
        for target, name in enumerate(ENDS):
            if asked[name] >= 0:
                os.dup2(asked[name], target)
        keep = {0, 1, 2, *asked["pass_fds"]}
        for number in [int(file.name) for file in Path("/proc/self/fd").iterdir()]:
            if number not in keep:
                try:
                    os.close(number)
                except OSError:
                    continue
        if asked["cwd"] is not None:
            os.chdir(asked["cwd"])
        if asked["env"] is not None:
            os.environ.clear()
            os.environ.update(asked["env"])
        module, arguments = entry
        name = module if module != "homebody.cli" else " ".join(["hb", *arguments[:1]])
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.rpartition(".")[2][:15].encode())
        if module == "-c":
            sys.argv = ["-c", *arguments[1:]]
            sys.path.insert(0, "")
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(arguments[0], "<string>", "exec"), vars(sys.modules["__main__"]))
        else:
            sys.argv = ["homebody" if module == "homebody.cli" else module, *arguments]
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
    """Compile the kernels of a method, as a simulation and a device do."""
    from homebody.data import load
    from homebody.data.partitions import leave_one_out
    from homebody.federation import wire
    from homebody.federation.device.household import Household
    from homebody.recipe import Recipe
    from homebody.rng import Rng
    from homebody.simulation import Simulator
    from homebody.training import fit

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


class _Brood:
    """What the warm process started, each for the connection that asked for it."""

    def __init__(self, listening: socket.socket) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ, lambda: self._accept(listening))
        self._sessions: set[socket.socket] = set()
        self._children: dict[socket.socket, int] = {}

    def serve(self) -> None:
        """Until the last session ends; what still runs then is killed."""
        begun = False
        while self._sessions or not begun:
            begun |= bool(self._sessions)
            for key, _ in self._selector.select():
                key.data()
        for pid in self._children.values():
            os.kill(pid, signal.SIGKILL)
        for pid in self._children.values():
            os.waitpid(pid, 0)

    def _accept(self, listening: socket.socket) -> None:
        line = listening.accept()[0]
        self._selector.register(line, selectors.EVENT_READ, lambda: self._asked(line))

    def _asked(self, line: socket.socket) -> None:
        self._selector.unregister(line)
        try:
            size = int.from_bytes(_received(line, 4), "big")
            first, files, _, _ = socket.recv_fds(line, 1, len(ENDS))
            asked = json.loads(first + _received(line, size - 1))
        except (EOFError, ConnectionError):
            line.close()
            return
        if not asked:
            self._sessions.add(line)
            self._selector.register(line, selectors.EVENT_READ, lambda: self._ended(line))
            line.sendall(b"!")
            return
        given = {"pass_fds": (), "env": asked["env"], "cwd": asked["cwd"], **dict(zip(ENDS, files, strict=True))}
        given["process_group"] = asked.get("process_group", -1)
        entry = _asked_for(asked["args"])
        pid = os.fork()
        if not pid:
            _become(entry, given)
        for file in files:
            os.close(file)
        self._children[line] = pid
        watched = os.pidfd_open(pid)
        self._selector.register(watched, selectors.EVENT_READ, lambda: self._buried(line, watched))
        self._selector.register(line, selectors.EVENT_READ, lambda: self._deserted(line))
        with contextlib.suppress(OSError):
            line.sendall(f"{pid}\n".encode())

    def _ended(self, session: socket.socket) -> None:
        self._selector.unregister(session)
        self._sessions.remove(session)
        session.close()

    def _deserted(self, line: socket.socket) -> None:
        """Kill a process whose client has gone, before anybody gets another."""
        if line in self._children:
            self._selector.unregister(line)
            os.kill(self._children[line], signal.SIGKILL)
            os.waitid(os.P_PID, self._children[line], os.WEXITED | os.WNOWAIT)

    def _buried(self, line: socket.socket, watched: int) -> None:
        self._selector.unregister(watched)
        os.close(watched)
        code = os.waitstatus_to_exitcode(os.waitpid(self._children.pop(line), 0)[1])
        with contextlib.suppress(KeyError):
            self._selector.unregister(line)
        with contextlib.suppress(OSError):
            line.sendall(f"{code}\n".encode())
        line.close()


def main() -> None:
    """The warm process: import, compile, and fork on demand, until nobody asks any more."""
    from homebody import cli
    from homebody.federation.flower.gateway import quiet_flower

    gc.disable()
    quiet_flower()
    for module in MODULES:
        importlib.import_module(module)
    for module, pauses in PAUSES.items():
        vars(importlib.import_module(module)).update(pauses)
    cli._command()
    for method in ("fedmf", "pfedrec"):
        _compile(method)
    assert threading.active_count() == 1, "What has threads cannot be forked."
    subprocess.Popen = _Forked  # type: ignore[misc]
    gc.collect()
    gc.enable()
    gc.freeze()  # collecting garbage would write to pages that all share
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        _Brood(listening).serve()


if __name__ == "__main__":
    main()
