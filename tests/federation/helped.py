"""A helper that opens secure sums, and whoever asks it, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tests.federation.proxy.conftest import Client

from homebody.federation.device.reporter import Reporter
from homebody.federation.envelopes import signing_keys
from homebody.federation.proxy.admin import make
from homebody.federation.proxy.settings import ProxySettings
from homebody.federation.proxy.store import ProxyStore, Sender
from homebody.federation.server.helper import HelperClient

URL = "http://127.0.0.1:9445"


class InProcess:
    """What a `httpx.Client` does, with a proxy in this process."""

    def __init__(self, helper: Helper) -> None:
        self._helper = helper

    @contextmanager
    def stream(self, method: str, path: str, content: bytes | None = None, **_: Any) -> Iterator[Any]:
        if self._helper.away:
            raise httpx.ConnectError("away")
        response = self._helper.client.ask(method, path, content or b"")
        self._helper.asked.append((path, content or b""))
        yield Streamed(response)

    def close(self) -> None: ...


class Streamed:
    def __init__(self, response: Any) -> None:
        self.status_code, self.headers, self._content = response.status_code, response.headers, response.content

    def iter_raw(self) -> Iterator[bytes]:
        yield self._content


class Helper:
    """A proxy, and whoever asks it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.settings = folder, ProxySettings(next="", tls=False)
        make(folder, self.settings)
        self.server = signing_keys()
        self.away, self.asked = False, list[tuple[str, bytes]]()
        store = ProxyStore(folder, self.settings)
        with store.transaction():
            store.sums.allow(store.mark(self.server[0]))
        store.close()
        self.client = Client(folder, self.settings)

    def restart(self) -> None:
        self.client.close()
        self.client = Client(self.folder, self.settings)

    def asks(self, known: bool = True) -> HelperClient:
        client = HelperClient(URL, ca=None, secret=(self.server if known else signing_keys())[1])
        client._http.close()
        client._http = InProcess(self)  # type: ignore[assignment]
        return client

    def reporter(self, known: bool = True) -> Reporter:
        public, secret = signing_keys()
        if known:
            store = ProxyStore(self.folder, self.settings)
            with store.transaction():
                store.allow(public, Sender(False, 1))
            store.close()
            self.restart()
        reporter = Reporter(URL, ca=None, secret=secret)
        reporter._http.close()
        reporter._http = InProcess(self)  # type: ignore[assignment]
        return reporter
