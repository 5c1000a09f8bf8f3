"""What a server was told to do: one TOML file in its folder."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from homebody import settings
from homebody.errors import HomebodyError, unknown_name
from homebody.federation import LONGEST, MOST_INTERACTIONS
from homebody.federation.server.records import Records
from homebody.federation.service.listening import ListeningSettings
from homebody.federation.service.text import check_proxy, is_loopback, split_address
from homebody.recipe import Recipe
from homebody.settings import setting

# `homebody server init` reads the settings for its options, and `homebody --help` must not wait for torch: what needs
# more than the settings is imported where it is used.
if TYPE_CHECKING:
    from homebody.core import Method
    from homebody.methods.packages import PackagedMethod

__all__ = ["FILE", "NOBODY_PUBLIC", "ServerPlan", "opened"]

FILE = "server.toml"
"""The plan in a server's folder."""
option = partial(setting, panel="Options")
"""A setting that is an option of `homebody server init`; others are only in the file."""
NOBODY_PUBLIC = "No device's data is public: leave out public people, and stages that learn from them alone."
DESCRIBED = ("method", "fields", "stages", "seed", "protocol", "held_out", "negatives")
"""Fields of the recipe that every letter holds as they are."""


def database_in(folder: Path, database: str) -> Path | str:
    """The database to connect to: a file in the folder, an address, or env:NAME for what the environment has."""
    if database.startswith("env:"):
        name = database.removeprefix("env:")
        if not os.environ.get(name):
            raise HomebodyError(f"The server's database is given by the environment variable {name}, which is not set.")
        return os.environ[name]
    return database if "://" in database else folder / database


def _recipe(values: Any) -> Recipe:
    if not isinstance(values, dict):
        raise HomebodyError(f"The server's recipe must be a table, not {values!r}.")
    return Recipe.from_values(values)


