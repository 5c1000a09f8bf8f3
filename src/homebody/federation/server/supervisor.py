"""The parent of a server's processes: it starts the link, the intake and the trainer, and starts again what dies.

It holds nothing itself. Its children read from it until it ends, and end with it.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from homebody.errors import HomebodyError
from homebody.federation.server.plan import ServerPlan
from homebody.federation.service.logs import log
from homebody.files import holding

__all__ = ["supervise"]

PATIENCE = 60.0
"""Seconds for the link to listen."""
FAREWELL = 20.0
"""Seconds for the children of a supervisor that was killed to end."""
SLOWEST = 30.0
"""Most seconds between two starts of a process that keeps dying."""
LATER, LATER_SECONDS = 76, 600.0
"""The exit code of a trainer that too few devices answer, and the seconds until it is started again: each attempt is
charged."""
STEADY = 10.0
"""A process that ran for so many seconds before it died is started again at once."""


def supervise(folder: Path, *, once: bool = False) -> int:
    """Run a server until it is stopped, or with `once` until the training ends; returns the exit code."""
    plan = ServerPlan.read(folder)
    plan.method()  # refused here, in a sentence, before anything is started
    with holding(folder / ".lock", f"A server runs in {folder} already.", patience=FAREWELL) as lock:
        return _Supervisor(plan, folder, once, lock).run()


class _Supervisor:
    def __init__(self, plan: ServerPlan, folder: Path, once: bool, lock: int) -> None:
        self._plan, self._folder, self._once, self._lock = plan, folder, once, lock
        self._link: subprocess.Popen[bytes] | None = None
        self._trainer: subprocess.Popen[bytes] | None = None
        self._intake: subprocess.Popen[bytes] | None = None
        self._intake_from = 0.0
        self._told = False

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._tell)
        pause, began = 0.2, 0.0
        try:
            while not self._told:
                self._refuse_link()
                if not self._plan.link and (self._link is None or self._link.poll() is not None):
                    if not self._start_link():
                        pause = min(2 * pause, SLOWEST)
                        log("link ended", starts_again_in=pause)
                        self._wait(pause)
                    continue
                self._keep_intake()
                if self._trainer is None:
                    began = time.monotonic()
                    options = ["--follow-parent", *(["--once"] if self._once else [])]
                    self._trainer = self._start("homebody.federation.server.trainer", str(self._folder), *options)
                code = self._trainer.poll()
                if code is None:
                    time.sleep(0.05)
                    continue
                self._trainer = None
                if code in (0, 2):
                    return code
                pause = 0.2 if time.monotonic() - began > STEADY else min(2 * pause, SLOWEST)
                wait = LATER_SECONDS if code == LATER else pause
                log("trainer ended", code=code, starts_again_in=wait)
                self._wait(wait)
            return 0
        finally:
            self._end()

    def _start_link(self) -> bool:
        """Whether it listens."""
        plan, keys = self._plan, self._folder / "keys"
        tls = ["--cert", str(keys / "server.pem"), "--key", str(keys / "server.key")] if plan.tls else []
        where = ["--host", plan.host, "--port", str(plan.port), "--secret", str(keys / "secret")]
        where += ["--elsewhere", plan.elsewhere(self._folder, "listen")]
        self._link = self._start("homebody.federation.flower.superlink", *where, *tls, "--follow-parent")
        until = time.monotonic() + PATIENCE
        host, _, port = plan.address.rpartition(":")
        while not self._told:
            code = self._link.poll()
            self._refuse_link()
            if code is None:
                with suppress(OSError):
                    socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
                    return True
            if code is not None or time.monotonic() > until:
                self._link.kill()
                self._link.wait()
                return False
            time.sleep(0.05)
        return True

    def _keep_intake(self) -> None:
        """Start the intake if the plan has one, and start it again if it died."""
        if not self._plan.reports or time.monotonic() < self._intake_from:
            return
        code = None if self._intake is None else self._intake.poll()
        if code == 2:
            raise HomebodyError(f"The server cannot take in reports on {self._plan.reports}; the error is above.")
        if self._intake is None or code is not None:
            if code is not None:
                log("intake ended", code=code)
            self._intake = self._start("homebody.federation.server.intake", str(self._folder), "--follow-parent")
            self._intake_from = time.monotonic() + 1.0  # one that keeps dying is not started more often

    def _refuse_link(self) -> None:
        """Stop if the link ended because of something that a person must correct: it would end again."""
        if self._link is not None and self._link.poll() == 2:
            raise HomebodyError(f"The link cannot be started on {self._plan.listen}; the error is above.")

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        """A child holds the lock too: the next supervisor waits until the last child of this one has ended."""
        command = [sys.executable, "-P", "-m", module, *arguments]
        return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(self._lock,))

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._told and time.monotonic() < until:
            time.sleep(0.05)

    def _tell(self, *_: object) -> None:
        self._told = True

    def _end(self) -> None:
        for process in (self._trainer, self._intake, self._link):
            if process is None:
                continue
            if process.stdin:
                process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
