"""The process of a device: join the network, wait for letters, answer them, and reconnect after any failure.

A second thread asks the service that recommends, by the clock.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from homebody.errors import HomebodyError
from homebody.federation.device.desk import SECONDS, Desk
from homebody.federation.device.device import Device
from homebody.federation.device.home import Home
from homebody.federation.flower.fleet import Fleet, Letter
from homebody.federation.flower.protocol import LinkDown, Refused
from homebody.federation.service.logs import log
from homebody.federation.views import hide_memory

if TYPE_CHECKING:
    from homebody.federation.device.reporter import Reporter

__all__ = ["take_part"]

HOLD = 20.0
"""Seconds that a pull waits on the server's side."""
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0
"""Seconds before a server that is away is tried again."""
LONGEST_SERVICE_PAUSE = 300.0
"""The same for a service."""
LOOK = 1.0
"""Seconds between two looks at whether the service is to be asked."""


def take_part(folder: Path, where: Path | None = None, view_seconds: float = SECONDS) -> None:
    """Take part until a signal stops the process. A device has one process, which answers letters one by one.

    where, view_seconds: the socket for apps, by default beside the folder, and how long they may take.
    """
    torch.set_num_threads(1)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with Home(folder) as home, home.store.only_client():
        reporter, desk = _reporter(home, folder, stop), None
        if views := home.views.all():
            hide_memory()
            desk = Desk(folder, where, seconds=view_seconds, log=log)
            log("listening", views=len(views))
        device = Device(home, log, reporter, desk=desk, sleep=stop.wait)
        clock = threading.Thread(target=_keep_asking, args=(folder, stop), name="clock", daemon=True)
        clock.start()
        try:
            if home.settings.server:
                _Client(home, device, folder, stop).run()
            else:
                stop.wait()
        finally:
            if reporter is not None:
                reporter.close()
            if desk is not None:
                desk.close()
    if device.stuck and not stop.is_set():
        # A thread cannot be stopped from outside: only the end of the program frees what it uses.
        log("starting anew", reason="The work for a letter took longer than this device allows.")
        sys.stdout.flush()
        os.execv(sys.executable, sys.orig_argv)


def _reporter(home: Home, folder: Path, stop: threading.Event) -> Reporter | None:
    """The reporter to the proxy, if the device has one; only then are its libraries imported."""
    if not home.settings.proxy:
        return None
    from homebody.federation.device.reporter import Reporter

    return Reporter.of(folder, home.settings, lambda: stop.is_set() or home.settings.paused)


def _keep_asking(folder: Path, stop: threading.Event) -> None:
    """Ask the service whenever a turn has come; one that cannot be asked is tried again, ever more rarely."""
    pause, why = FIRST_PAUSE, ""
    with Home(folder) as home:
        while not stop.is_set():
            try:
                if home.settings.serving and not home.settings.paused:
                    asked = _ask(home, stop)
                    pause, why = FIRST_PAUSE, ""
                    if asked:
                        log("served", turn=asked)
                stop.wait(LOOK)
            except Exception as error:  # a service must not end the thread
                said = str(error) if isinstance(error, HomebodyError) else type(error).__name__
                if said != why:  # said once, not every time
                    log("not served", reason=said[:200])
                    why = said
                stop.wait(pause)
                pause = min(2 * pause, LONGEST_SERVICE_PAUSE)


def _ask(home: Home, stop: threading.Event) -> int:
    """Take the present turn if it has something left to do; its number, or 0 if not."""
    from homebody.federation.device.serving import Asker

    asker = Asker(home, silent=lambda: stop.is_set() or home.settings.paused, wait=stop.wait)
    try:
        return asker.take_turn() if asker.wanted else 0
    finally:
        asker.close()


class _Client:
    def __init__(self, home: Home, device: Device, folder: Path, stop: threading.Event) -> None:
        self._home, self._device, self._folder, self._stop = home, device, folder, stop
        self._pause, self._why = FIRST_PAUSE, ""
        self.fleet, self._joined = self._new_fleet(), False

    def _new_fleet(self) -> Fleet:
        ca, settings = self._folder / "ca.pem", self._home.settings
        known, key = ca.read_bytes() if ca.exists() else None, (self._folder / "device.key").read_bytes()
        return Fleet(settings.server, ca=known, key=key, last_node=settings.node)

    def run(self) -> None:
        try:
            self._run()
        finally:
            self.fleet.close()

    def _run(self) -> None:
        while not self._stop.is_set() and not self._device.stuck:
            if self._home.settings.paused:
                self._rest()
                continue
            try:
                if not self._joined:
                    self._home.configure(node=self.fleet.join())
                    self._joined = True
                    log("joined")
                letter = self.fleet.pull(HOLD)
                self._pause, self._why = FIRST_PAUSE, ""
                if letter is not None and not self._silent():
                    log("asked", kind=letter.kind)
                    until = time.monotonic() + letter.ttl
                    self._reply(letter, self._device.answer(letter.body, until), until)
            except (LinkDown, Refused) as error:
                # A letter may have been lost on its way: a device that joins again is asked again.
                self._joined = False
                self._away(_why(error))

    def _reply(self, letter: Letter, body: bytes, until: float) -> None:
        """Send an answer again and again, until it is accepted, refused, or too late by this device's clock."""
        pause, taking_part = FIRST_PAUSE, self._home.people.active()
        while not self._silent() and self._home.people.active() == taking_part and time.monotonic() < until:
            try:
                taken = self.fleet.answer(letter, body)
                log("sent" if taken else "not wanted any more", kind=letter.kind, bytes=len(body))
                return
            except LinkDown:
                self._stop.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        log("not sent", kind=letter.kind)

    def _silent(self) -> bool:
        """Whether nothing may leave any more, because the process is stopping or the device is paused."""
        return self._stop.is_set() or self._home.settings.paused

    def _rest(self) -> None:
        if self._joined:
            self.fleet.close()
            self.fleet, self._joined = self._new_fleet(), False
            log("paused")
        self._stop.wait(1.0)

    def _away(self, why: str) -> None:
        if why != self._why:  # said once, not every time
            log("away", reason=why[:200])
            self._why = why
        self._stop.wait(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


def _why(error: LinkDown | Refused) -> str:
    """Why the device is not connected, for the log."""
    status = error.status if isinstance(error, Refused) else 0
    if status == 412:
        return (
            "The server does not know this device's key: it has just started, or its operator has yet to add the key "
            "with `homebody keys add`."
        )
    if status == 401:
        return "The server does not know this connection any more: it was started anew, or the key was removed."
    if status >= 500:
        return "The server cannot answer now."
    return str(error)
