"""What a proxy was told to do: one TOML file in its folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from homebody import settings
from homebody.errors import HomebodyError
from homebody.federation.service.listening import ListeningSettings, check_listen
from homebody.federation.service.text import is_loopback
from homebody.settings import setting

__all__ = ["FILE", "ProxySettings"]

FILE = "proxy.toml"
option = partial(setting, panel="Options")
"""A setting that is an option of `homebody proxy init`; others are only in the file."""


@dataclass(frozen=True)
class ProxySettings(ListeningSettings):
    """A proxy's settings.

    >>> settings = ProxySettings(next="https://server.example.org:9443", next_ca=True)
    >>> ProxySettings.from_toml(settings.to_toml()) == settings
    True
    >>> settings.host, settings.port
    ('127.0.0.1', 9445)
    """

    party, file, titled = ("proxy", "proxy"), FILE, "The file of the proxy's settings"

    next: str = option(
        doc="The next hop, https://…: the server's address for reports, or another proxy; '' for a helper alone."
    )
    listen: str = option("127.0.0.1:9445", "Where to listen, HOST:PORT; 0.0.0.0:PORT for other machines too.")
    hold: float = option(
        60.0,
        "Seconds to hold the first report of a batch, to mix it with others.",
        low=0,
        high=7 * 86_400,
        unit="second",
    )
    least_devices: int = option(
        10, "Devices that must have reported before a batch is forwarded.", low=1, high=1_000_000
    )
    most: int = option(1000, "The most reports that a person may send in an epoch.", low=1, high=1_000_000)
    """The server may allow fewer."""
    lead: float = option(
        5.0, "Close an epoch this many seconds before the next hop does.", low=0, high=3_600, unit="second"
    )
    """What is left then still arrives."""
    batch: int = setting(2048, "The most reports in a batch.", low=1, high=16_384)
    most_held: int = option(5_000_000, "The most reports to hold on disk.", low=1, high=10**9)
    """More are refused until some are passed on."""
    queue: int = setting(32 << 20, "The most bytes of requests in memory; more are refused.", low=2 << 20, high=1 << 34)
    tls: bool = option(
        True, "Encrypt connections. --no-tls needs an address of this machine alone.", option="--tls/--no-tls"
    )
    next_ca: bool = setting(
        False, "Check the next hop's certificate against next-ca.pem, not against the system's authorities."
    )

    def __post_init__(self) -> None:
        settings.check(self, "The proxy's ")
        check_listen(self.listen, self.tls, 9445)
        self._check_next()

    def _check_next(self) -> None:
        if not self.next:
            if self.next_ca:
                raise HomebodyError("An authority for the next hop needs its address: give --next, or leave it out.")
            return
        try:
            parts = urlsplit(self.next)
            named = parts.hostname and (parts.port is None or parts.port > 0)
        except ValueError:
            named = False
            parts = urlsplit("")
        more = parts.path.rstrip("/") or parts.query or parts.fragment
        if parts.scheme not in ("http", "https") or not named or more:
            raise HomebodyError(
                f"The next hop is an address such as https://server.example.org:9443, not '{self.next}'."
            )
        if parts.username is not None:
            raise HomebodyError(
                "The next hop's address must not contain a user name or password: a proxy signs its batches."
            )
        if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            raise HomebodyError(f"{parts.hostname} is not on this machine: pass reports on with https://, not http://.")
        if self.next_ca and parts.scheme != "https":
            raise HomebodyError(f"An authority for the next hop needs an address at https://, not '{self.next}'.")
