"""The command line: one file per command. Heavy imports wait until a command needs them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from homebody import __version__
from homebody.cli import (
    account,
    audit,
    client,
    data,
    inspect,
    leaderboard,
    methods,
    proxy,
    recommend,
    reproduce,
    run,
    server,
    tune,
)
from homebody.cli.progress import Interrupted
from homebody.errors import HomebodyError

__all__ = ["app", "main"]

app = typer.Typer(
    help="Train and compare recommenders without collecting anyone's history.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"homebody {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options of the command as a whole."""


app.command("run")(run.run)
app.command("compare")(run.compare)
app.command("leaderboard")(leaderboard.leaderboard)
app.command("tune")(tune.tune)
app.command("reproduce")(reproduce.reproduce)
app.command("methods")(methods.methods)
app.command("show")(run.show)
app.command("inspect")(inspect.inspect)
app.command("audit")(audit.audit)
app.command("recommend")(recommend.recommend)
app.add_typer(data.app, name="data")
app.add_typer(account.app, name="account")
app.add_typer(server.app, name="server")
app.add_typer(client.app, name="client")
app.add_typer(proxy.app, name="proxy")
app.add_typer(server.keys, name="keys")


def _refused(error: OSError) -> str:
    """What the system refused, in a sentence.

    >>> _refused(OSError(28, "No space left on device", "runs/x"))
    'The system refused runs/x: No space left on device.'
    """
    where = f" {error.filename}" if error.filename else ""
    return f"The system refused{where or ' this'}: {(error.strerror or str(error)).rstrip('.')}."


def main() -> None:
    """The `homebody` command. What a person can put right is said in one sentence, with exit code 2."""
    try:
        app()
    except HomebodyError as error:
        typer.echo(f"homebody: {error}", err=True)
        sys.exit(2)
    except Interrupted as stopped:
        known = stopped.run and stopped.run.exists()
        go_on = stopped.go_on or (f"Go on with `homebody run --resume {stopped.run}`." if known else "")
        typer.echo(f"homebody: interrupted. {go_on}".rstrip(), err=True)
        sys.exit(130)
    except OSError as error:
        typer.echo(f"homebody: {_refused(error)}", err=True)
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if "no locator available" in str(error):  # numba, where it can write nowhere
            typer.echo(
                "homebody: compiled code can be kept nowhere: set NUMBA_CACHE_DIR to a folder that can be written.",
                err=True,
            )
            sys.exit(2)
        if not isinstance(error, MemoryError) and "memory" not in str(error).lower():
            raise
        typer.echo(f"homebody: this does not fit in memory: {str(error).splitlines()[-1][-200:]}", err=True)
        sys.exit(2)
