"""Where a service listens, and the certificate that it shows there."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from homebody import settings
from homebody.errors import HomebodyError
from homebody.federation.service.text import is_loopback, read_file, split_address
from homebody.files import read_settings

__all__ = ["ListeningSettings", "certificate_files", "check_listen", "host_of", "refuse_occupied"]

SCHEMA_VERSION = 1
"""Of the files of settings."""


class ListeningSettings:
    """What settings of a server, a proxy and a service have in common: an address, and one TOML file in a folder."""

    listen: str
    party: ClassVar[tuple[str, str]]
    """What it is called, and the command that makes one: service, serve."""
    file: ClassVar[str]
    """The name of the file."""
    titled: ClassVar[str]
    """What errors call the file."""
    tables: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    """How the values of some settings are read."""

    @property
    def host(self) -> str:
        return host_of(self.listen)

    @classmethod
    def elsewhere(cls, folder: Path, name: str) -> str:
        """What to do where an address is taken: the setting, its file, and the option that set it.

        >>> from homebody.federation.proxy.settings import ProxySettings
        >>> ProxySettings.elsewhere(Path("proxy"), "listen")
        'give another address as listen in proxy/proxy.toml, where --listen of `homebody proxy init` put it'
        """
        option = f"--{name.replace('_', '-')} of `homebody {cls.party[1]} init`"
        return f"give another address as {name} in {folder / cls.file}, where {option} put it"

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])

    def to_toml(self) -> str:
        return settings.to_toml(self, SCHEMA_VERSION)

    @classmethod
    def from_toml(cls, text: str) -> Self:
        values, _ = settings.load(text, cls.titled, SCHEMA_VERSION)
        return settings.read(cls, values, cls.titled, f"setting of a {cls.party[0]}", **cls.tables)

    @classmethod
    def read(cls, folder: Path) -> Self:
        name, command = cls.party
        missing = f"There is no {name} in {folder}: make one with `homebody {command} init {folder}`."
        return cls.from_toml(read_settings(folder / cls.file, cls.titled, missing))


def host_of(listen: str) -> str:
    """
    >>> host_of("[::1]:9445")
    '::1'
    """
    return listen.rpartition(":")[0].strip("[]")


def check_listen(listen: str, tls: bool, port: int) -> None:
    """Refuse what is no address to listen on, and an address that other machines can reach without TLS. port: the one
    that the sentence suggests.

    >>> check_listen("0.0.0.0:9445", tls=False, port=9445)
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: Other machines can reach 0.0.0.0: leave out --no-tls.
    """
    if split_address(listen) is None:
        raise HomebodyError(f"An address to listen on is HOST:PORT, such as 127.0.0.1:{port}, not '{listen}'.")
    if not tls and not is_loopback(host_of(listen)):
        raise HomebodyError(f"Other machines can reach {host_of(listen)}: leave out --no-tls.")


def certificate_files(
    listen: str, tls: bool, hosts: Sequence[str], cert: Path | None, key: Path | None
) -> dict[str, bytes]:
    """The files of a service's certificate by name: the operator's own, or a new one for this address and `hosts`;
    none without TLS."""
    if (cert is None) != (key is None):
        raise HomebodyError("--cert and --key go together: give both, or neither.")
    if not tls:
        if cert is not None:
            raise HomebodyError("A certificate is of no use without TLS: leave out --no-tls, or --cert and --key.")
        return {}
    if cert is not None and key is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
        except (OSError, ssl.SSLError) as error:
            raise HomebodyError(f"{cert} and {key} are not a certificate and its key: {error}.") from error
        return {"server.pem": read_file(cert), "server.key": read_file(key)}
    from homebody.federation.service.certificates import make_certificates

    host = host_of(listen)
    return make_certificates([host, *hosts] if host not in ("0.0.0.0", "::") else hosts)


def refuse_occupied(folder: Path, what: str) -> None:
    """Refuse to make a service in a folder that has something in it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HomebodyError(f"{folder} is there already and not empty: a {what} gets a folder of its own.")
