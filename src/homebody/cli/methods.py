"""`homebody methods`: the methods that can be run, and their fields."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Argument

from homebody.cli import options

__all__ = ["methods"]


def methods(
    name: Annotated[str | None, Argument(help="Show this one's fields.")] = None, as_json: options.Json = False
) -> None:
    """Every method and reference: what it is, its paper, and the fields that --set takes."""
    from homebody.methods import METHODS, trust

    if name:
        trust(name)
    described = [_describe(one) for one in ([name] if name else METHODS)]
    options.answer({"methods": described}, as_json, lambda: _print(described, whole=name is None))


def _print(described: list[dict[str, Any]], *, whole: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(emoji=False)  # a search such as 1:100:log is no picture
    if whole:
        table = Table("name", "kind", "what it is", "fields")
        for one in described:
            table.add_row(one["name"], one["kind"], one["title"], ", ".join(f["name"] for f in one["fields"]))
        console.print(table)
        console.print(
            "`homebody methods NAME` explains the fields; `path/to/file.py:Class` runs your own.", highlight=False
        )
        return
    (one,) = described
    console.print(f"[bold]{one['name']}[/bold] ({one['kind']}): {one['title']}", highlight=False)
    if one["paper"]:
        console.print(one["paper"], highlight=False)
    if one["channel"]:
        stages = " ".join(f"--stage {text}" for text in one["channel"])
        console.print(f"its channel, unless stages are given: {stages}", highlight=False, soft_wrap=True, markup=False)
    table = Table("field", "default", "bounds", "search", "meaning")
    for field in one["fields"]:
        low, high = field["low"], field["high"]
        bounds = f"{'' if low is None else low} … {'' if high is None else high}" if (low, high) != (None, None) else ""
        bounds = bounds or " or ".join(map(str, field["choices"]))
        table.add_row(field["name"], str(field["default"]), bounds, field["search"] or "", field["doc"])
    if one["fields"]:
        console.print(table)
        declared = "as it declares" if one["search_declared"] else "around the defaults, as it declares none"
        console.print(f"search: where `homebody tune` looks, {declared}.", highlight=False)


def _describe(name: str) -> dict[str, Any]:
    from homebody.core import Method
    from homebody.methods import find, own_channel
    from homebody.privacy.specs import stage_texts
    from homebody.settings import params
    from homebody.studies.space import search_space, space_text

    found = find(name)
    space, declared = search_space(found)
    federated = issubclass(found, Method)
    return {
        "name": name,
        "kind": "federated" if federated else "centralised",
        "title": found.about.title,
        "paper": found.about.paper,
        "default_rounds": found.about.rounds,
        "channel": stage_texts(own_channel(name)),
        "search_declared": declared,
        "fields": [
            {
                "name": spec.name,
                "default": spec.default,
                **{name: spec.metadata[name] for name in ("doc", "low", "high", "choices")},
                "search": space_text(space[spec.name]) if spec.name in space else None,
            }
            for spec in params(found)
        ],
    }
