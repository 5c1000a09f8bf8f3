"""The model of a server as a service has it: devices that trained it rank with their private states."""

from __future__ import annotations

from pathlib import Path

from homebody.errors import HomebodyError
from homebody.federation.schema import FeatureSchema
from homebody.federation.server.plan import opened
from homebody.privacy.queries import Query
from homebody.rng import Rng
from homebody.serving.model import Served, acting
from homebody.training import carry

__all__ = ["served_model"]


def served_model(folder: Path, query: Query | None) -> Served:
    """The model of a server's folder: that of the round chosen so far. The server may be running. Items that came after
    that round have fresh rows."""
    with opened(folder) as (plan, records):
        progress, content, items = records.progress(), records.features(), records.items()
    if progress is None:
        raise HomebodyError(f"The server in {folder} has trained no round yet: serve its model once it has.")
    recipe, schema = plan.recipe, FeatureSchema() if content is None else FeatureSchema.read(content)
    catalogue = schema.catalogue(len(items))
    fresh = acting(plan.method()).init_shared(catalogue, Rng.of(recipe.seed))
    shared = carry(progress.shared if progress.best is None else progress.best.shared, fresh)
    codes = {"people": schema.people, "items": schema.items}
    ids, names = [item for item, _ in items], dict(items)
    about = (recipe.method, recipe.fields, shared, catalogue, query)
    return Served.of(*about, ids=ids, names=names, codes=codes, run=plan.run)
