"""What an operator does to a server's folder, beside the server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from homebody.database import connect
from homebody.deploy.keys import make_authority
from homebody.deploy.plan import FILE, Plan
from homebody.deploy.records import Records
from homebody.errors import HomebodyError
from homebody.report.record import jsonable
from homebody.runtime.door import is_loopback

__all__ = ["make", "opened", "read_items", "report", "restored"]


def make(folder: Path, plan: Plan, items: str | None, hosts: Sequence[str]) -> dict[str, Any]:
    """A server's folder: whole, or not at all."""
    plan.method()
    if not plan.tls and not is_loopback(plan.host):
        raise HomebodyError(f"{plan.host} can be reached from elsewhere: leave out --no-tls.")
    found = [] if items is None else read_items(items)
    fresh = not folder.exists()
    if not fresh and any(entry.name != "keys" for entry in folder.iterdir()):
        raise HomebodyError(f"{folder} is not empty: a server gets a folder of its own.")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)  # who takes part is nobody else's business
        keys = not (folder / "keys").exists()
        if keys:
            make_authority(folder / "keys", [plan.host, *hosts] if plan.host not in ("0.0.0.0", "::") else hosts)
        try:
            text = plan.to_toml()
            with os.fdopen(os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
            with opened(folder) as (_, records):
                records.add_items(found)
                return {"folder": str(folder), "run": plan.run, "items": records.n_items(), "listen": plan.listen}
        except BaseException:
            (folder / FILE).unlink(missing_ok=True)
            raise
    except BaseException as error:
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise HomebodyError(f"No server can be made in {folder}: {error.strerror}.") from error
        raise


@contextmanager
def opened(folder: Path) -> Iterator[tuple[Plan, Records]]:
    """A server's plan and records, beside the running server."""
    plan = Plan.read(folder)
    records = Records(connect(plan.database_in(folder), what="server's database"))
    try:
        yield plan, records
    finally:
        records.database.close()


def read_items(source: str) -> list[tuple[str, str]]:
    """Ids and names: of a file with a column of ids and perhaps one of names, or of a dataset's catalogue."""
    path = Path(source)
    if not path.is_file():
        from homebody.data import load

        population = load(source)
        return [(population.item_id(item), population.item_name(item)) for item in range(population.n_items)]
    import polars as pl

    try:
        table = pl.read_parquet(path) if path.suffix == ".parquet" else pl.read_csv(path, infer_schema=False)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise HomebodyError(f"The items of {path} cannot be read: {str(error).splitlines()[0]}.") from error
    names = {name.lower().strip(): name for name in table.columns}
    first = next((names[name] for name in ("id", "item", "item_id", "itemid") if name in names), table.columns[0])
    second = next((names[name] for name in ("name", "title") if name in names), None)
    columns = table.select(pl.col(first).cast(pl.String), pl.col(second or first).cast(pl.String).alias("#name"))
    missing = columns[first].null_count()
    if missing:
        raise HomebodyError(f"{missing} items of {path} have no {first}: give every item an id.")
    return [(item, name or item) for item, name in columns.iter_rows()]


def report(plan: Plan, records: Records) -> dict[str, Any]:
    """What `homebody server status` says."""
    ledger, lines, method = records.ledger(), records.rounds(), plan.method()
    rounds = plan.recipe.rounds or method.default_rounds
    report: dict[str, Any] = jsonable(
        {
            "method": plan.recipe.method,
            "run": plan.run,
            "doing": records.notes().get("doing", "not started yet"),
            "rounds": len(lines),
            "planned": sum(phase.rounds or rounds for phase in method.phases),
            "items": records.n_items(),
            "epsilon": ledger.epsilons(plan.recipe.stated_at),
            "delta": plan.recipe.stated_at,
            "devices": [
                {
                    "name": one.name,
                    "fingerprint": one.fingerprint,
                    "first": one.first,
                    "people": one.people,
                    "added": one.added,
                    "removed": one.removed,
                }
                for one in records.devices()
            ],
            "counters": records.counters(),
        }
    )
    return report


def restored(folder: Path, file: Path) -> int:
    """Bring a backup into a plan's empty database; answer after which round it stands."""
    plan = Plan.read(folder)
    database = connect(plan.database_in(folder), what="server's database")
    try:
        return len(Records.restore(file, database).rounds())
    finally:
        database.close()
