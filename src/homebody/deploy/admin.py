"""What an operator does to a server's folder, beside the server."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from homebody.database import connect
from homebody.deploy.home_store import one_line
from homebody.deploy.keys import make_authority
from homebody.deploy.plan import FILE, Plan
from homebody.deploy.proxies import Proxies
from homebody.deploy.records import LONGEST, Records
from homebody.errors import HomebodyError
from homebody.report.record import jsonable
from homebody.runtime.correspondence import resting
from homebody.runtime.door import is_loopback

__all__ = ["make", "opened", "read_items", "report", "restored", "running"]


def make(folder: Path, plan: Plan, items: str | None, hosts: Sequence[str]) -> dict[str, Any]:
    """A server's folder: whole, or not at all."""
    plan.method()
    for host in {
        address.rpartition(":")[0].strip("[]") for address in (plan.listen, plan.address, plan.reports) if address
    }:
        if not plan.tls and not is_loopback(host):
            raise HomebodyError(f"{host} is not on this machine alone: leave out --no-tls.")
    found = [] if items is None else read_items(items)
    fresh = not folder.exists()
    if not fresh and not folder.is_dir():
        raise HomebodyError(f"{folder} is a file: a server gets a folder of its own.")
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
                if records.n_items() or records.devices():
                    raise HomebodyError(
                        f"{records.database.name} belongs to a server already: give --database another."
                    )
                if (folder / plan.database).is_file():
                    (folder / plan.database).chmod(0o600)
                records.add_items(found)
                made = {"folder": str(folder), "run": plan.run, "items": records.n_items(), "listen": plan.listen}
                if plan.reports:
                    host, _, port = plan.reports.rpartition(":")
                    host = next(iter(hosts), host) if host in ("0.0.0.0", "[::]") else host
                    url = f"{'https' if plan.tls else 'http'}://{host}:{port}"
                    made |= {"next": url, "shuffled_among": plan.shuffled_among}
                return made
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
    """Ids and names: of a file with a column of ids and perhaps one of names, or of a dataset's catalogue.

    An id must be one that devices take: one line, without spaces around it.
    """
    path = Path(source)
    if path.is_file():
        found = _items_of(path)
    else:
        from homebody.data import load

        population = load(source)
        found = [(population.item_id(item), population.item_name(item)) for item in range(population.n_items)]
    return [(one_line(item, "An item's id", LONGEST), name.strip() or item.strip()) for item, name in found]


def _items_of(path: Path) -> list[tuple[str, str]]:
    import polars as pl

    from homebody.data.table import USUAL_NAMES, listed, usual

    try:
        parquet = path.suffix.lower() in (".parquet", ".pq")
        table = pl.read_parquet(path) if parquet else pl.read_csv(path, infer_schema=False)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise HomebodyError(f"The items of {path} cannot be read: {str(error).splitlines()[0]}.") from error
    ids = usual(table.columns, ("id", *USUAL_NAMES["item"]))
    if len(ids) != 1:
        raise HomebodyError(
            f"Which column of {path} has the items' ids? Call it 'id', and that of their names 'name'; its columns are "
            f"{listed(table.columns)}."
        )
    names = usual(table.columns, ("name", "title"))
    chosen = table.select(pl.col(ids[0]).alias("id"), pl.col(names[0] if names else ids[0]).alias("name"))
    for column in chosen.columns:
        if chosen[column].dtype.is_nested() or chosen[column].dtype == pl.Binary:
            raise HomebodyError(f"The items' {column}s in {path} must be texts or numbers.")
    identity = chosen["id"]
    if identity.dtype.is_float() and (whole := identity.cast(pl.Int64, strict=False)).eq(identity).all():
        identity = whole  # as devices read them: 7, not 7.0
    if missing := identity.null_count():
        raise HomebodyError(f"{missing} items of {path} have no {ids[0]}: give every item an id.")
    texts = chosen["name"].cast(pl.String).fill_null("")
    return list(zip(identity.cast(pl.String).to_list(), texts.to_list() if names else [""] * len(texts), strict=True))


def running(folder: Path) -> bool:
    """Whether a server holds the folder."""
    try:
        with (folder / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


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
            "proxies": [{"name": one.name, "added": one.added} for one in Proxies(records).all()],
            "resting": resting(records.notes()),
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
