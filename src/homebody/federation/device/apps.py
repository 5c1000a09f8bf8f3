"""The views of a device's people that are apps: asks the apps, and counts the outcomes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from homebody.core import Batch, Catalogue, Method, Tree, Update
from homebody.federation import wire
from homebody.federation.device.desk import AppReply, Desk, Relay, SentQuestion, usual_socket
from homebody.federation.device.home import Home
from homebody.federation.device.views import KnownView
from homebody.federation.schema import FeatureSchema
from homebody.federation.views import AppQuestion, views_of

__all__ = ["Apps", "asking"]


@contextmanager
def asking(home: Home, where: Path | None, log: Callable[..., None]) -> Iterator[Apps | None]:
    """The apps of a device, to be asked through its running process, or through a desk that is open meanwhile."""
    if not home.views.all():
        yield None
    elif home.store.client_runs():
        yield Apps(home, Relay(where or usual_socket(home.path)), log)
    else:
        with home.store.only_client(), Desk(home.path, where) as desk:
            yield Apps(home, desk, log)


class Apps:
    """Asks apps through the desk, and counts the outcomes in the home. Without a desk every app counts as away."""

    def __init__(self, home: Home, desk: Desk | Relay | None, log: Callable[..., None]) -> None:
        self._home, self._desk, self._log = home, desk, log
        self._unknown: set[str] = set()

    def names(self, method: Method, catalogue: Catalogue) -> list[str]:
        """The views that this method trains and that apps hold. An app of another view is not asked, but logged."""
        views = views_of(method)
        if views is None:
            return []
        trained = views.people(catalogue)
        known = [view.name for view in self._home.views.all()]
        for name in known:
            if name not in trained and name not in self._unknown:
                self._unknown.add(name)
                self._log("view unknown", view=name, reason=unknown_view(name, trained))
        return [name for name in known if name in trained]

    def gradients(
        self,
        about: Mapping[str, Any],
        method: Method,
        shared: Tree,
        schema: FeatureSchema,
        batch: Batch,
        leaves: Tree,
    ) -> dict[str, Update]:
        """Each app's gradients for these samples; zeros for an app that is left out.

        about: the fields of the question that say what it is for. leaves: what a person sends, by name.
        """
        views = views_of(method)
        assert views is not None
        queries: dict[str, SentQuestion] = {}
        quiet: dict[str, Update] = {}
        samples = {name: value for name, value in batch.items() if not name.endswith("/input")}
        for name in self.names(method, schema.catalogue(0)):
            silence = views.silence(name, shared)
            quiet[name] = {part: value for part, value in silence.items() if f"{name}/{part}" in leaves}
            queries[name] = self._query({**about, "do": "gradient"}, name, shared, schema, samples, quiet[name])
        replies = self._ask(queries)
        return {name: replies[name].update if name in replies else nothing for name, nothing in quiet.items()}

    def scores(
        self, about: Mapping[str, Any], method: Method, shared: Tree, schema: FeatureSchema
    ) -> dict[str, Tensor]:
        """Each app's scores of all items; an app that is left out scores all items alike."""
        n_items = about["n_items"]
        alike = torch.full((n_items,), 1.0 / n_items)
        queries = {}
        for name in self.names(method, schema.catalogue(0)):
            queries[name] = self._query({**about, "do": "scores"}, name, shared, schema, {}, {"scores": alike})
        replies = self._ask(queries)
        return {name: replies[name].update["scores"] if name in replies else alike for name in queries}

    def _query(
        self, about: dict[str, Any], view: str, shared: Tree, schema: FeatureSchema, batch: Batch, like: Update
    ) -> SentQuestion:
        """A question to an app, which sees of the shared parameters the item tower and its own. like: its answer."""
        model = self._home.models.ranking()
        people = {name: code for name, code in schema.people.items() if code.view == view}
        narrowed = replace(schema, people=people)
        question = AppQuestion(
            **about,
            ranks=str(json.loads(model.description)["run"]) if model else "",  # apps keep this run's towers
            view=view,
            parts=list(like) if about["do"] == "gradient" else [],
            shared={name: value for name, value in shared.items() if name.startswith(("item/", f"{view}/"))},
            batch=batch,
            schema=narrowed if about["do"] == "scores" else replace(narrowed, items={}, numbers={}),
        )
        return SentQuestion(question.content(), wire.shapes(like))

    def _ask(self, queries: Mapping[str, SentQuestion]) -> dict[str, AppReply]:
        """The replies of the apps that answered. The outcome of every question is counted."""
        known: list[KnownView] = self._home.views.all()
        away = {name: AppReply("away", {}, "Its app is not there.") for name in queries}
        replies = self._desk.ask(queries, known) if self._desk is not None else away
        for name, reply in replies.items():
            self._home.views.count(name, reply.outcome)
            if reply.outcome != "answered":
                self._log("view left out", view=name, why=reply.outcome, reason=reply.reason)
        return {name: reply for name, reply in replies.items() if reply.outcome == "answered"}


def unknown_view(name: str, trained: Mapping[str, object]) -> str:
    """A sentence about an app whose view the server's model does not have."""
    return (
        f"The server's model has no view '{name}' (it has {', '.join(trained)}): its app is not asked. The operator "
        f"declares a view with `homebody server init … --view {name}=SIZE`."
    )
