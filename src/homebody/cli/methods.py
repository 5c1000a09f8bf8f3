"""`homebody methods`: the methods that can be run, and their fields."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Argument

from homebody.cli import options

__all__ = ["methods"]


def methods(
    name: Annotated[str | None, Argument(help="A method whose fields to show.")] = None, as_json: options.Json = False
) -> None:
    """List methods and references: what each is, its paper, and the fields that --set takes."""
    from homebody.methods import METHODS, trust

    if name:
        trust(name)
    described = [_describe(method) for method in ([name] if name else METHODS)]
    options.answer({"methods": described}, as_json, lambda: _print(described, whole=name is None))


def _print(described: list[dict[str, Any]], *, whole: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(emoji=False)  # a search such as 1:100:log is no picture
    if whole:
        table = Table("name", "kind", "what it is", "fields")
        for entry in described:
            table.add_row(entry["name"], entry["kind"], entry["title"], ", ".join(f["name"] for f in entry["fields"]))
        console.print(table)
        console.print(
            "`homebody methods NAME` explains the fields; `path/to/file.py:Class` runs your own.", highlight=False
        )
        return
    (entry,) = described
    console.print(f"[bold]{entry['name']}[/bold] ({entry['kind']}): {entry['title']}", highlight=False)
    if entry["paper"]:
        console.print(entry["paper"], highlight=False)
    if entry["channel"]:
        stages = " ".join(f"--stage {text}" for text in entry["channel"])
        console.print(f"its channel, unless stages are given: {stages}", highlight=False, soft_wrap=True, markup=False)
    table = Table("field", "default", "bounds", "search", "meaning")
    for field in entry["fields"]:
        low, high = field["low"], field["high"]
        bounds = f"{'' if low is None else low} … {'' if high is None else high}" if (low, high) != (None, None) else ""
        bounds = bounds or " or ".join(map(str, field["choices"]))
        table.add_row(field["name"], str(field["default"]), bounds, field["search"] or "", field["doc"])
    if entry["fields"]:
        console.print(table)
        declared = "as it declares" if entry["search_declared"] else "around the defaults, as it declares none"
        console.print(f"search: where `homebody tune` looks, {declared}.", highlight=False)


def _describe(name: str) -> dict[str, Any]:
    from homebody.core import Method
    from homebody.methods import find, own_channel
    from homebody.privacy.specs import stage_texts
    from homebody.settings import params
    from homebody.studies.space import search_space, space_text

    method = find(name)
    space, declared = search_space(method)
    federated = issubclass(method, Method)
    return {
        "name": name,
        "kind": "federated" if federated else "centralised",
        "title": method.about.title,
        "paper": method.about.paper,
        "default_rounds": method.about.rounds,
        "channel": stage_texts(own_channel(name)),
        "search_declared": declared,
        "fields": [
            {
                "name": spec.name,
                "default": spec.default,
                **{name: spec.metadata[name] for name in ("doc", "low", "high", "choices")},
                "search": space_text(space[spec.name]) if spec.name in space else None,
            }
            for spec in params(method)
        ],
    }
