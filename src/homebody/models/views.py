"""The features of people that each view has, for models that read views."""

from __future__ import annotations

from torch import Tensor

from homebody.core import Catalogue, Column
from homebody.errors import HomebodyError, refuse_unknown, unknown_name

__all__ = ["item_columns", "knows", "tower_columns", "view_columns"]


def view_columns(catalogue: Catalogue, chosen: str = "") -> dict[str, dict[str, Column]]:
    """The columns of each chosen view, such as `profile,taste`; empty: of every view.

    >>> import torch
    >>> age = Column(torch.empty(0), 1, "number", view="profile")
    >>> list(view_columns(Catalogue(3, {}, {"age": age}))["profile"])
    ['age']
    """
    known = catalogue.views
    if not known:
        raise HomebodyError("No feature of people is in a view: give one with --view NAME=FILE.csv.")
    names = _listed(chosen)
    refuse_unknown("view of this data", names, known)
    return {name: {column: catalogue.people[column] for column in known[name]} for name in names or known}


def item_columns(catalogue: Catalogue, chosen: str = "", *, texts: bool = True) -> dict[str, Column]:
    """The chosen features of items; empty: all but numbers, and without `texts` all but those too."""
    names = _listed(chosen)
    for name in names:
        if name not in catalogue.items:
            raise unknown_name("feature of items", name, catalogue.items or ["none"])
    return {
        name: column
        for name, column in catalogue.items.items()
        if (name in names if names else column.kind != "number" and (texts or not column.text))
    }


def tower_columns(catalogue: Catalogue, chosen: str = "") -> dict[str, Column]:
    """The same for an item tower, which reads nothing else: refused where there are none."""
    columns = item_columns(catalogue, chosen)
    if not columns:
        raise HomebodyError("Items have no features, such as a title or genres, and an item tower reads nothing else.")
    return columns


def knows(given: Tensor) -> Tensor:
    """1 if a view has anything on a person, by the inputs that it gives; otherwise 0."""
    return (given != 0).any().float()


def _listed(chosen: str) -> list[str]:
    return [name.strip() for name in chosen.split(",")] if chosen.strip() else []
