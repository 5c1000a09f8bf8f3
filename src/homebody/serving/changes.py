"""Changes of a service's items, by the service itself or by its operator's commands beside it."""

from __future__ import annotations

from collections.abc import Sequence

from homebody.errors import HomebodyError
from homebody.serving.additions import GivenItem, Lacking, make
from homebody.serving.model_file import Model
from homebody.serving.store import AddedItem, ServiceStore

__all__ = ["Taken", "add_items", "carried", "remove_item"]


class Taken(HomebodyError):
    """There is an item by this id."""


def add_items(store: ServiceStore, model: Model, items: Sequence[GivenItem]) -> int:
    """Add items as one version, all or none, and return that version."""
    made = make(model, items)
    with store.transaction():
        _insist_on_current(store, model)
        for item in items:
            if store.has(item.id) or (item.id in model.known and not store.is_removed(item.id)):
                raise Taken(f"There is an item '{item.id}' already: remove it first, or leave it out.")
        rows = [AddedItem(item.id, item.to_json(), one.content) for item, one in zip(items, made, strict=True)]
        return store.add(rows, model.digest)


def remove_item(store: ServiceStore, model: Model, id_: str) -> int:
    """Remove an item as one version, and return that version."""
    with store.transaction():
        _insist_on_current(store, model)
        there = store.has(id_) or (id_ in model.known and not store.is_removed(id_))
        if not there:
            raise HomebodyError(f"There is no item '{id_[:200]}'.")
        return store.remove(id_)


def carried(store: ServiceStore, model: Model) -> tuple[list[AddedItem], list[str]]:
    """The items that were added, with the rows that another model makes of them; and those that it makes none of: they
    came as rows of the model before. An item that the model has itself is that one."""
    kept, lost = [], []
    for item in store.changes(-1).added:
        if item.id in model.known:
            continue
        given = GivenItem(item.id, str(item.given.get("name", "")), item.given.get("features", {}))
        try:
            (made,) = make(model, [given])
            kept.append(item._replace(row=made.content))
        except HomebodyError:
            lost.append(item.id)
    return kept, lost


def _insist_on_current(store: ServiceStore, model: Model) -> None:
    if store.current().digest != model.digest:
        raise Lacking("The model was replaced at this moment: send it again.")
