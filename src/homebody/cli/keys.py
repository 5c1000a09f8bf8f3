"""`homebody keys`: create keys, choose whose may take part, and list and sign the devices that others may believe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option, Typer, echo

from homebody.cli import options
from homebody.cli.server import Dir, Hosts
from homebody.errors import HomebodyError, several

if TYPE_CHECKING:
    from homebody.federation.secure_sum.roster import Roster

__all__ = ["app"]

app = Typer(help="Create keys, and choose whose may take part.", no_args_is_help=True)


@app.command("init")
def make_keys(
    folder: Annotated[Path, Argument(help="The folder for the files; created if missing.", metavar="DIR")],
    host: Hosts = None,
    as_json: options.Json = False,
) -> None:
    """Create a server's authority, certificate and operator's secret. `homebody server init` does this for you."""
    from homebody.federation.service.certificates import make_authority

    files = [str(file) for file in make_authority(folder, host or ())]
    give = f"Give {folder / 'ca.pem'} to every device; keep the others to yourself."
    options.answer({"files": files}, as_json, *files, give)


@app.command("renew")
def renew_certificate(
    folder: Annotated[Path, Argument(help="The folder of a server, a proxy or a service.", metavar="DIR")],
    host: Hosts = None,
    as_json: options.Json = False,
) -> None:
    """Make a new certificate for other names, as after a move; devices keep the ca.pem that they have.

    Start the server again afterwards, so that it shows the new certificate.
    """
    from homebody.federation.service.certificates import renew_certificate

    names = renew_certificate(folder / "keys", host or ())
    options.answer({"names": names}, as_json, f"{folder / 'keys' / 'server.pem'} is for {', '.join(names)}.")


@app.command("device")
def make_device_key(
    folder: Annotated[Path, Argument(help="The folder for the key; created if missing.", metavar="DIR")],
    as_json: options.Json = False,
) -> None:
    """Create a device's key. `homebody client init` does this for you."""
    from homebody.federation.service.certificates import make_device_key

    options.made_key(make_device_key(folder), "Give {} to the server's operator; {} stays here.", as_json)


@app.command("add")
def add_key(
    folder: Dir,
    public_key: Annotated[Path, Argument(help="The file device.pub that the device made, or reports.pub of a proxy.")],
    name: Annotated[str, Option(help="A name for the device on this server.")],
    people: Annotated[
        int, Option(help="How many people use the device; each is a client. It cannot be changed later.", min=1)
    ] = 1,
    proxy: Annotated[bool, Option("--proxy", help="The key is a proxy's: it may bring reports.")] = False,
    as_json: options.Json = False,
) -> None:
    """Let a device take part, also while the server runs: each of its people gets a number. Or let a proxy bring
    reports."""
    from homebody.federation.server.plan import opened

    if proxy:
        from homebody.federation.service.keys import read_report_pub

        key = read_report_pub(public_key)
        with opened(folder) as (_, records):
            records.add_proxy(key, name)
        options.answer({"name": name, "proxy": True}, as_json, f"{name} may bring reports.")
        return

    from homebody.federation.flower.protocol import fingerprint
    from homebody.federation.service.certificates import read_public

    key = read_public(public_key)
    with opened(folder) as (_, records):
        numbers = records.add_device(fingerprint(key), key, name, people)
    who = f"client {numbers.start}" if people == 1 else f"clients {numbers.start} to {numbers.stop - 1}"
    device = {"name": name, "fingerprint": fingerprint(key), "first": numbers.start, "people": people}
    options.answer(device, as_json, f"{name} may take part: {who}.")


@app.command("remove")
def remove_key(
    folder: Dir,
    which: Annotated[str, Argument(help="The device's name or fingerprint, or the proxy's name.")],
    proxy: Annotated[bool, Option("--proxy", help="Remove a proxy, not a device.")] = False,
) -> None:
    """Remove a device or a proxy. A removed device takes no further part, and its client numbers are not reused."""
    from homebody.federation.server.plan import opened

    with opened(folder) as (_, records):
        if proxy:
            records.remove_proxy(which)
            echo(f"{which} may bring reports no more.")
            return
        gone = records.remove_device(which)
    echo(f"{gone.name} takes part no more.")


