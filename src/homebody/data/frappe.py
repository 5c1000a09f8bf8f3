"""Frappe (Baltrunas et al. 2015): which app someone used, how often, and in which circumstances.

A row of `frappe.csv` is a user, an app and a circumstance (time of day, weekday, weather, place …) with the number
of times it happened, `cnt`. Every row is an interaction, its circumstance the `contexts`, and `cnt` its rating.
`cnt` exists only for what happened, so it must never become a feature of the app: there it would give away the
label. There are no times; a history stands in the order of the file.

Which countries and cities there are is published nowhere but in people's rows, so these are hashed; the other
circumstances have fixed lists.

Of the apps' shop pages (`meta.csv`) these are features: category, downloads (a range), developer and language as
categories; price in dollars and the shop's mean stars as numbers; name and short description as texts. The package,
the icon's address and the long description are left out. The word `unknown` becomes null, as does a price in
another currency. An app without a name is called by number.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars as pl

from homebody.data.builder import build
from homebody.data.codes import Code
from homebody.data.features import Features, Kind
from homebody.data.population import Population
from homebody.data.reading import member_bytes, read_rows, rows_for

__all__ = ["read_frappe"]

CONTEXTS: dict[str, type[pl.DataType]] = {
    **dict.fromkeys(("daytime", "weekday", "isweekend", "homework", "cost", "weather", "country"), pl.String),
    # Cities are numbers that name none.
    "city": pl.Int32,
}
DECLARED = {
    "daytime": Code("one", ("afternoon", "evening", "morning", "night", "noon", "sunrise", "sunset")),
    "weekday": Code("one", ("friday", "monday", "saturday", "sunday", "thursday", "tuesday", "wednesday")),
    "isweekend": Code("one", ("weekend", "workday")),
    "homework": Code("one", ("home", "work")),
    "cost": Code("one", ("free", "paid")),
    "weather": Code("one", ("cloudy", "drizzle", "foggy", "rainy", "sleet", "snowy", "stormy", "sunny")),
    "country": Code("one", buckets=256),
    "city": Code("one", buckets=1024),
}
USES: dict[str, type[pl.DataType]] = {"user": pl.Int32, "item": pl.Int32, "cnt": pl.Float32, **CONTEXTS}
APPS = (
    *("item", "package", "category", "downloads", "developer", "icon", "language", "description", "name"),
    *("price", "rating", "short desc"),
)
APP_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("category", "downloads", "developer", "language"), "categorical"),
    **dict.fromkeys(("price", "stars"), "numeric"),
    **dict.fromkeys(("name", "short_description"), "text"),
}


def read_frappe(folder: Path) -> Population:
    """Frappe from a folder that holds `Mobile_Frappe.zip`, which is read without unpacking it."""
    archive = folder / "Mobile_Frappe.zip"
    uses = read_rows(
        member_bytes(archive, "Mobile_Frappe/frappe/frappe.csv"),
        f"{archive} (frappe.csv)",
        USES,
        separator="\t",
        header=tuple(USES),
    )
    circumstances = uses.select(list(CONTEXTS)).with_columns(_known(name) for name in CONTEXTS if name != "city")
    people = build(
        "frappe",
        uses["user"],
        uses["item"],
        ratings=uses["cnt"],
        contexts=Features(circumstances, dict.fromkeys(CONTEXTS, "categorical"), DECLARED),
    )
    apps = rows_for(people.item_ids, _apps(archive))
    assert apps is not None
    assert people.item_ids is not None
    return replace(
        people,
        item_names=apps["name"].fill_null(people.item_ids.cast(pl.String)),
        item_features=Features(apps, APP_KINDS),
    )


def _apps(archive: Path) -> pl.DataFrame:
    table = read_rows(
        member_bytes(archive, "Mobile_Frappe/frappe/meta.csv"),
        f"{archive} (meta.csv)",
        {"item": pl.Int32, **dict.fromkeys(APPS[1:], pl.String)},
        separator="\t",
        header=APPS,
        needed=["item"],
        quote='"',
    )
    dollars = pl.when(pl.col("price") == "Free").then(0.0).otherwise(_number(pl.col("price").str.strip_prefix("$")))
    return table.select(
        pl.col("item").alias("id"),
        *(_known(name) for name in ("category", "downloads", "developer", "language")),
        price=dollars.cast(pl.Float32),
        stars=_number(pl.col("rating")),
        name=_known("name"),
        short_description=_known("short desc"),
    )


def _known(column: str) -> pl.Expr:
    return pl.when(pl.col(column) != "unknown").then(pl.col(column)).alias(column)


def _number(text: pl.Expr) -> pl.Expr:
    """Null where the text is no number: unknown, or a price in another currency."""
    return text.cast(pl.Float32, strict=False)
