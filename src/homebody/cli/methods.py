"""`homebody methods`: the methods that can be run, and their fields."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Argument

from homebody.cli import options
from homebody.errors import HomebodyError

__all__ = ["methods"]


def methods(
    name: Annotated[str | None, Argument(help="A method whose fields to show.")] = None, as_json: options.Json = False
) -> None:
    """List methods and references; with NAME what one is, its paper, and the fields that --set takes."""
    from homebody.methods import METHODS, trust
    from homebody.methods.packages import packaged_methods

    if name:
        trust(name)
    described = [_describe(method) for method in ([name] if name else METHODS)]
    if not name:
        described += [_described_package(method) for method in packaged_methods() if method not in METHODS]
    shown = (lambda: _print_one(described[0])) if name else (lambda: _print_all(described))
    options.answer({"methods": described}, as_json, shown)


def _print_all(described: list[dict[str, Any]]) -> None:
    """What each method is, whole: shortened, some would read alike."""
    names = max(len(entry["name"]) for entry in described)
    for kind in ("federated", "centralised", "cannot be used"):
        if not any(entry["kind"] == kind for entry in described):
            continue
        table = options.table([kind.ljust(names), "what it is"], tight=True)
        for entry in described:
            if entry["kind"] == kind:
                brought = f"{entry['package']}: " if "package" in entry else ""
                table.add_row(entry["name"], f"{brought}{entry['title']}")
        options.show(table)
    options.show("`homebody methods NAME` has more; `path/to/file.py:Class` runs your own.")


def _print_one(entry: dict[str, Any]) -> None:
    lines = [f"{entry['name']} ({entry['kind']}): {entry['title']}"]
    lines += [entry["paper"]] if entry["paper"] else []
    lines += [f"from the package {entry['package']}, code {entry['code']}"] if "package" in entry else []
    lines += [f"rounds by default: {entry['default_rounds']}"] if entry["default_rounds"] else []
    if entry["channel"]:
        stages = " ".join(f"--stage {text}" for text in entry["channel"])
        lines.append(f"its channel, unless stages are given: {stages}")
    options.show(*lines)
    from rich.text import Text

    table = options.table(["field", "default", "bounds", "search", "meaning"])
    for field in entry["fields"]:
        low, high = field["low"], field["high"]
        bounds = f"{'' if low is None else low} … {'' if high is None else high}" if (low, high) != (None, None) else ""
        bounds = bounds or " or ".join(map(str, field["choices"]))
        cells = (field["name"], str(field["default"]), bounds, field["search"] or "", field["doc"])
        table.add_row(*(Text(cell) for cell in cells))  # a search such as 1:100:log is no picture
    if entry["fields"]:
        declared = "as it declares" if entry["search_declared"] else "around the defaults, as it declares none"
        options.show(table, f"search: where `homebody tune` looks, {declared}.")


def _described_package(name: str) -> dict[str, Any]:
    """A method of an installed package; the error, if its package is broken."""
    try:
        return _describe(name)
    except HomebodyError as error:
        return {"name": name, "kind": "cannot be used", "title": str(error)}


def _describe(name: str) -> dict[str, Any]:
    from homebody.core import Method
    from homebody.methods import METHODS, find, own_channel
    from homebody.methods.packages import packaged
    from homebody.privacy.specs import stage_texts
    from homebody.settings import params
    from homebody.studies.space import search_space, space_text

    method = find(name)
    space, declared = search_space(method)
    federated = issubclass(method, Method)
    package = None if name in METHODS else packaged(name)
    return {
        "name": name,
        "kind": "federated" if federated else "centralised",
        "title": method.about.title,
        "paper": method.about.paper,
        "default_rounds": method.about.rounds,
        "channel": stage_texts(own_channel(name)),
        **({} if package is None else {"package": f"{package.package} {package.version}", "code": package.fingerprint}),
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
