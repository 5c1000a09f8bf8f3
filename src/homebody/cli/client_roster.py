"""`homebody client roster`: which devices a device believes in a secure sum."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from homebody.cli import options
from homebody.errors import several
from homebody.federation.secure_sum import FEWEST

__all__ = ["FEWEST_OPTION", "Dir", "roster", "signer_key"]

Dir = Annotated[Path, Argument(help="The device's folder.", metavar="DIR")]
FEWEST_OPTION = Option(help="Take part in a secure sum among this many devices or more.", min=FEWEST, max=1 << 20)


def roster(
    folder: Dir,
    file: Annotated[
        Path | None, Argument(help="A signed roster to accept; otherwise the server sends it.", metavar="[ROSTER]")
    ] = None,
    key: Annotated[
        Path | None, Option(help="The signer.pub whose rosters are accepted from now on, in place of any before.")
    ] = None,
    fewest: Annotated[int | None, FEWEST_OPTION] = None,
    as_json: options.Json = False,
) -> None:
    """Show or set which devices this one believes in a secure sum."""
    from homebody.federation.device.home import Home  # loads SQLite: not for --help
    from homebody.federation.device.known_roster import KnownRoster
    from homebody.federation.secure_sum.identities import fingerprint_of, identity_of, load_public_key
    from homebody.federation.secure_sum.roster import LONGEST
    from homebody.federation.service.certificates import read_public
    from homebody.federation.service.text import read_file

    changes: dict[str, Any] = {} if key is None else {"roster_key": signer_key(key)}
    changes |= {} if fewest is None else {"fewest": fewest}
    own = identity_of(load_public_key(read_public(folder / "device.pub")))
    with Home(folder) as home:
        if file is not None:  # first: where it is refused, nothing is changed
            signed_by = changes.get("roster_key", home.settings.roster_key)
            KnownRoster(folder, signed_by).accept(read_file(file, LONGEST + 1))
        settings = home.configure(**changes) if changes else home.settings
        current = home.roster.current()
    text = settings.roster_key.encode()
    signer = fingerprint_of(identity_of(load_public_key(text))) if text else None
    held = None if current is None else {"number": current.number, "run": current.run, "devices": len(current.devices)}
    believed = "Takes part among any devices that the server names: no key for rosters was given."
    if signer is not None:
        believed = f"Takes part among devices of a roster only, which this key signs: {signer}"
    lines = [f"This device: {fingerprint_of(own)}", believed]
    lines += [f"Among {settings.fewest:,} devices or more."]
    if current is not None:
        lines += [f"Roster {current.number}: {several(len(current.devices), 'device')}, digest {current.digest}."]
        if own not in current.devices:
            lines += ["This device is not in it: give its device.pub to whoever signs the roster."]
    elif signer is not None:
        lines += ["No roster yet: until the server sends one, this device takes no part in a secure sum."]
    shown = {"fingerprint": fingerprint_of(own), "fewest": settings.fewest, "signer": signer, "roster": held}
    options.answer(shown, as_json, *lines)


def signer_key(file: Path) -> str:
    """The public key of whoever signs rosters, as a device's settings hold it."""
    from homebody.federation.service.certificates import read_public

    return read_public(file, "signer").decode()
