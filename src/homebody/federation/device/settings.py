"""The settings of a device: its server, proxy and service, its people's budget, a task's limits, whom it believes."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homebody.errors import HomebodyError, unknown_name
from homebody.federation.secure_sum import FEWEST
from homebody.federation.service.text import LONGEST_SPAN, check_proxy, one_line, read_file, split_address

__all__ = ["MODES", "HomeSettings", "limit_fields", "read_certificate", "server_certificate"]

LIMITS = ("memory", "operations", "bytes", "seconds")
"""What a task may use, by name; each is the field `most_…` of the settings."""
MOST_EPSILON = 100
"""The largest ε that a service can ask a query at."""
METHOD = r"[A-Za-z0-9][A-Za-z0-9_-]{0,59}"
"""The name of a method of a package, as a device allows it."""
MODES = ("auto", "table", "shelf", "query", "server")
"""How a device may be served; auto: by the table where it is small, else by the shelf."""


@dataclass(frozen=True)
class HomeSettings:
    """The settings of a device.

    >>> HomeSettings(server="example.org:9092").paused
    False
    >>> HomeSettings(server="example.org")
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: The server's address must be HOST:PORT, such as example.org:9092, not 'example.org'.
    """

    server: str
    """The address of the server whose rounds it answers; empty: it takes part in no training."""
    name: str = ""
    """What the device calls itself."""
    budget: str | None = None
    """Each person's privacy budget, in the form that `homebody.privacy.Budget` reads; None: no limit."""
    paused: bool = False
    node: int | None = None
    """The number that the network last knew the device by."""
    proxy: str = ""
    """The address of the proxy that reports go through; empty where no method shuffles."""
    most_memory: int = 2 << 30
    """Bytes of memory that the work on a letter may use, by its method's estimate."""
    most_operations: int = 10**12
    """Arithmetic operations that the work on a letter may take, by the same estimate."""
    most_bytes: int = 256 << 20
    """Bytes that an answer may have, by the same estimate."""
    most_seconds: float = 120.0
    """Seconds by the clock after which the work for one person is given up."""
    fewest: int = FEWEST
    """Devices in a secure sum below which this one takes no part."""
    roster_key: str = ""
    """The public key of whoever signs the roster of devices, as OpenSSH text; empty: the server is believed."""
    serving: str = ""
    """The address of the service that recommends from its catalogue; empty: none."""
    serving_mode: str = "auto"
    """How to be served: one of `MODES`."""
    serving_every: int = 86_400
    """Seconds from one turn of asking the service to the next."""
    query_epsilon: float = 5.0
    """What a query may cost its person, ε against the server, at most. The service says how it is drawn, and so what it
    costs."""

    methods: Sequence[str] = ()
    """Methods of packages that a server may name, beside those that come with Homebody. Nobody sends code: the package
    is installed on the device."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "methods", tuple(self.methods))  # JSON has lists
        for method in self.methods:
            if not re.fullmatch(METHOD, method):
                raise HomebodyError(
                    f"A device allows a method by its name: letters, digits, - and _, as in my-method, not '{method}'."
                )
        if self.server != "" and split_address(str(self.server)) is None:
            raise HomebodyError(
                f"The server's address must be HOST:PORT, such as example.org:9092, not '{self.server}'."
            )
        if self.name:
            one_line(self.name, "A device's name", 200)
        if self.proxy:
            check_proxy(self.proxy)
        for name, value in self.limits.items():
            if type(value) not in ((int, float) if name == "seconds" else (int,)) or not 0 < value < 2**62:
                whole = "a number" if name == "seconds" else "a whole number"
                raise HomebodyError(f"A device's limit of {name} must be {whole} above 0, not {value!r}.")
        if type(self.fewest) is not int or not FEWEST <= self.fewest < 1 << 20:
            raise HomebodyError(
                f"A device takes part in a secure sum among {FEWEST} or more (--fewest), not among {self.fewest!r}."
            )
        if self.roster_key:
            one_line(self.roster_key, "The public key that signs rosters", 1000)
        if self.serving:
            check_proxy(self.serving, "A service")
        if self.serving_mode not in MODES:
            raise unknown_name("mode of being served", self.serving_mode, MODES)
        if type(self.serving_every) is not int or not 1 <= self.serving_every <= LONGEST_SPAN:
            raise HomebodyError("A device asks its service every second to every year (--every 24h), not more or less.")
        if type(self.query_epsilon) not in (int, float) or not 0 < self.query_epsilon <= MOST_EPSILON:
            raise HomebodyError(
                f"The ε of a query is a number above 0, up to {MOST_EPSILON}, not {self.query_epsilon!r}."
            )

    @property
    def limits(self) -> dict[str, int | float]:
        """What a task may use, by name."""
        return {name: getattr(self, f"most_{name}") for name in LIMITS}

    @property
    def host(self) -> str:
        """The server's host, without its port.

        >>> HomeSettings(server="[::1]:9092").host
        '::1'
        """
        return self.server.rpartition(":")[0].strip("[]")


def limit_fields(limits: Mapping[str, float]) -> dict[str, Any]:
    """The fields of the settings that hold these limits.

    >>> limit_fields({"memory": 1e9})
    {'most_memory': 1000000000}
    """
    for name in limits:
        if name not in LIMITS:
            raise unknown_name("limit of a device", name, LIMITS)
    whole = {name for name, value in limits.items() if name != "seconds" and value == value // 1}
    return {f"most_{name}": int(value) if name in whole else value for name, value in limits.items()}


def server_certificate(server: str, file: Path | None) -> bytes | None:
    """The certificate that a device knows its server by; a server on the same machine needs none."""
    host = HomeSettings(server=server).host
    if not server:
        if file is not None:
            raise HomebodyError("--ca is the certificate of a server: give its address as --server HOST:PORT too.")
        return None
    if file is not None:
        return read_certificate(file)
    if host in ("localhost", "127.0.0.1", "::1"):
        return None
    raise HomebodyError(f"{host} is another machine: give the certificate of its server as --ca ca.pem.")


def read_certificate(file: Path) -> bytes:
    """A certificate in PEM form; a file that also holds a private key is refused."""
    content = read_file(file)
    if b"PRIVATE KEY" in content:
        raise HomebodyError(f"{file} holds a private key, which a device must never have: give ca.pem.")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise HomebodyError(f"{file} is not a certificate in PEM form; give the ca.pem of the server.") from error
    return content