@app.command("signer")
def make_signer_key(
    folder: Annotated[Path, Argument(help="The folder for the key; created if missing.", metavar="DIR")],
    as_json: options.Json = False,
) -> None:
    """Create a key that signs rosters. Whoever keeps it must not be the server's operator."""
    from homebody.federation.service.certificates import make_signer_key

    give = "Give {} to every device (`homebody client init … --roster-key`); keep {} to yourself."
    options.made_key(make_signer_key(folder), give, as_json)


@app.command("roster")
def make_roster(
    public_keys: Annotated[list[Path], Argument(help="The file device.pub of every device.", metavar="DEVICE.pub…")],
    out: Annotated[Path, Option(help="The file to write; it must not exist.")],
    number: Annotated[
        int | None,
        Option(
            help="The roster's number, larger than that of every earlier one; by default the time now, in seconds "
            "since 1970.",
            min=1,
        ),
    ] = None,
    run: Annotated[
        str, Option(help="The run that the roster is for (`homebody server status DIR --json`); '' for any.")
    ] = "",
    as_json: options.Json = False,
) -> None:
    """List the devices that may be parties of a secure sum, to be signed with `sign-roster`.

    Compare each fingerprint with that of the device itself: a device that is not what it claims to be could be the
    server's.
    """
    import time

    from homebody.federation.secure_sum.identities import identity_of, load_public_key
    from homebody.federation.secure_sum.roster import Roster
    from homebody.federation.service.certificates import read_public

    files: dict[bytes, Path] = {}
    for file in public_keys:
        device = identity_of(load_public_key(read_public(file)))
        if device in files:
            raise HomebodyError(f"{files[device]} and {file} are the same device: leave one out.")
        files[device] = file
    roster = Roster.of(int(time.time()) if number is None else number, files, run)
    _write_roster(out, roster.content)
    then = f"Sign it with: homebody keys sign-roster {out} --key signer.key --out roster.signed"
    options.answer(
        {"file": str(out), **_described(roster)},
        as_json,
        *(f"{fingerprint}  {files[device]}" for device, fingerprint in _fingerprints(roster).items()),
        f"{out} is {_called(roster)}. Compare the fingerprints with those of the devices.",
        then,
    )


@app.command("sign-roster")
def sign_roster(
    file: Annotated[Path, Argument(help="What `homebody keys roster` wrote.", metavar="ROSTER")],
    key: Annotated[Path, Option(help="The private key that signs; `homebody keys signer` makes one.")],
    out: Annotated[Path, Option(help="The file to write; it must not exist.")],
    as_json: options.Json = False,
) -> None:
    """Sign a roster. Your signature says that each fingerprint printed here belongs to a device of its own."""
    from homebody.federation.secure_sum.roster import LONGEST, Roster
    from homebody.federation.service.certificates import read_signer_key
    from homebody.federation.service.text import read_file

    signer = read_signer_key(key)
    roster = Roster.decode(read_file(file, LONGEST + 1))
    fingerprints = _fingerprints(roster)
    _write_roster(out, roster.signed(signer))
    options.answer(
        {"file": str(out), **_described(roster)},
        as_json,
        *fingerprints.values(),
        f"{out} is {_called(roster)}, signed.",
        f"Give it to the server's operator: homebody server roster DIR {out}",
    )


def _fingerprints(roster: Roster) -> dict[bytes, str]:
    """The fingerprint of each device, in their order."""
    from homebody.federation.secure_sum.identities import fingerprint_of

    return dict(sorted(((device, fingerprint_of(device)) for device in roster.devices), key=lambda pair: pair[1]))


def _described(roster: Roster) -> dict[str, Any]:
    fingerprints = list(_fingerprints(roster).values())
    return {"number": roster.number, "run": roster.run, "digest": roster.digest, "devices": fingerprints}


def _called(roster: Roster) -> str:
    which = f" for the run {roster.run}" if roster.run else ""
    return f"roster {roster.number}{which} of {several(len(roster.devices), 'device')}, digest {roster.digest}"


def _write_roster(file: Path, content: bytes) -> None:
    """Write a new file, whole or not at all: one that is there may be a key."""
    from homebody.files import SHARED, replacing

    if file.exists():
        raise HomebodyError(f"{file} already exists: choose another file, or remove it first.")
    with replacing(file, mode=SHARED) as opened:
        opened.write(content)
