"""What a service was told to do: one TOML file in its folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from homebody import settings
from homebody.federation.service.listening import ListeningSettings, check_listen
from homebody.settings import setting

if TYPE_CHECKING:
    from homebody.privacy.queries import Query

__all__ = ["FILE", "ServiceSettings"]

FILE = "serve.toml"
option = partial(setting, panel="Options")
"""A setting that is an option of `homebody serve init`; others are only in the file."""


@dataclass(frozen=True)
class ServiceSettings(ListeningSettings):
    """A service's settings.

    >>> settings = ServiceSettings(rows=300)
    >>> ServiceSettings.from_toml(settings.to_toml()) == settings
    True
    """

    party, file, titled = ("service", "serve"), FILE, "The file of the service's settings"

    query: str = option(
        "",
        "The mechanism that devices ask by, such as choice:epsilon=5; '' for none: table and shelf are ε = 0.",
    )
    listen: str = option("127.0.0.1:9447", "Where to listen, HOST:PORT; 0.0.0.0:PORT for other machines too.")
    rows: int = option(500, "Rows of the shelf, and of half a shelf with half a list.", low=2, high=100_000)
    answers: int = option(100, "Items in the answer to a query that the service ranks.", low=1, high=1000)
    tls: bool = option(
        True, "Encrypt connections. --no-tls needs an address of this machine alone.", option="--tls/--no-tls"
    )
    tokens: bool = option(False, "Answer only requests with a token of `homebody serve token add`.", option="--tokens")
    max_age: int = setting(
        60, "Seconds for which shelf, lists and table may be kept without asking again.", low=0, high=86_400
    )
    table_bytes: int = setting(64 << 20, "The largest table to send; a larger one is refused.", low=0, high=1 << 30)
    retire: int = setting(600, "Seconds for which the model before the last reload still answers.", low=0, high=86_400)
    queue: int = setting(32 << 20, "The most bytes of requests in memory; more are refused.", low=2 << 20, high=1 << 34)

    def __post_init__(self) -> None:
        settings.check(self, "The service's ")
        _ = self.asked
        check_listen(self.listen, self.tls, 9447)

    @property
    def asked(self) -> Query | None:
        """How devices ask; None: they do not."""
        if not self.query:
            return None
        from homebody.privacy.queries import Query  # torch is slow to load, and `--help` does not need it

        return Query.parse(self.query)