@dataclass(frozen=True)
class ServerPlan(ListeningSettings):
    """A server's plan.

    >>> plan = ServerPlan(Recipe("fedmf", "devices", rounds=5), listen="127.0.0.1:9092")
    >>> ServerPlan.from_toml(plan.to_toml()) == plan
    True
    >>> plan.host, plan.port
    ('127.0.0.1', 9092)
    """

    party, file, titled = ("server", "server"), FILE, "The server's plan"
    tables: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"recipe": _recipe}

    recipe: Recipe
    """What is trained; the data are on the devices."""
    listen: str = option(
        "127.0.0.1:9092", "Where to listen for devices, HOST:PORT; 0.0.0.0:PORT for other machines too."
    )
    metrics: str = option("127.0.0.1:9464", "Where to serve /metrics and /health, HOST:PORT; '' for nowhere.")
    database: str = option(
        "server.sqlite", "A file in DIR, postgresql://…, or env:NAME to read the address from a variable."
    )
    link: str = option("", "Use a SuperLink that runs elsewhere with this server's keys, HOST:PORT.")
    """A SuperLink; without one, the server starts its own."""
    reports: str = option(
        "", "Where to take in proxies' reports, HOST:PORT, for a method that shuffles; '' for nowhere."
    )
    reports_wait: float = option(
        30.0,
        "Seconds to wait for reports after a round's deadline; more than the proxy's --hold.",
        low=0,
        high=86_400,
        unit="second",
    )
    helper: str = option(
        "", "The proxy that opens secure sums, https://HOST:PORT, for secure-sum:helper=true; '' for nobody."
    )
    tls: bool = option(
        True, "Encrypt connections. --no-tls needs an address of this machine alone.", option="--tls/--no-tls"
    )
    deadline: float = option(60.0, "Seconds that a round waits for answers.", low=1, high=86_400, unit="second")
    quorum: float = option(
        0.5, "The share of a round's people who must answer; with fewer, the round is repeated.", above=0, high=1
    )
    least: int = option(1, "People that must be connected before a round begins.", low=1, min=1)
    half: bool = option(False, "Send numbers in 16 bits instead of 32.")
    largest: float = setting(1e9, "The largest number that an update may hold.", above=0)
    most_faults: int = option(5, "Broken answers of one device before it is set aside.", low=1, min=1)
    longest: int = option(
        LONGEST,
        "The most interactions of a person that are used, the latest ones. Devices size a task by it.",
        low=1,
        high=MOST_INTERACTIONS,
        unit="interaction",
        min=1,
    )
    run: str = setting(doc="The name of this training on devices.", make=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        settings.check(self, "The server's ")
        for what in (self.listen, *filter(None, (self.metrics, self.link, self.reports))):
            if split_address(what) is None:
                raise HomebodyError(f"An address is HOST:PORT, such as 127.0.0.1:9092, not '{what}'.")
        for name in ("database", "run"):
            if not getattr(self, name).strip():
                raise HomebodyError(f"The server's {name} is empty: give a name.")
        if self.helper:
            check_proxy(self.helper, "A helper")
        if self.metrics and not is_loopback(self.metrics.rpartition(":")[0].strip("[]")):
            raise HomebodyError(
                f"/metrics on {self.metrics} could be read by anybody: serve it on 127.0.0.1, and ask through a proxy."
            )

    @property
    def address(self) -> str:
        """Where the server itself finds the link."""
        anywhere = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
        return self.link or f"{anywhere.get(self.host, self.listen.rpartition(':')[0])}:{self.port}"

    @property
    def least_present(self) -> int:
        """People that must be connected before a round begins: at least as many as it asks."""
        return max(self.least, self.recipe.cohort or 1)

    def method(self) -> Method:
        """What is trained, checked."""
        from homebody.core import Method
        from homebody.federation import wire
        from homebody.federation.task import telemetry

        self.recipe.check()
        if ":" in self.recipe.method:
            raise HomebodyError(
                f"Devices run methods that come with Homebody or with an installed package, not your own file "
                f"{self.recipe.method}: name it as an entry point of a package, and give its name "
                "(docs/devices.md, A method of your own)."
            )
        method = self.recipe.build()
        if not isinstance(method, Method):
            raise HomebodyError(f"{self.recipe.method} collects raw data: it cannot be trained on devices.")
        held = ("user features", "item features", "impressions")
        if lacking := [need for need in method.needs if need not in held]:
            raise HomebodyError(f"{self.recipe.method} needs {lacking[0]}, which devices do not hold yet.")
        if method.scoring.predicts == "ratings":
            raise HomebodyError(
                f"{self.recipe.method} would predict ratings, and devices measure rankings alone: leave out "
                "--set output=explicit."
            )
        if "impressions" in method.needs and self.recipe.every(method):
            raise HomebodyError(
                f"Devices do not measure what people click among what they are shown, which {self.recipe.method} "
                "predicts: give --evaluate-every 0."
            )
        method = self._among_enough(method)
        for phase in method.phases:
            acting = phase.method or method
            wire.refuse_unfit(acting, proxied=bool(self.reports), helped=bool(self.helper))
            if self.recipe.every(method) and phase.evaluated:
                telemetry(acting, self.recipe.measured())
            if acting.uplink.facts.secret:
                self._check_sum(acting)
        if self.helper and not any((phase.method or method).uplink.facts.helped for phase in method.phases):
            raise HomebodyError(
                f"No secure sum of {self.recipe.method} has a helper: leave out --helper, or put stages such as "
                "--stage clip:norm=1 --stage secure-sum:helper=true --stage gaussian:z=2."
            )
        self._check_what_devices_do(method)
        self._refuse_hopeless(method)
        return method

    def planned(self, method: Method) -> int:
        """The rounds of all phases."""
        rounds = self.recipe.rounds or method.about.rounds
        return sum(phase.rounds or rounds for phase in method.phases)

    def _check_sum(self, method: Method) -> None:
        """That devices can add up this method's updates between them: they fit its numbers, and are many."""
        from homebody.federation.secure_sum.messages import FEWEST

        people = self.recipe.cohort or max(self.least, FEWEST)
        method.uplink.among(people).ring(1, people)
        if people < FEWEST:
            raise HomebodyError(
                f"A secure sum needs {FEWEST} devices at least, and {people} a round are fewer: raise --cohort."
            )

    @property
    def shuffled_among(self) -> int:
        """How many people report at least in a round that counts: so many are certain, and no more are claimed."""
        return math.ceil(self.quorum * (self.recipe.cohort or self.least))

    def _among_enough(self, method: Method) -> Method:
        """The method with a Shuffle that counts on no more people than are certain to report."""
        channel, shuffle = method.uplink, method.uplink.facts.shuffle
        if shuffle is None:
            if self.reports and channel.facts.reader is not None:
                if channel.facts.names_lists:
                    raise HomebodyError(
                        "The server knows whose a report is by the list that it ranked for them, so a proxy hides "
                        "nobody: give --set candidates=100, or leave out --reports."
                    )
                return method
            if self.reports:
                raise HomebodyError(
                    f"{self.recipe.method} sends no reports through a proxy: leave out --reports, or put stages before "
                    "it such as --stage one-bit:epsilon=2,k=100 --stage shuffle."
                )
            return method
        if shuffle.users is not None and shuffle.users > self.shuffled_among:
            raise HomebodyError(
                f"The shuffle stage counts on {shuffle.users} people, but {self.shuffled_among} are enough for a "
                "round: raise --least and --quorum, or lower users."
            )
        known = replace(shuffle, users=shuffle.users or self.shuffled_among)
        stages = (known if stage is shuffle else stage for stage in channel.stages)
        return replace(method, uplink=channel.with_stages(*stages))  # type: ignore[type-var]

    def _refuse_hopeless(self, method: Method) -> None:
        """A budget that no round fits into, however people are drawn: ε of one round is infinite."""
        import numpy as np

        from homebody.core import Cohort, releases

        budget = self.recipe.allowed()
        acting = method.phases[0].method or method
        people = self.recipe.cohort or self.least
        charges = releases(acting, Cohort(np.arange(people), "all", people, people))
        if budget:
            budget.refuse_infinite(charges)

    def _check_what_devices_do(self, method: Method) -> None:
        from homebody.data.splits import How, Protocol
        from homebody.federation.task import metric_names

        recipe, measures = self.recipe, self.recipe.every(method)
        chosen = ("metric to choose the round by", recipe.selects(), metric_names(recipe.measured()))
        if recipe.split != "leave-one-out":
            raise HomebodyError(f"Devices hold out their last two interactions: leave out the split '{recipe.split}'.")
        if recipe.public or any(phase.public for phase in method.phases):
            raise HomebodyError(NOBODY_PUBLIC)
        if recipe.calibrate:
            raise HomebodyError(
                "The noise for a budget is computed before a server is created, with `homebody account gaussian "
                "--epsilon …`: leave out calibrate, and give the stage its noise."
            )
        for what, name, known in (
            ("protocol", recipe.protocol, get_args(Protocol)),
            ("way to hold out", recipe.held_out or "latest", get_args(How)),
            *([chosen] if measures else []),
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
            **{name: getattr(recipe, name) for name in DESCRIBED},
            "cutoffs": recipe.measured(),
            "measures": recipe.every(recipe.build()) > 0,
            "longest": self.longest,
            **({"code": package.code} if (package := self.package()) is not None else {}),
        }

    def package(self) -> PackagedMethod | None:
        """The package that brings the method; None for one that comes with Homebody."""
        from homebody.methods import METHODS
        from homebody.methods.packages import packaged

        return None if self.recipe.method in METHODS else packaged(self.recipe.method)

    def database_in(self, folder: Path) -> Path | str:
        return database_in(folder, self.database)


@contextmanager
def opened(folder: Path) -> Iterator[tuple[ServerPlan, Records]]:
    """A server's plan and records, beside the running server."""
    from homebody.database import connect

    plan = ServerPlan.read(folder)
    with closing(connect(plan.database_in(folder), what="server's database")) as database:
        yield plan, Records(database)
