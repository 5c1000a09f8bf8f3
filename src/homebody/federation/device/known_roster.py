"""The newest roster that a device has accepted: the devices that it believes in a secure sum.

`roster.signed` in the device's folder holds it: the key that signed it, and the roster as it came. The settings hold
the key whose rosters are accepted (`HomeSettings.roster_key`).
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from homebody.errors import HomebodyError
from homebody.federation.secure_sum import IDENTITY_BYTES
from homebody.files import replacing, sync_folder

if TYPE_CHECKING:
    from homebody.federation.secure_sum.roster import Roster

__all__ = ["KnownRoster"]

FILE = "roster.signed"


class KnownRoster:
    """The roster of a device.

    folder: the device's. key: the signer's public key as OpenSSH text; empty: the device believes the server.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._file, self._key = folder / FILE, key

    @property
    def required(self) -> bool:
        """Whether this device takes part among devices of a roster only."""
        return bool(self._key)

    def current(self) -> Roster | None:
        """The newest roster that was accepted under the present key; a damaged file is refused."""
        from homebody.federation.secure_sum.identities import identity_in

        if not self._key:
            return None
        try:
            content = self._file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise HomebodyError(f"The device's roster {self._file} cannot be read: {error.strerror}.") from error
        signer, roster = content[:IDENTITY_BYTES], content[IDENTITY_BYTES:]
        if signer != identity_in(self._key.encode()):
            return None  # the key was changed since
        try:
            return _read(roster, self._key)
        except HomebodyError as error:
            raise HomebodyError(
                f"The device's roster {self._file} is damaged: remove it, and the server sends it again."
            ) from error

    def accept(self, content: bytes) -> Roster:
        """Store a signed roster, which is on the disk when this returns. One of another key, or older than the one at
        hand, is refused."""
        from homebody.federation.secure_sum.identities import identity_in
        from homebody.federation.secure_sum.roster import BadRoster

        if not self._key:
            raise HomebodyError(
                "This device has no key to check rosters with: give it with `homebody client roster DIR --key`."
            )
        roster, current = _read(content, self._key), self.current()
        if current is not None:
            if roster.number < current.number:
                raise BadRoster(
                    f"Roster {roster.number} is older than roster {current.number}, which this device has accepted."
                )
            if roster.number == current.number and roster != current:
                raise BadRoster(
                    f"This device has accepted another roster of the number {roster.number}: sign the new one under a "
                    "larger number."
                )
            if roster == current:
                return current
        with replacing(self._file) as file:
            file.write(identity_in(self._key.encode()) + content)
        sync_folder(self._file.parent)
        return roster

    def known(self, run: str) -> frozenset[bytes] | None:
        """The devices that may be parties in this run, for `Party(known=…)`. None: whoever the server names, because
        this device was given no key."""
        from homebody.federation.secure_sum.roster import BadRoster

        if not self._key:
            return None
        roster = self.current()
        if roster is None:
            raise BadRoster(
                "This device takes part in a secure sum among devices of a signed roster only, and has none yet: give "
                "the server one with `homebody server roster`."
            )
        if roster.run not in ("", run):
            raise BadRoster("The roster of this device is for another run.")
        return roster.devices


@lru_cache(maxsize=2)
def _read(content: bytes, key: str) -> Roster:
    from homebody.federation.secure_sum.identities import load_public_key
    from homebody.federation.secure_sum.roster import Roster

    return Roster.read(content, load_public_key(key.encode()))
