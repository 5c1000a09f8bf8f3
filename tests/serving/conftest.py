"""Services of small models: in a folder, on a socket of this process."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.processes import PATIENCE

from homebody.core import Catalogue, Column
from homebody.data.codes import Code
from homebody.federation.service import web
from homebody.methods import build
from homebody.privacy.queries import Query
from homebody.rng import Rng
from homebody.serving.app import Service
from homebody.serving.client import Client
from homebody.serving.model import Served
from homebody.serving.model_file import Model
from homebody.serving.operator import add_token, install
from homebody.serving.settings import FILE, ServiceSettings
from homebody.serving.store import create

CHOICE = "choice:epsilon=5,interests=6"
NEWS = {"encoder": "nrms", "d": 4, "heads": 2, "words": "random", "basis": 5}
WORDS = ("cat", "dog", "mat", "moon", "sun", "tea")


def films(count: int = 300, query: str = CHOICE, seed: int = 0, method: str = "fedials") -> Model:
    """A model of an item table, with names for a few."""
    table = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    ids = [f"film-{number}" for number in range(count)]
    asked = Query.parse(query) if query else None
    named = {"film-3": 'The "Third"', "film-7": "Sièvre"}
    return Model.of(Served.of(method, {}, {"item": table}, Catalogue(count), asked, ids=ids, names=named))


def news(count: int = 60, query: str = "attention:epsilon=5,interests=5", seed: int = 0) -> Model:
    """A model of news, whose rows are made of titles; the service ranks."""
    rng, code = Rng.of(seed), Code("sequence", WORDS, text=True, width=4)
    words = 1 + rng.fold("titles").integers(len(WORDS), count * 3).view(count, 3)
    values = torch.cat([words, torch.full((count, 1), -1)], dim=1)
    catalogue = Catalogue(count, {"title": Column(values, code.size, "sequence", True, words=WORDS)})
    start = build("privaterec", NEWS).init_shared(catalogue, rng)  # type: ignore[union-attr]
    shared = {name: value + 0.3 * rng.fold(name).normal(*value.shape) for name, value in start.items()}
    shared["news/own"].zero_()  # a vector of each one's own, which those that come later do not have
    ids, codes = [f"n{number}" for number in range(count)], {"items": {"title": code}}
    served = Served.of("privaterec", NEWS, shared, catalogue, Query.parse(query), ids=ids, codes=codes)
    return Model.of(served)


def made(folder: Path, model: Model, **settings: Any) -> ServiceSettings:
    """A service's folder."""
    folder.mkdir(parents=True)
    query = model.served.head.query
    given = {"query": "" if query is None else str(query), "tls": False, "rows": 40, "answers": 20, **settings}
    chosen = ServiceSettings(**given)
    (folder / FILE).write_text(chosen.to_toml())
    create(folder)
    install(folder, model)
    return chosen


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def said(self) -> Any:
        return json.loads(self.body)


class Running:
    """A service on a socket of this process."""

    def __init__(self, folder: Path, settings: ServiceSettings, **rest: Any) -> None:
        self.folder, self.service = folder, Service(folder, settings, **rest)
        listening = web.listen("127.0.0.1", 0)
        self.port = int(listening.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = web.server(self.service, listening, counted=self.service.refused)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()
        self.client = Client(self.url)
        self.operator = ""
        """The token of an operator, for a service that the test made."""

    def ask(self, method: str, path: str, body: Any = None, token: str = "", **headers: str) -> Answer:
        """What is answered; a body that is no bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if token:
            named["authorization"] = f"Bearer {token}"
        connection.request(method, path, content, named)
        answer = connection.getresponse()
        told = Answer(answer.status, answer.headers, answer.read())
        connection.close()
        return told

    def close(self) -> None:
        self.client.close()
        if self._thread.is_alive():
            self._server.should_exit = True
            self._thread.join(PATIENCE)
            assert not self._thread.is_alive()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Serve a model, or what is in a folder."""
    running: list[Running] = []

    def served(model: Model | None = None, *, name: str = "service", clock: Any = None, **settings: Any) -> Running:
        folder = tmp_path / name
        chosen = ServiceSettings.read(folder) if model is None else made(folder, model, **settings)
        token = "" if model is None else add_token(folder, "operator", operator=True)
        running.append(Running(folder, chosen, **({} if clock is None else {"clock": clock})))
        running[-1].operator = token
        return running[-1]

    yield served
    for one in running:
        one.close()
