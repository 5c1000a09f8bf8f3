"""A device's home: the folder that holds its people, their histories and private states, and a record of what left.

`home.sqlite` holds everything except the ledgers and the roster of devices; each person's ledger is a file in
`ledgers/`. The tables of
`home.sqlite` are defined in `store.py`: change what a device stores there. The running client and other commands may
use a home at the same time. No other user of the machine can read it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from homebody.errors import HomebodyError
from homebody.federation.device.history import History
from homebody.federation.device.impressions import ImpressionStore
from homebody.federation.device.known_items import KnownItems
from homebody.federation.device.known_roster import KnownRoster
from homebody.federation.device.models import Models
from homebody.federation.device.outbox import Outbox
from homebody.federation.device.people import People, Who
from homebody.federation.device.queries import Queries
from homebody.federation.device.received import Received
from homebody.federation.device.settings import HomeSettings, limit_fields, read_certificate
from homebody.federation.device.store import WRITE_TIMEOUT, HomeStore
from homebody.federation.device.sums import Sums
from homebody.federation.device.views import KnownViews
from homebody.federation.secure_sum import FEWEST
from homebody.federation.service.text import claiming, read_file
from homebody.files import holding, replacing, touch

if TYPE_CHECKING:
    from homebody.privacy import Ledger

__all__ = ["Home"]

SERVING_CA, SERVING_TOKEN = "serving-ca.pem", "serving-token"
LONGEST_TOKEN = 1000


class Home(AbstractContextManager["Home"]):
    """One device: people, history, impressions, items, models, outbox, views, secure sums and queries, over one store.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> home = Home.create(Path(folder.name, "device"), server="127.0.0.1:9092")
    >>> ann = home.people.add("ann")
    >>> _ = home.history.append(ann, "ulysses", time=20)
    >>> _ = home.history.append(ann, "emma", time=10, rating=5)
    >>> [interaction.item for interaction in home.history.of(ann)]
    ['emma', 'ulysses']
    >>> home.items.add(0, [("dubliners", "Dubliners"), ("emma", "Emma")])
    2
    >>> population = home.history.population()
    >>> population.history(0).tolist(), population.notes
    ([1], ('1 of 2 interactions is with 1 item that the catalogue does not know: left out.',))
    >>> home.close()
    >>> folder.cleanup()
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.store = HomeStore(self.path)
        self.people = People(self.store)
        self.items = KnownItems(self.store)
        self.history = History(self.store, self.people, self.items)
        self.impressions = ImpressionStore(self.store, self.people, self.items, self.history)
        self.models = Models(self.store, self.people)
        self.outbox = Outbox(self.store, self.people, self.models)
        self.views = KnownViews(self.store)
        self.sums = Sums(self.store)
        self.received = Received(self.store)
        self.queries = Queries(self.store, self.people)
        self._ledgers: dict[int, Ledger] = {}

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        server: str,
        name: str = "",
        budget: str | None = None,
        proxy: str = "",
        limits: Mapping[str, float] | None = None,
        fewest: int = FEWEST,
        roster_key: str = "",
        methods: Sequence[str] = (),
        furnish: Callable[[Path], object] | None = None,
    ) -> Self:
        """Create a device in a folder that is empty or does not exist, completely or not at all.

        limits: what a task may use, by name (`HomeSettings.limits`); the other limits have their defaults.
        fewest, roster_key: whom the device believes in a secure sum (`HomeSettings`).
        methods: those of packages that a server may name.
        furnish: puts keys and certificates into the folder, before it counts as a device.
        """
        folder = Path(path)
        if budget is not None:
            from homebody.privacy import Budget

            # The server sees what leaves, so a budget that names no observer is about the server.
            budget = str(Budget.parse(budget if "observer" in budget else f"{budget},observer=server"))
        rest: dict[str, Any] = {
            "proxy": proxy,
            "fewest": fewest,
            "roster_key": roster_key,
            "methods": methods,
            **limit_fields(limits or {}),
        }
        settings = HomeSettings(server, name, budget, **rest)
        with claiming(folder, "device", "home.sqlite"):
            if furnish is not None:
                furnish(folder)
            HomeStore.create(folder, asdict(settings))
        return cls(folder)

    @property
    def settings(self) -> HomeSettings:
        """The current settings, whichever process changed them."""
        return _settings(*self.store.read("SELECT name, value FROM setting WHERE name != 'changes'"))

    @property
    def roster(self) -> KnownRoster:
        """The devices that this one believes in a secure sum, by the present settings."""
        return KnownRoster(self.path, self.settings.roster_key)

    def configure(self, limits: Mapping[str, float] | None = None, **changes: Any) -> HomeSettings:
        """Change some settings and some limits of a task, by name: all of those given, or none."""
        if changes.get("budget") is not None:
            from homebody.privacy import Budget

            Budget.parse(changes["budget"])
        with self.store.writing() as db:
            settings = replace(self.settings, **changes, **limit_fields(limits or {}))
            rows = [(name, json.dumps(value)) for name, value in asdict(settings).items()]
            db.executemany("INSERT OR REPLACE INTO setting VALUES (?, ?)", rows)
        return settings

    def be_served(
        self, url: str | None = None, *, ca: Path | None = None, token_file: Path | None = None, **changes: Any
    ) -> HomeSettings:
        """Change the service that recommends from its catalogue: its address, the certificate that it is known by, the
        token that it asks for, and other settings by name. All are changed, or none.

        At another address there is another service: what came from the one before is deleted, its certificate and
        token too.
        """
        known = None if ca is None else read_certificate(ca)
        token = None if token_file is None else _token(token_file)
        with self.store.writing():
            before = self.settings.serving
            changes |= {} if url is None else {"serving": url.rstrip("/")}
            settings = self.configure(**changes)
            if (known or token) and not settings.serving:
                raise HomebodyError("--ca and --token-file belong to a service: give its address as --url too.")
            moved = settings.serving != before
            if moved:
                self.queries.begin_anew()
            for name, content in ((SERVING_CA, known), (SERVING_TOKEN, token)):
                if content is not None:
                    with replacing(self.path / name) as file:
                        file.write(content)
                elif moved:
                    (self.path / name).unlink(missing_ok=True)
        return settings

    @property
    def serving_token(self) -> str | None:
        """The token for the service, if it asks for one."""
        file = self.path / SERVING_TOKEN
        return file.read_text("ascii") if file.exists() else None

    @property
    def serving_ca(self) -> Path | None:
        """The file of the certificate that the service is known by; None: authorities that this system knows."""
        file = self.path / SERVING_CA
        return file if file.exists() else None

    def ledger(self, who: Who) -> Ledger:
        """A person's own ledger. It stays open until the home is closed."""
        slot = self.people.find(who).slot
        if slot not in self._ledgers:
            from homebody.privacy import Ledger

            file = self.ledger_file(slot)
            try:
                touch(file)
            except OSError as error:
                raise HomebodyError(f"The ledger {file} cannot be opened: {error.strerror}.") from error
            self._ledgers[slot] = Ledger(file)
        return self._ledgers[slot]

    def ledger_file(self, who: Who) -> Path:
        """The file of a person's ledger, which does not exist before the first charge."""
        return self.path / "ledgers" / f"{self.people.find(who).slot}.sqlite"

    def charging(self, who: Who) -> AbstractContextManager[int]:
        """Be the only one, of all threads and processes, that compares a person's budget with their ledger and charges
        it."""
        lock = self.path / "ledgers" / f"{self.people.find(who).slot}.lock"
        return holding(lock, f"{lock} is held by another process of this device: try again.", patience=WRITE_TIMEOUT)

    def close(self) -> None:
        for ledger in self._ledgers.values():
            ledger.close()
        self._ledgers.clear()
        self.store.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _token(file: Path) -> bytes:
    """The token in a file: one line of printable ASCII."""
    text = read_file(file, LONGEST_TOKEN + 2).strip()
    if not 0 < len(text) <= LONGEST_TOKEN or not all(33 <= byte <= 126 for byte in text):
        raise HomebodyError(f"{file} holds no token: it is one line, as the service's operator gave it.")
    return text


@lru_cache(maxsize=64)
def _settings(*rows: tuple[str, str]) -> HomeSettings:
    """From names and JSON. They are read several times for each letter, and seldom change."""
    names = {field.name for field in fields(HomeSettings)}
    return HomeSettings(**{name: json.loads(value) for name, value in rows if name in names})
