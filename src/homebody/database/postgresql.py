"""PostgreSQL by its URL. Its password is never shown, whatever goes wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from homebody.database.base import PATIENCE, Conflict, Cursor, Database
from homebody.errors import HomebodyError, Unavailable, install

if TYPE_CHECKING:
    import psycopg

__all__ = ["PostgreSQL"]

_WRITERS = 0x686F6D65
"""The lock that makes writers take turns, as SQLite does by itself."""
_IDLE = 300.0
"""Seconds that a client may keep a transaction open and say nothing: one that froze or lost its network in the middle
of it would hold every other writer up until somebody restarts the server."""
_PASSING = re.compile(r"08|40|53|57|58|25006|25P0[34]|55P03")
"""How error codes begin that say nothing against what was asked: connection lost, serialisation, resources, stopped or
cancelled by an operator, system errors, read-only (a standby, or a disk that an operator protects), timeouts, locks."""
_NOT_NOW = re.compile(r"the database system is|too many (clients|connections)|connection slots")
"""Messages of a server that takes no connection at the moment. At this stage libpq gives no code."""


class PostgreSQL(Database):
    dialect = "postgresql"
    _begin = f"BEGIN; SELECT pg_advisory_xact_lock({_WRITERS})"
    _begin_reading = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"

    def __init__(self, url: str, what: str) -> None:
        try:
            import psycopg
        except ImportError:
            raise HomebodyError(f"PostgreSQL needs the extra: {install('deploy')}.") from None
        self._errors = psycopg
        self._settings = _settings(url)
        super().__init__(_public(self._settings), what)
        self._db = self._connected()

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Cursor:
        with self._lock:
            try:
                return self._alive().execute(_marked(sql), parameters, binary=True)
            except self._errors.Error as error:
                raise self._sentence(error) from None  # its details may name what nobody else should read

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        with self.transaction():
            try:
                self._alive().cursor().executemany(_marked(sql), rows)
            except self._errors.Error as error:
                raise self._sentence(error) from None

    def close(self) -> None:
        self._db.close()

    def _connected(self) -> psycopg.Connection[tuple[Any, ...]]:
        import psycopg

        try:
            db = psycopg.connect(**{**_DEFAULTS, **self._settings, "client_encoding": "UTF8"}, autocommit=True)
            try:
                encoding = db.info.parameter_status("server_encoding")
                if encoding != "UTF8":
                    raise HomebodyError(
                        f"The {self._what} {self.name} must hold UTF8, not {encoding}: make one that does."
                    )
                # A commit that was told is on the disk, whatever the server's own setting.
                db.execute(
                    f"SET lock_timeout = {int(PATIENCE * 1000)}; "
                    f"SET idle_in_transaction_session_timeout = {int(_IDLE * 1000)}; "
                    "SELECT set_config('synchronous_commit', 'on', false) "
                    "WHERE current_setting('synchronous_commit') = 'off'"
                )
            except BaseException:
                db.close()
                raise
        except psycopg.Error as error:
            why = " ".join(str(error).split()).removeprefix("connection failed: ").rstrip(".")
            if (secret := self._settings.get("password")) and secret in why:
                why = "it refused the connection"
            # No answer, or no connection is accepted at the moment: that passes.
            kind = Unavailable if "FATAL" not in why or _NOT_NOW.search(why) else HomebodyError
            raise kind(f"The {self._what} {self.name} cannot be opened: {why}.") from None
        return db

    def _alive(self) -> psycopg.Connection[tuple[Any, ...]]:
        """The connection; one that was lost is made anew, unless it took a transaction with it."""
        if self._db.closed and self._db.broken:
            if self._depth:
                raise self._undone()
            self._db = self._connected()
        return self._db

    def _control(self, sql: str) -> None:
        try:
            done = self._alive().execute(sql.encode())
        except self._errors.Error as error:
            raise self._sentence(error) from None
        if sql == "COMMIT" and done.statusmessage != "COMMIT":  # something had failed before, and was overlooked
            raise self._undone()

    def _open(self) -> bool:
        status = self._errors.pq.TransactionStatus
        return self._db.info.transaction_status in (status.INTRANS, status.INERROR)

    def _run(self, script: str) -> None:
        for word, there in (("INTEGER", "BIGINT"), ("BLOB", "BYTEA"), ("TEXT", 'TEXT COLLATE "C"')):
            script = re.sub(rf"\b{word}\b", there, script)
        self._control(script)

    def _has_versions(self) -> bool:
        return self.execute("SELECT to_regclass('homebody_schema')").fetchone() != (None,)

    def _sentence(self, error: Exception) -> Exception:
        if not isinstance(error, self._errors.Error):
            return error
        why = error.diag.message_primary or " ".join(str(error).split())
        if isinstance(error, self._errors.IntegrityError):
            return Conflict(why)
        if self._db.closed:
            return Unavailable(
                f"The connection to the {self._what} {self.name} was lost; see that it runs, and start again."
            )
        if isinstance(error, self._errors.errors.DiskFull):
            return self._full(why)
        if isinstance(error, self._errors.errors.LockNotAvailable):
            return self._held()
        if _PASSING.match(error.sqlstate or ""):
            return Unavailable(
                f"The {self._what} {self.name} cannot do this now ({why.rstrip('.')}): "
                "nothing of this step was written; try again later."
            )
        return HomebodyError(f"The {self._what} {self.name} refused: {why.rstrip('.')}.")


_DEFAULTS = {
    "application_name": "homebody",
    "connect_timeout": "10",
    # A network that went silent is noticed within a minute or so.
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}


def _settings(url: str) -> dict[str, Any]:
    """What a URL says. Where it cannot be read, no part of it is shown: it may be the password."""
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        settings = dict(conninfo_to_dict(url))
    except psycopg.Error:
        settings = {"port": "unreadable"}
    # A password with / or @ in it ends early, and its rest is taken for a port, a host or a name.
    strayed = any("@" in str(settings.get(key, "")) for key in ("host", "port", "dbname", "user"))
    ports = str(settings.get("port", "")).split(",")
    if strayed or "/" in str(settings.get("dbname", "")) or any(port and not port.isdigit() for port in ports):
        raise HomebodyError(
            "The PostgreSQL address cannot be read: it is postgresql://user:password@host:port/name, "
            "where / @ : ? % and spaces in a password are written as %2F %40 %3A %3F %25 and %20."
        )
    return settings


def _public(settings: dict[str, Any]) -> str:
    """A URL that may be shown."""
    user, port, name = (settings.get(key) or "" for key in ("user", "port", "dbname"))
    host = settings.get("host") or settings.get("hostaddr") or ""
    folder = host if host.startswith("/") else ""  # of a socket
    place = f"{'' if folder else host}{port and f':{port}'}/{name}{folder and f'?host={folder}'}"
    return f"postgresql://{user and f'{user}@'}{place}"


@lru_cache(maxsize=512)
def _marked(sql: str) -> bytes:
    """The same statement with psycopg's marks.

    >>> _marked("SELECT '?', 5 % 2 WHERE name = ?")
    b"SELECT '?', 5 %% 2 WHERE name = %s"
    """
    parts = re.split(r"('[^']*')", sql.replace("%", "%%"))
    return "".join(part if part.startswith("'") else part.replace("?", "%s") for part in parts).encode()
