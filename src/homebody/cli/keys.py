"""`homebody keys`: certificates for a server, a key for a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from homebody.cli.options import Json

__all__ = ["app"]

app = typer.Typer(help="Make keys, and say whose may take part.", no_args_is_help=True)


@app.command("init")
def init(
    folder: Annotated[Path, typer.Argument(help="Where to put them; made if it is not there.", metavar="DIR")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or address by which devices reach the server, for its certificate; repeat."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a server's authority, certificate and operator's secret; `homebody server init` does it by itself."""
    from homebody.federation.service.certificates import make_authority

    files = make_authority(folder, host or ())
    if as_json:
        typer.echo(json.dumps({"files": [str(file) for file in files]}))
        return
    for file in files:
        typer.echo(str(file))
    typer.echo(f"Give {folder / 'ca.pem'} to every device; keep the others to yourself.")


@app.command("device")
def device(
    folder: Annotated[Path, typer.Argument(help="Where to put it; made if it is not there.", metavar="DIR")],
    as_json: Json = False,
) -> None:
    """Make a device's key; `homebody client init` does it by itself."""
    from homebody.federation.service.certificates import make_device_key

    public = make_device_key(folder)
    private = public.with_suffix(".key")
    if as_json:
        typer.echo(json.dumps({"key": str(private), "public": str(public)}))
        return
    typer.echo(f"{private}\n{public}")
    typer.echo(f"Give {public} to the server's operator; {private.name} stays here.")
