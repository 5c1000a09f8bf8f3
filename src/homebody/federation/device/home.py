"""A device's home: the folder that holds its people, their histories and private states, and what ever left it.

`home.sqlite` holds all but the ledgers, one a person, in `ledgers/`. The running client and other commands use it side
by side; nothing in it is readable for other users of the machine.
"""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from homebody.errors import HomebodyError
from homebody.federation.device.history import History, Imported, Interaction, moment
from homebody.federation.device.people import Person, TakesNoPart, Who
from homebody.federation.device.rounds import Mark, Message, Model, Rounds, State
from homebody.federation.device.store import Settings, limited
from homebody.files import touch

if TYPE_CHECKING:
    from homebody.privacy import Ledger

__all__ = [
    "Home",
    "Imported",
    "Interaction",
    "Mark",
    "Message",
    "Model",
    "Person",
    "Settings",
    "State",
    "TakesNoPart",
    "Who",
    "authority",
    "moment",
    "read_certificate",
]

LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Home(History, Rounds):
    """One device.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> home = Home.create(Path(folder.name, "device"), server="127.0.0.1:9092")
    >>> ann = home.add_person("ann")
    >>> _ = home.append(ann, "ulysses", time=20)
    >>> _ = home.append(ann, "emma", time=10, rating=5)
    >>> [one.item for one in home.history(ann)]
    ['emma', 'ulysses']
    >>> home.add_items(0, [("dubliners", "Dubliners"), ("emma", "Emma")])
    2
    >>> home.population().history(0).tolist(), home.population().notes
    ([1], ('1 of 2 interactions is with 1 item that the catalogue does not know: left out.',))
    >>> home.close()
    >>> folder.cleanup()
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
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
        furnish: Callable[[Path], object] | None = None,
    ) -> Self:
        """A new device in a folder that is not there yet, or is empty: whole, or not at all.

        limits: what a task may take, by name (`Settings.limits`); the others are as usual.
        furnish: puts keys and certificates into the folder, before it counts as a device.
        """
        folder = Path(path)
        if budget is not None:
            from homebody.privacy import Budget

            # A person means the server, unless they say another: it is the one that gets to see what leaves.
            budget = str(Budget.parse(budget if "observer" in budget else f"{budget},observer=server"))
        settings = limited(Settings(server=server, name=name, budget=budget, proxy=proxy), limits or {})
        made = _claim(folder)
        try:
            (folder / "ledgers").mkdir(mode=0o700)
            if furnish is not None:
                furnish(folder)
            cls.lay_out(folder, settings)
        except BaseException:
            _empty(folder)
            if made:
                folder.rmdir()
            raise
        return cls(folder)

    def ledger(self, who: Who) -> Ledger:
        """A person's own ledger. It is open until the home is closed."""
        slot = self.person(who).slot
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
        """Where it is; not there before the first charge."""
        return self.path / "ledgers" / f"{self.person(who).slot}.sqlite"

    def close(self) -> None:
        for ledger in self._ledgers.values():
            ledger.close()
        self._ledgers.clear()
        super().close()


def authority(server: str, file: Path | None) -> bytes | None:
    """The certificate that a device knows its server by; none is needed where the server is on the same machine."""
    host = Settings(server=server).host
    if file is None:
        if host in LOOPBACK:
            return None
        raise HomebodyError(f"{host} is another machine: give the certificate of its server as --ca ca.pem.")
    return read_certificate(file)


def read_certificate(file: Path) -> bytes:
    """A certificate in PEM form, and no private key."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise HomebodyError(f"{file} cannot be read: {error.strerror or error}.") from error
    if b"PRIVATE KEY" in content:
        raise HomebodyError(f"{file} holds a private key, which a device must never have: give ca.pem.")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise HomebodyError(f"{file} is no certificate in PEM form; give the ca.pem of the server.") from error
    return content


def _claim(folder: Path) -> bool:
    """Whether the folder had to be made; one that holds something is refused."""
    try:
        made = not folder.exists()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (folder / "home.sqlite").exists():
            raise HomebodyError(f"{folder} is a device already; use it, or name another folder.")
        if any(folder.iterdir()):
            raise HomebodyError(f"{folder} is not empty; name a folder that is, or one that is not there yet.")
        folder.chmod(0o700)
    except OSError as error:
        raise HomebodyError(f"No device can be made in {folder}: {error.strerror or error}.") from error
    return made


def _empty(folder: Path) -> None:
    for found in folder.iterdir():
        if found.is_dir():
            shutil.rmtree(found)
        else:
            found.unlink()
