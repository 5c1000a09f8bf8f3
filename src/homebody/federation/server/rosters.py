"""The roster that a server passes on to devices: somebody else signed it, and only devices check the signature."""

from __future__ import annotations

from functools import lru_cache

from homebody.errors import HomebodyError
from homebody.federation.secure_sum.identities import identity_in
from homebody.federation.secure_sum.roster import Roster
from homebody.federation.server.records import Records, RegisteredDevice

__all__ = ["put_roster", "read_roster", "stored_roster", "unlisted"]


def put_roster(records: Records, content: bytes) -> Roster:
    """Store a signed roster for devices; an older one than the server has is refused."""
    roster, before = Roster.unverified(content), stored_roster(records)
    if before is not None and roster.number < before.number:
        raise HomebodyError(
            f"The server has roster {before.number}, which is newer than {roster.number}: devices that hold it would "
            "refuse the older one."
        )
    if before is not None and roster.number == before.number and roster != before:
        raise HomebodyError(
            f"The server has another roster of the number {roster.number}: have the new one made with a larger "
            "--number, and signed again."
        )
    records.put_roster(content)
    return roster


def stored_roster(records: Records) -> Roster | None:
    """The newest roster that the operator gave the server."""
    content = records.roster()
    return None if content is None else read_roster(content)


@lru_cache(maxsize=2)
def read_roster(content: bytes) -> Roster:
    """A stored roster."""
    return Roster.unverified(content)


def unlisted(roster: Roster, devices: list[RegisteredDevice]) -> list[RegisteredDevice]:
    """Devices that may take part and are not in the roster: no device that checks it would take part with them."""
    return [each for each in devices if not each.removed and identity_in(bytes(each.public_key)) not in roster.devices]
