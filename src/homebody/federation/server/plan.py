"""What a server was told to do: one TOML file in its folder."""

from __future__ import annotations

import math
import tomllib
import uuid
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import tomli_w

from homebody.core import Cohort, Method, releases
from homebody.data.splits import How, Protocol
from homebody.errors import HomebodyError, unknown_name
from homebody.federation import wire
from homebody.federation.server.letters import MOST_FAULTS
from homebody.federation.server.records import FILE, database_in
from homebody.federation.server.runtime import NOBODY_PUBLIC, RoundSettings
from homebody.federation.service.text import ADDRESS, is_loopback
from homebody.federation.task import LONGEST, MOST_INTERACTIONS
from homebody.federation.telemetry import metric_names, telemetry
from homebody.recipe import Recipe
from homebody.settings import KINDS

__all__ = ["FILE", "ServerPlan"]

SCHEMA_VERSION = 1
_TYPES: dict[str, type] = {
    **dict.fromkeys(("listen", "metrics", "database", "link", "reports", "run"), str),
    **dict.fromkeys(("tls", "half"), bool),
    **dict.fromkeys(("deadline", "quorum", "largest", "reports_wait"), float),
    **dict.fromkeys(("least", "longest", "most_faults"), int),
}


@dataclass(frozen=True)
class ServerPlan:
    """A server's plan.

    >>> plan = ServerPlan(Recipe("fedmf", "devices", rounds=5), listen="127.0.0.1:9092")
    >>> ServerPlan.from_toml(plan.to_toml()) == plan
    True
    >>> plan.host, plan.port
    ('127.0.0.1', 9092)
    """

    recipe: Recipe
    """What is trained; the data are on the devices."""
    listen: str = "127.0.0.1:9092"
    """Where devices come to."""
    metrics: str = "127.0.0.1:9464"
    """Where /metrics and /health are; empty: nowhere."""
    database: str = "server.sqlite"
    """A file in the server's folder, a postgresql:// address, or env:NAME for one that the environment holds."""
    link: str = ""
    """A SuperLink that someone else runs, to be joined; empty: the server starts its own."""
    reports: str = ""
    """Where proxies bring the reports of a method that shuffles; empty: nowhere."""
    reports_wait: float = 30.0
    """Seconds after a round's deadline for reports to come: longer than the proxy holds them."""
    tls: bool = True
    deadline: float = 60.0
    quorum: float = 0.5
    least: int = 1
    half: bool = False
    largest: float = 1e9
    most_faults: int = MOST_FAULTS
    """Broken answers of one device before it is set aside."""
    longest: int = LONGEST
    """Interactions of a person that count, the latest: what a task takes of a device is reckoned with so many."""
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    """What this training is called on devices."""

    def __post_init__(self) -> None:
        for name, kind in _TYPES.items():
            value = getattr(self, name)
            if type(value) is not kind and not (kind is float and type(value) is int):
                raise HomebodyError(f"The server's {name} must be {KINDS[kind]}, not {value!r}.")
        if not 1 <= self.deadline <= 86_400:
            raise HomebodyError(f"A round's deadline is 1 to 86,400 seconds, not {self.deadline:g}.")
        if not 0 <= self.reports_wait <= 86_400:
            raise HomebodyError(f"Reports are waited for 0 to 86,400 seconds, not {self.reports_wait:g}.")
        if not 0 < self.quorum <= 1:
            raise HomebodyError(f"The quorum is a share above 0 and at most 1, not {self.quorum:g}.")
        if self.least < 1:
            raise HomebodyError(f"A round needs at least 1 client, not {self.least}.")
        if self.most_faults < 1:
            raise HomebodyError(f"A device is set aside after 1 broken answer or more, not {self.most_faults}.")
        if not 1 <= self.longest <= MOST_INTERACTIONS:
            raise HomebodyError(f"The longest history is 1 to {MOST_INTERACTIONS:,} interactions, not {self.longest}.")
        if not 0 < self.largest < math.inf:
            raise HomebodyError(f"The largest number of an update is a finite one above 0, not {self.largest:g}.")
        for what in (self.listen, *filter(None, (self.metrics, self.link, self.reports))):
            found = ADDRESS.fullmatch(what)
            if not found or not 0 < int(found["port"]) < 65536:
                raise HomebodyError(f"An address is HOST:PORT, such as 127.0.0.1:9092, not '{what}'.")
        for name in ("database", "run"):
            if not getattr(self, name).strip():
                raise HomebodyError(f"The server's {name} must be named: it is empty.")

        if self.metrics and not is_loopback(self.metrics.rpartition(":")[0].strip("[]")):
            raise HomebodyError(
                f"/metrics on {self.metrics} could be read by anybody: serve it on 127.0.0.1, and ask through a proxy."
            )

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])

    @property
    def address(self) -> str:
        """Where the server itself finds the link."""
        anywhere = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
        return self.link or f"{anywhere.get(self.host, self.listen.rpartition(':')[0])}:{self.port}"

    def settings(self) -> RoundSettings:
        """How the runtime waits, and what it lets in."""
        return RoundSettings(
            deadline=self.deadline,
            quorum=self.quorum,
            least=max(self.least, self.recipe.cohort or 1),
            half=self.half,
            largest=self.largest,
            reports_wait=self.reports_wait,
            cutoffs=tuple(self.recipe.measured()),
            most_faults=self.most_faults,
        )

    def method(self) -> Method:
        """What is trained, checked."""
        self.recipe.check()
        if ":" in self.recipe.method:
            raise HomebodyError(
                f"Devices run methods that come with Homebody, not a file of one's own such as {self.recipe.method}."
            )
        method = self.recipe.build()
        if not isinstance(method, Method):
            raise HomebodyError(f"{self.recipe.method} collects raw data: it cannot be trained on devices.")
        if method.needs:
            raise HomebodyError(f"{self.recipe.method} needs {method.needs[0]}, which devices do not hold yet.")
        if method.scoring.predicts == "ratings":
            raise HomebodyError(
                f"{self.recipe.method} would predict ratings, and devices measure rankings alone: leave out "
                "--set output=explicit."
            )
        method = self._among_enough(method)
        for phase in method.phases:
            acting = phase.method or method
            wire.refuse_unfit(acting, proxied=bool(self.reports))
            if self.recipe.every(method) and phase.evaluated:
                telemetry(acting, self.recipe.measured())
        self._check_what_devices_do(method)
        self._refuse_hopeless(method)
        return method

    @property
    def shuffled_among(self) -> int:
        """How many people report at least in a round that counts: so many are certain, and no more are claimed."""
        return math.ceil(self.quorum * (self.recipe.cohort or self.least))

    def _among_enough(self, method: Method) -> Method:
        """The method with a Shuffle that counts on no more people than are certain to report."""
        channel, shuffle = method.uplink, method.uplink.facts.shuffle
        if shuffle is None:
            if self.reports:
                raise HomebodyError(
                    f"{self.recipe.method} sends no reports through a proxy: leave out --reports, or put stages before "
                    "it such as --stage one-bit:epsilon=2,k=100 --stage shuffle."
                )
            return method
        if shuffle.users is not None and shuffle.users > self.shuffled_among:
            raise HomebodyError(
                f"Reports cannot count as shuffled among {shuffle.users} people where {self.shuffled_among} are enough "
                "for a round: raise --least and --quorum, or lower users."
            )
        known = replace(shuffle, users=shuffle.users or self.shuffled_among)
        stages = (known if stage is shuffle else stage for stage in channel.stages)
        return replace(method, uplink=channel.with_stages(*stages))  # type: ignore[type-var]

    def _refuse_hopeless(self, method: Method) -> None:
        """A budget that no round fits into, however people are drawn: ε of one round is infinite."""
        budget = self.recipe.allowed()
        acting = method.phases[0].method or method
        people = self.recipe.cohort or self.least
        charges = releases(acting, Cohort(np.arange(people), "all", people, people))
        if budget:
            budget.refuse_infinite(charges)

    def _check_what_devices_do(self, method: Method) -> None:
        recipe = self.recipe
        if recipe.split != "leave-one-out":
            raise HomebodyError(f"Devices hold out their last two interactions: leave out the split '{recipe.split}'.")
        if recipe.public or any(phase.public for phase in method.phases):
            raise HomebodyError(NOBODY_PUBLIC)
        if recipe.calibrate:
            raise HomebodyError(
                "How much noise spends a budget is found before a server is made, with `homebody account calibrate`: "
                "leave out calibrate, and give the stage its noise."
            )
        for what, name, known in (
            ("protocol", recipe.protocol, get_args(Protocol)),
            ("way to hold out", recipe.held_out or "latest", get_args(How)),
            ("metric to choose the round by", recipe.selects(), metric_names(recipe.measured())),
        ):
            if name not in known:
                raise unknown_name(what, name, known)
        for what, number in (("rounds", recipe.rounds), ("cohort", recipe.cohort), ("negatives", recipe.negatives)):
            if number is not None and number < 1:
                raise HomebodyError(f"The server's {what} must be at least 1, not {number}.")

    def describe(self) -> dict[str, Any]:
        """What every letter says of the training."""
        recipe = self.recipe
        return {
            "run": self.run,
            "method": recipe.method,
            "fields": recipe.fields,
            "stages": recipe.stages,
            "seed": recipe.seed,
            "protocol": recipe.protocol,
            "held_out": recipe.held_out,
            "negatives": recipe.negatives,
            "cutoffs": recipe.measured(),
            "measures": recipe.every(recipe.build()) > 0,
            "longest": self.longest,
        }

    def database_in(self, folder: Path) -> Path | str:
        """What to connect to."""
        return database_in(folder, self.database)

    def to_toml(self) -> str:
        values = {name: value for name, value in asdict(self).items() if name != "recipe"}
        recipe = {name: value for name, value in asdict(self.recipe).items() if value is not None}
        return tomli_w.dumps({"schema": SCHEMA_VERSION, **values, "recipe": recipe})

    @classmethod
    def from_toml(cls, text: str) -> ServerPlan:
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise HomebodyError(f"The server's plan is not valid TOML: {error}.") from error
        schema = values.pop("schema", SCHEMA_VERSION)
        if type(schema) is not int or schema < 1:
            raise HomebodyError(f"The schema of a server's plan must be a whole number from 1, not {schema!r}.")
        if schema > SCHEMA_VERSION:
            raise HomebodyError("The server's plan was written by a newer Homebody; update to run it.")
        names = {spec.name for spec in fields(cls)}
        for name in values:
            if name not in names:
                raise unknown_name("setting of a server", name, names)
        described = values.pop("recipe", {})
        if not isinstance(described, dict):
            raise HomebodyError(f"The server's recipe must be a table, not {described!r}.")
        recipe = Recipe.from_toml(tomli_w.dumps(described))
        return cls(recipe, **values)

    @classmethod
    def read(cls, folder: Path) -> ServerPlan:
        """The plan of a server's folder."""
        try:
            return cls.from_toml((folder / FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise HomebodyError(
                f"There is no server in {folder}: make one with `homebody server init {folder}`."
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise HomebodyError(f"The server's plan {folder / FILE} cannot be read: {error}.") from error

    def changed(self, **changes: Any) -> ServerPlan:
        """The plan with other settings."""
        return replace(self, **changes)
