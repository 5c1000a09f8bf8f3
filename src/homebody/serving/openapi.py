"""What a service answers, once: the routes that are served, their description in OpenAPI, and the page for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from homebody import __version__

__all__ = ["ENDPOINTS", "TEXT", "Endpoint", "document", "page"]

JSON = "application/json"
LETTER = "application/x-homebody-letter"
TEXT = "text/plain; version=0.0.4"


@dataclass(frozen=True)
class Endpoint:
    """One thing that a service answers."""

    method: str
    path: str
    name: str
    """Of the handler."""
    summary: str
    asks: Mapping[str, str] = field(default_factory=dict)
    """Parameters of the path and the query, with their meaning."""
    body: Mapping[str, str] = field(default_factory=dict)
    """The kinds of a body, with what is in it."""
    answers: Sequence[str] = (JSON,)
    """The kinds of an answer; the first is given unless the other is accepted."""
    refuses: Mapping[int, str] = field(default_factory=dict)
    operator: bool = False
    """Whether it takes an operator's token."""
    open: bool = False
    """Whether it takes no token, whatever the service asks otherwise."""

    @property
    def route(self) -> str:
        """The path as it is routed: an item's id may have slashes."""
        return self.path.replace("{id}", "{id:path}")


_MODEL = {"model": "The digest of a model, as /v1/model gives it."}
_OTHER = {404: "No such model, or no such choice.", 410: "The model was replaced: the answer names the new one."}
_SLOW = {408: "The body did not come in time.", 429: "The service has no room for the request now."}

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "GET",
        "/v1/model",
        "offer",
        "What is served: the digest of the model, the version of the items, and the ways to be served.",
    ),
    Endpoint(
        "GET",
        "/v1/models/{model}",
        "head",
        "What a device needs of a model apart from rows. It never changes.",
        _MODEL,
        answers=(LETTER,),
        refuses=_OTHER,
    ),
    Endpoint(
        "GET",
        "/v1/table",
        "table",
        "The rows of all items, or what changed since a version.",
        {"since": "A version of the items that the caller has (may be left out)."},
        answers=(LETTER,),
        refuses={400: "Not a version.", 413: "The table is larger than the service sends."},
    ),
    Endpoint(
        "GET",
        "/v1/shelf",
        "shelf",
        "The rows of some items, the same for everybody, the best first.",
        {"half": "1 for the better half (may be left out)."},
        answers=(JSON, LETTER),
        refuses={400: "half is 1, or left out."},
    ),
    Endpoint(
        "GET",
        "/v1/lists/{model}/{choice}",
        "list",
        "The rows that fit an interest best, without those in the better half of the shelf. All have one length.",
        {**_MODEL, "choice": "The number of an interest, from 000, in three digits."},
        answers=(JSON, LETTER),
        refuses=_OTHER,
    ),
    Endpoint(
        "POST",
        "/v1/query",
        "query",
        "The items that fit best what a mechanism told: ranked, if the service ranks; as a letter, the rows of those "
        "that are not in the better half of the shelf. All answers have one length. Nothing of a query is kept.",
        body={
            JSON: "model, and choice (a whole number) or told (a list of numbers).",
            LETTER: "The same as a letter, whose length says nothing: model in its header, choice or told as its part.",
        },
        answers=(JSON, LETTER),
        refuses={
            400: "Not a query.",
            413: "More than 64 KiB.",
            422: "Not what the mechanism tells, or nothing is ranked here, or a choice, which has a list.",
            **_OTHER,
            **_SLOW,
        },
    ),
    Endpoint(
        "POST",
        "/v1/items",
        "add_items",
        "Add items. They are in answers within two seconds.",
        body={JSON: "items: a list of objects with id, and name, features or vector."},
        refuses={
            400: "Not items.",
            401: "No operator's token.",
            409: "An item is there already.",
            413: "More than 64 KiB.",
            422: "An item lacks what the model makes its row of.",
            503: "Nothing can be written now.",
            **_SLOW,
        },
        operator=True,
    ),
    Endpoint(
        "DELETE",
        "/v1/items/{id}",
        "remove_item",
        "Remove an item.",
        {"id": "The item's id."},
        refuses={401: "No operator's token.", 404: "No such item.", 503: "Nothing can be written now."},
        operator=True,
    ),
    Endpoint(
        "GET", "/health", "health", "Whether the service can answer and write.", refuses={503: "It cannot."}, open=True
    ),
    Endpoint(
        "GET",
        "/metrics",
        "metrics",
        "Counts, as Prometheus reads them. Only for this machine.",
        answers=(TEXT,),
        refuses={404: "Asked from another machine."},
        open=True,
    ),
    Endpoint("GET", "/openapi.json", "openapi", "This description.", open=True),
    Endpoint("GET", "/docs", "docs", "This description as a page.", answers=("text/html; charset=utf-8",), open=True),
)


def document(tokens: bool) -> dict[str, Any]:
    """The description in OpenAPI. tokens: whether the service asks for one."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, tokens)
    return {
        "openapi": "3.1.0",
        "info": {"title": "homebody serve", "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(endpoint: Endpoint, tokens: bool) -> dict[str, Any]:
    guarded = endpoint.operator or (tokens and not endpoint.open)
    refuses = {**({401: "No token."} if guarded else {}), **endpoint.refuses}
    sentence = {JSON: {"schema": {"type": "object", "properties": {"error": {"type": "string"}}}}}
    said: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "responses": {
            "200": {"description": "The answer.", "content": {kind: {} for kind in endpoint.answers}},
            **{str(status): {"description": why, "content": sentence} for status, why in sorted(refuses.items())},
        },
    }
    if endpoint.asks:
        said["parameters"] = [
            {
                "name": name,
                "in": "path" if f"{{{name}}}" in endpoint.path else "query",
                "required": f"{{{name}}}" in endpoint.path,
                "description": meaning,
                "schema": {"type": "string"},
            }
            for name, meaning in endpoint.asks.items()
        ]
    if endpoint.body:
        content = {kind: {"schema": {"description": meaning}} for kind, meaning in endpoint.body.items()}
        said["requestBody"] = {"required": True, "content": content}
    if guarded:
        said["security"] = [{"token": []}]
    return said


def page(tokens: bool) -> str:
    """The description as a page without scripts."""
    rows = []
    for endpoint in ENDPOINTS:
        guarded = "operator" if endpoint.operator else "reader" if tokens and not endpoint.open else ""
        notes = [*endpoint.asks.items(), *endpoint.body.items(), *((str(n), w) for n, w in endpoint.refuses.items())]
        listed = "".join(f"<li><code>{escape(name)}</code> {escape(meaning)}</li>" for name, meaning in notes)
        rows.append(
            f"<tr><td><code>{endpoint.method}</code></td><td><code>{escape(endpoint.path)}</code></td>"
            f"<td>{escape(endpoint.summary)}<ul>{listed}</ul></td><td>{escape(', '.join(endpoint.answers))}</td>"
            f"<td>{guarded}</td></tr>"
        )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>homebody serve</title><style>"
        "body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem}"
        "td,th{text-align:left;vertical-align:top;padding:.4rem .8rem;border-top:1px solid #ccc}"
        "ul{margin:.3rem 0;padding-left:1.2rem;color:#555}</style>"
        f"<h1>homebody serve</h1><p>Version {__version__}. The same as <a href=/openapi.json>OpenAPI</a>.</p>"
        "<table><tr><th>Method<th>Path<th>What it answers<th>As<th>Token</tr>" + "".join(rows) + "</table>"
    )
