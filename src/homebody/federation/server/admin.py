"""What an operator does to a server's folder, beside the server."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from homebody.core import Method
from homebody.data.codes import Code
from homebody.data.columns import FileColumn, known_kinds, listed, usual
from homebody.data.encode import Encoded, encode
from homebody.data.population import Features
from homebody.data.roles import USUAL_NAMES
from homebody.data.views import NAME
from homebody.data.vocabularies import parse
from homebody.database import Conflict, Database, connect
from homebody.errors import HomebodyError, refuse_unknown, several
from homebody.federation.schema import FeatureSchema
from homebody.federation.secure_sum.roster import Roster
from homebody.federation.server.letters import resting
from homebody.federation.server.plan import FILE, ServerPlan, opened
from homebody.federation.server.records import COMPONENT, LONGEST, Presence, Records, why_ended
from homebody.federation.server.rosters import stored_roster
from homebody.federation.service.certificates import make_authority
from homebody.federation.service.keys import make_report_key
from homebody.federation.service.text import is_loopback, making, one_line
from homebody.federation.views import views_of
from homebody.files import is_held, sync_folder, write_new
from homebody.privacy import Budget, Ledger
from homebody.privacy.assumptions import ROSTER, assumptions
from homebody.report.record import Result, jsonable
from homebody.rng import Rng

__all__ = ["backup", "make", "opened", "outcome", "read_items", "report", "restore", "restored", "running"]

MOST_OF_A_VIEW = 10_000
STATUS = ("name", "fingerprint", "first", "people", "added", "removed", "faults", "set_aside")
"""What `homebody server status` says of a device."""
TABLES = {
    "charge": "id, release, part, observer, unit, event, round, relation, sampling, code, digest, previous, hash",
    "device": "fingerprint, public_key, name, first, people, added, removed",
    "fault": "fingerprint, count, set_aside",
    "proxy": "public_key, name, added",
    "item": "number, id, name",
    "open_round": "release, users, sampling, size, population",
    "checkpoint": "number, about, size, sha256, saved",
    "checkpoint_part": "checkpoint, part, content",
    "round": "step, line",
    "counter": "name, value",
    "note": "name, value",
    "sheet": "number, content",
}
"""The tables of a backup with their columns; rows are copied in the order of the first column."""


def make(
    folder: Path,
    plan: ServerPlan,
    items: str | None,
    hosts: Sequence[str],
    people: Sequence[str] = (),
    views: Sequence[str] = (),
    helper_ca: bytes | None = None,
    kinds: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A server's folder: whole, or not at all.

    people: which features people may have, as `person_code` reads them. views: NAME=SIZE of each view that the server
    has no data of, as `view_codes` reads them. helper_ca: the certificate of the authority that signed the helper's,
    where the system does not know it. kinds: those of columns of the file of items, where they are not as they look.
    """
    method = plan.method()
    if helper_ca is not None and not plan.helper:
        raise HomebodyError("A certificate for a helper needs the helper's address: give --helper, or leave it out.")
    for address in filter(None, (plan.listen, plan.address, plan.reports)):
        host = address.rpartition(":")[0].strip("[]")
        if not plan.tls and not is_loopback(host):
            raise HomebodyError(f"Other machines can reach {host}: leave out --no-tls.")
    catalogue, of_items, of_people = ([], None, None) if items is None else read_catalogue(items, kinds)
    schema = _schema(method, plan, of_items, of_people, people, views)
    if folder.exists() and not folder.is_dir():
        raise HomebodyError(f"{folder} is a file: a server gets a folder of its own.")
    if folder.exists() and any(entry.name != "keys" for entry in folder.iterdir()):
        raise HomebodyError(f"{folder} is not empty: a server gets a folder of its own.")
    with making(folder, "server"):
        if not (folder / "keys").exists():
            make_authority(folder / "keys", [plan.host, *hosts] if plan.host not in ("0.0.0.0", "::") else hosts)
        if plan.helper:
            make_report_key(folder / "keys")
            if helper_ca is not None:
                write_new(folder / "keys", {"helper-ca.pem": helper_ca})
        text = plan.to_toml()
        with os.fdopen(os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        try:
            with opened(folder) as (_, records):
                if records.n_items() or records.devices():
                    raise HomebodyError(
                        f"{records.database.name} belongs to a server already: give --database another."
                    )
                if (folder / plan.database).is_file():
                    (folder / plan.database).chmod(0o600)
                records.add_items(catalogue)
                summary: dict[str, Any] = {"folder": str(folder), "run": plan.run, "items": records.n_items()}
                if schema.digest:
                    records.put_features(schema.content)
        except BaseException:
            (folder / FILE).unlink(missing_ok=True)
            raise
    summary["listen"] = plan.listen
    if schema.digest:
        summary["features"] = {"people": list(schema.people), "items": list(schema.items)}
    if plan.reports:
        host, _, port = plan.reports.rpartition(":")
        host = next(iter(hosts), host) if host in ("0.0.0.0", "[::]") else host
        summary |= {"next": f"{'https' if plan.tls else 'http'}://{host}:{port}"}
        summary |= {"shuffled_among": plan.shuffled_among} if method.uplink.facts.shuffled else {}
    if plan.helper:
        summary["helper_key"] = str(folder / "keys" / "reports.pub")
    return summary


def _schema(
    method: Method,
    plan: ServerPlan,
    items: Features | None,
    people: Features | None,
    given: Sequence[str],
    views: Sequence[str],
) -> FeatureSchema:
    """The features that go to devices; none for a method that takes no features."""
    if not {"user features", "item features"} & {*method.needs, *method.uses}:
        if given or views:
            option = "--person-feature" if given else "--view"
            raise HomebodyError(f"{plan.recipe.method} does not look at features: leave out {option}.")
        return FeatureSchema()
    if views and views_of(method) is None:
        raise HomebodyError(f"{plan.recipe.method} has no views: leave out --view, or take fl-mv-dssm.")
    schema = declare(items, people, given, views, texts="texts" in method.uses)
    method.init_shared(schema.catalogue(2), Rng.of(0))  # refuses a feature that there is not
    return schema


def declare(
    items: Features | None,
    people: Features | None,
    given: Sequence[str],
    views: Sequence[str] = (),
    *,
    texts: bool = False,
) -> FeatureSchema:
    """The feature schema of a server. Circumstances are left out, which devices do not note.

    people: those of a dataset by name, whose values are known to everyone. given: NAME=VALUE,VALUE in their place.
    views: NAME=SIZE of each view that nobody here has data of. texts: whether the method reads them.
    """
    of_items, of_people = (_encoded(table, unit, texts) for table, unit in ((items, "items"), (people, "users")))
    named = dict(person_code(text) for text in given)
    if len(named) < len(given):
        raise HomebodyError("--person-feature gives a feature twice; leave one out.")
    taken = {code.view for code in of_people.codes.values()}
    for text in views:
        name, codes = view_codes(text)
        if name in taken:
            raise HomebodyError(f"There is a view '{name}' already: give this one another name.")
        taken.add(name)
        named |= codes
    return FeatureSchema(
        {**of_people.codes, **named}, of_items.codes, {name: column.values for name, column in of_items.columns.items()}
    )


def view_codes(text: str) -> tuple[str, dict[str, Code]]:
    """What `--view` says: the name of a view and its numbers, which devices take as they are.

    >>> name, codes = view_codes("taste=2")
    >>> name, list(codes), codes["taste.1"].view
    ('taste', ['taste.1', 'taste.2'], 'taste')
    """
    name, _, size = (part.strip() for part in text.partition("="))
    if not re.fullmatch(NAME, name) or not size.isdecimal() or not 1 <= int(size) <= MOST_OF_A_VIEW:
        raise HomebodyError(
            f"--view takes NAME=SIZE, such as taste=30: a letter, then letters, digits, _ or -, and 1 to "
            f"{MOST_OF_A_VIEW:,} numbers; not '{text}'."
        )
    return name, {f"{name}.{number}": Code("number", view=name) for number in range(1, int(size) + 1)}


def person_code(text: str) -> tuple[str, Code]:
    """What `--person-feature` says: categories, several of them at once, hashed ones, or a number with its scale.

    >>> person_code("gender=F,M")[1].values, person_code("town=hash:64")[1].size
    (('F', 'M'), 65)
    >>> person_code("height=number:170:10")[1].of("height", "180")[0].tolist()
    1.0
    >>> person_code("hobbies=many:chess,golf")[1].kind
    'many'
    """
    name, equals, said = (part.strip() for part in text.partition("="))
    try:
        code = parse(name, said) if equals and name else None
    except HomebodyError:
        if said.rpartition("file:")[1]:
            raise
        code = None
    if isinstance(code, Code) and not code.text:
        return name, code
    raise HomebodyError(
        f"--person-feature takes NAME=VALUE,VALUE, NAME=many:VALUE,VALUE, NAME=hash:SIZE, NAME=number:MEAN:SPREAD or "
        f"NAME=range:LOW:HIGH, not '{text}'."
    )


def features_of_items(
    path: Path,
    table: pl.DataFrame,
    others: Sequence[str],
    texts: Sequence[str] = (),
    given: Mapping[str, str] | None = None,
) -> Features | None:
    """The other columns of a file of items; texts: those that are texts, such as names, whatever they look like, unless
    their kind is given."""
    columns = [FileColumn(table[name], "item", path) for name in (*others, *texts)]
    known = known_kinds(given or {})
    refuse_unknown(f"column of {path}", known, [*others, *texts])
    kinds = {
        column.values.name: "text" if column.values.name in texts else column.guess_of_items() for column in columns
    } | known
    values = {column.values.name: column.as_kind(kinds[column.values.name]) for column in columns}
    return Features(pl.DataFrame(values), kinds) if values else None


def _encoded(features: Features | None, unit: str, texts: bool) -> Encoded:
    if features is None:
        return Encoded({}, ())
    kept = [name for name, kind in features.kinds.items() if texts or kind not in ("text", "sequence")]
    chosen = features.only(kept)
    return encode(chosen, np.ones(len(chosen), dtype=np.bool_), unit=unit)


def read_items(source: str) -> list[tuple[str, str]]:
    """Ids and names: of a file with a column of ids and perhaps one of names, or of a dataset's catalogue. An id must
    be one that devices take: one line, without spaces around it."""
    return read_catalogue(source)[0]


def read_catalogue(
    source: str, kinds: Mapping[str, str] | None = None
) -> tuple[list[tuple[str, str]], Features | None, Features | None]:
    """The same, with the items' features, a row for each id that is new; and of a dataset by name its people's."""
    path = Path(source)
    people = None
    if path.is_file():
        rows, features = _items_of(path, kinds)
    elif kinds:
        raise HomebodyError(f"{source} is no file: --kind is for the columns of a file of items.")
    else:
        from homebody.data import load

        population = load(source)
        rows = [(population.item_id(item), population.item_name(item)) for item in range(population.n_items)]
        features, people = population.item_features, population.user_features
    items = [(one_line(item, "An item's id", LONGEST), name.strip() or item.strip()) for item, name in rows]
    first = {item: number for number, (item, _) in reversed(list(enumerate(items)))}
    places = np.array(sorted(first.values()), dtype=np.int64)
    return items, None if features is None else features.rows(places), people


def _items_of(path: Path, kinds: Mapping[str, str] | None = None) -> tuple[list[tuple[str, str]], Features | None]:
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
        many = several(missing, f"item of {path} has", f"items of {path} have")
        raise HomebodyError(f"{many} no {ids[0]}: give every item an id.")
    texts = chosen["name"].cast(pl.String).fill_null("")
    others = [name for name in table.columns if name not in (ids[0], *names)]
    pairs = zip(identity.cast(pl.String).to_list(), texts.to_list() if names else [""] * len(texts), strict=True)
    return list(pairs), features_of_items(path, table, others, names[:1], kinds)


def running(folder: Path) -> bool:
    """Whether a server holds the folder."""
    return is_held(folder / ".lock")


def _spent(budget: Budget, ledger: Ledger) -> dict[str, Any]:
    spent = budget.spent(ledger)
    left = max(0.0, budget.epsilon - spent)
    return {"observer": budget.observer, "epsilon": budget.epsilon, "spent": spent, "left": left, "who": budget.who}


def _of_round(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in ("step", "clients", "seconds", "metrics", "epsilon")}


def _seen(presence: Presence | None) -> dict[str, Any]:
    """Whether a device is connected, and since when it is not; `seen` is None for one that never was."""
    return (
        {"connected": False, "seen": None, "active": 0, "refuses": None}
        if presence is None
        else {
            "connected": presence.connected,
            "seen": presence.seen,
            "active": presence.people,
            "refuses": presence.refuses or None,
        }
    )


def report(plan: ServerPlan, records: Records, last: int = 10) -> dict[str, Any]:
    """What `homebody server status` says. last: how many rounds of the history."""
    ledger, lines, method, roster = records.ledger(), records.rounds(), plan.method(), stored_roster(records)
    budget, presence, notes = plan.recipe.allowed(), records.presence(), records.notes()
    report: dict[str, Any] = jsonable(
        {
            "method": plan.recipe.method,
            "run": plan.run,
            "doing": notes.get("doing", "not started yet"),
            "waiting": json.loads(notes.get("waiting") or "null"),
            "ended": why_ended(notes),
            "trouble": notes.get("trouble") or None,
            "rounds": len(lines),
            "planned": plan.planned(method),
            "items": records.n_items(),
            "measured": _measured(lines),
            "selects": plan.recipe.selects(),
            "epsilon": ledger.epsilons(plan.recipe.stated_at),
            "delta": plan.recipe.stated_at,
            "budget": None if budget is None else _spent(budget, ledger),
            "history": [_of_round(line) for line in lines[-last:]] if last else [],
            "devices": [
                {**{name: getattr(device, name) for name in STATUS}, **_seen(presence.get(device.fingerprint))}
                for device in records.devices()
            ],
            "proxies": [{"name": proxy.name, "added": proxy.added} for proxy in records.proxies()],
            "assumes": _assumed(method, roster),
            "roster": None if roster is None else {"number": roster.number, "devices": len(roster.devices)},
            "resting": resting(notes),
            "counters": records.counters(),
        }
    )
    return report


def outcome(records: Records, folder: Path) -> Result | None:
    """What the training of a server obtained; None while it goes on."""
    result: Result | None = json.loads(records.notes().get("result", "null"))
    return None if result is None else {**result, "run": str(folder)}


def _assumed(method: Method, roster: Roster | None) -> list[str]:
    """What a secure sum shows to whom, and what that rests on; nothing without one."""
    lines = list(assumptions(method.uplink))
    if ROSTER not in lines:
        return lines
    if roster is None:
        return [
            *lines,
            "No roster: devices with a key for one take no part, and others count on their own noise alone.",
        ]
    return [*lines, f"Roster {roster.number} names {several(len(roster.devices), 'device')}."]


def _measured(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What devices measured last: each metric within its range, with the standard error of the noise in it."""
    asked = [line for line in lines if line["metrics"]]
    if not asked:
        return None
    last = asked[-1]
    names = ("metrics", "errors", "unclipped")
    return {"round": last["step"], **{name: last.get(name, {}) for name in names}}


def restored(folder: Path, file: Path) -> int:
    """Bring a backup into a plan's empty database; answer after which round it stands."""
    plan = ServerPlan.read(folder)
    with closing(connect(plan.database_in(folder), what="server's database")) as database:
        return len(restore(file, database).rounds())


def backup(records: Records, to: Path) -> None:
    """Write the state of one moment into a new file; writers are not blocked."""
    if to.exists():
        raise HomebodyError(f"{to} already exists: choose another file for the backup.")
    records.ledger().close()  # its tables are there, and its chain is whole
    try:
        with tempfile.TemporaryDirectory(prefix=".backup-", dir=to.parent) as folder:
            scratch = Path(folder) / to.name
            with closing(connect(scratch, what="backup", name=str(to))) as copy:
                Records(copy).ledger().close()
                with records.database.snapshot(), copy.transaction():
                    _copy(records.database, copy)
                Records(copy).ledger().close()
            scratch.chmod(0o600)
            scratch.replace(to)
            sync_folder(to.parent)
    except OSError as error:
        raise HomebodyError(f"No backup can be written to {to}: {error.strerror or error}.") from error


def restore(source: Path, database: Database) -> Records:
    """Fill an empty database from a backup, all or nothing; the backup stays as it is."""
    if not source.is_file():
        raise HomebodyError(f"There is no backup {source}.")
    with tempfile.TemporaryDirectory(prefix="homebody-") as folder:
        scratch = Path(folder) / source.name
        try:
            shutil.copyfile(source, scratch)
        except OSError as error:
            raise HomebodyError(f"The backup {source} cannot be read: {error.strerror or error}.") from error
        with closing(connect(scratch, what="backup", name=str(source))) as copy, database.transaction():
            if not copy.version(COMPONENT):
                raise HomebodyError(f"{source} is not a backup of a Homebody server.")
            Records(copy).ledger().close()  # an old one is brought forward, and its chain is whole
            Records(database).ledger().close()
            for table in TABLES:
                if database.one(f"SELECT 1 FROM {table} LIMIT 1"):
                    raise HomebodyError(
                        f"The database {database.name} is not empty: a backup is restored into a new one."
                    )
            try:
                _copy(copy, database)
            except Conflict as error:
                raise HomebodyError(f"The backup {source} is damaged: {error}.") from error
            records = Records(database)
            records.ledger().close()
            return records


def _copy(source: Database, target: Database) -> None:
    for table, columns in TABLES.items():
        names = columns.split(", ")
        insert = f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(names))})"
        query = f"SELECT {columns} FROM {table} ORDER BY {names[0]}"
        rows = _parts(source) if table == "checkpoint_part" else source.rows(query)
        while some := list(islice(rows, 1 if table == "checkpoint_part" else 1000)):
            target.executemany(insert, some)


def _parts(source: Database) -> Iterator[Any]:
    """The parts of checkpoints, one at a time: all of them may be more than the memory holds."""
    keys = source.execute("SELECT checkpoint, part FROM checkpoint_part ORDER BY checkpoint, part").fetchall()
    for key in keys:
        query = "SELECT checkpoint, part, content FROM checkpoint_part WHERE checkpoint = ? AND part = ?"
        yield source.one(query, *key)
