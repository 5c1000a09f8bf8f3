"""What a proxy was told to do: one TOML file in its folder."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from urllib.parse import urlsplit

import tomli_w

from homebody.errors import HomebodyError, unknown_name
from homebody.federation.service.text import ADDRESS, is_loopback

__all__ = ["FILE", "ProxySettings"]

FILE = "proxy.toml"
SCHEMA_VERSION = 1
_KINDS = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}


@dataclass(frozen=True)
class ProxySettings:
    """A proxy's settings.

    >>> settings = ProxySettings(next="https://server.example.org:9443", next_ca=True)
    >>> ProxySettings.from_toml(settings.to_toml()) == settings
    True
    >>> settings.host, settings.port
    ('127.0.0.1', 9445)
    """

    next: str
    """Whom to pass batches to: the server's intake, or another proxy."""
    listen: str = "127.0.0.1:9445"
    """Where devices, and proxies before this one, come to."""
    hold: float = 60.0
    """Seconds from the first report that is held to the release of all of them."""
    least_devices: int = 10
    """Devices that must have reported since the last release before there is another."""
    most: int = 1000
    """Reports that a person may send in an epoch, if the server says no fewer."""
    lead: float = 5.0
    """Seconds before the next hop closes an epoch that this one does, so that what is left still arrives."""
    batch: int = 2048
    """Reports in a batch, at most."""
    most_held: int = 5_000_000
    """Reports on the disk, at most; more are refused until some are passed on."""
    queue: int = 32 << 20
    """Bytes of requests in memory, at most; more are refused."""
    tls: bool = True
    next_ca: bool = False
    """Whether the next hop's certificate is checked against next-ca.pem, and not against the system's authorities."""

    def __post_init__(self) -> None:
        for spec in fields(self):
            value, kind = (
                getattr(self, spec.name),
                {"str": str, "bool": bool, "int": int, "float": float}[str(spec.type)],
            )
            if type(value) is not kind and not (kind is float and type(value) is int):
                raise HomebodyError(f"The proxy's {spec.name} must be {_KINDS[kind]}, not {value!r}.")
        for name, low, high in (
            ("hold", 0, 7 * 86_400),
            ("least_devices", 1, 1_000_000),
            ("most", 1, 1_000_000),
            ("lead", 0, 3_600),
            ("batch", 1, 16_384),
            ("most_held", 1, 10**9),
            ("queue", 2 << 20, 1 << 34),
        ):
            if not low <= getattr(self, name) <= high:
                raise HomebodyError(
                    f"The proxy's {name} is a number from {low:,} to {high:,}, not {getattr(self, name):,}."
                )
        found = ADDRESS.fullmatch(self.listen)
        if not found or not 0 < int(found["port"]) < 65536:
            raise HomebodyError(f"An address to listen on is HOST:PORT, such as 127.0.0.1:9445, not '{self.listen}'.")
        if not self.tls and not is_loopback(self.host):
            raise HomebodyError(f"{self.host} is not on this machine alone: leave out --no-tls.")
        self._check_next()

    def _check_next(self) -> None:
        try:
            parts = urlsplit(self.next)
            named = parts.hostname and (parts.port is None or parts.port > 0)
        except ValueError:
            named = False
            parts = urlsplit("")
        if (
            parts.scheme not in ("http", "https")
            or not named
            or parts.path.rstrip("/")
            or parts.query
            or parts.fragment
        ):
            raise HomebodyError(
                f"The next hop is an address such as https://server.example.org:9443, not '{self.next}'."
            )
        if parts.username is not None:
            raise HomebodyError("The next hop's address holds no name or password: a proxy signs what it passes on.")
        if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            raise HomebodyError(f"{parts.hostname} is not on this machine: pass reports on with https://, not http://.")
        if self.next_ca and parts.scheme != "https":
            raise HomebodyError(f"An authority for the next hop goes with https://, not with '{self.next}'.")

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])

    def to_toml(self) -> str:
        return tomli_w.dumps({"schema": SCHEMA_VERSION, **asdict(self)})

    @classmethod
    def from_toml(cls, text: str) -> ProxySettings:
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise HomebodyError(f"The proxy's settings are not valid TOML: {error}.") from error
        schema = values.pop("schema", SCHEMA_VERSION)
        if type(schema) is not int or schema < 1:
            raise HomebodyError(f"The schema of a proxy's settings must be a whole number from 1, not {schema!r}.")
        if schema > SCHEMA_VERSION:
            raise HomebodyError("The proxy's settings were written by a newer Homebody; update to run it.")
        names = {spec.name for spec in fields(cls)}
        for name in values:
            if name not in names:
                raise unknown_name("setting of a proxy", name, names)
        if "next" not in values:
            raise HomebodyError('The proxy\'s settings name no next hop: give it as next = "https://…".')
        return cls(**values)

    @classmethod
    def read(cls, folder: Path) -> ProxySettings:
        """The settings of a proxy's folder."""
        try:
            return cls.from_toml((folder / FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise HomebodyError(
                f"There is no proxy in {folder}: make one with `homebody proxy init {folder}`."
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise HomebodyError(f"The proxy's settings {folder / FILE} cannot be read: {error}.") from error
