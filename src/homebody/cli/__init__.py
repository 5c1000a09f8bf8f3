"""The command line: one file per command. Heavy imports wait until a command needs them."""

from __future__ import annotations

import re
import sys
from functools import cache
from typing import Annotated

from click import Abort, ClickException, Command, UsageError
from click.exceptions import NoArgsIsHelpError
from typer import Exit, Option, Typer, echo
from typer.main import get_command

from homebody import __version__
from homebody.cli import (
    account,
    audit,
    client,
    data,
    inspect,
    keys,
    leaderboard,
    methods,
    options,
    proxy,
    recommend,
    reproduce,
    run,
    runs,
    serve,
    server,
    tune,
    view,
)
from homebody.cli.groups import Commands
from homebody.cli.progress import Interrupted
from homebody.errors import HomebodyError
from homebody.screen import loading

__all__ = ["app", "main"]

app = Typer(
    cls=Commands,
    help="Train and compare recommenders without collecting anyone's history.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        echo(f"homebody {__version__}")
        raise Exit


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the command as a whole."""


for command in (run.run, run.compare, leaderboard.leaderboard, tune.tune, reproduce.reproduce, methods.methods):
    app.command()(command)
for command in (runs.runs, run.show, inspect.inspect, audit.audit, recommend.recommend):
    app.command()(command)
for group in (data, account, server, client, view, proxy, serve, keys):
    app.add_typer(group.app, name=group.__name__.rpartition(".")[2], cls=Commands)


def _sentence(error: Exception) -> str | None:
    """What a person can put right, in a sentence; None for a mistake of ours.

    >>> _sentence(OSError(28, "No space left on device", "runs/x"))
    'The system refused runs/x: No space left on device.'
    """
    if isinstance(error, HomebodyError):
        return str(error)
    if isinstance(error, OSError):
        return f"The system refused {error.filename or 'this'}: {(error.strerror or str(error)).rstrip('.')}."
    if "no locator available" in str(error):  # numba, where it can write nowhere
        return "compiled code can be kept nowhere: set NUMBA_CACHE_DIR to a folder that can be written."
    if isinstance(error, MemoryError) or "memory" in str(error).lower():
        return f"This does not fit in memory{_wanted(str(error))}. Make the model smaller, or take fewer data."
    return None


def _wanted(error: str) -> str:
    """What an allocator says of the memory that it was asked for, as PyTorch, NumPy and CUDA say it.

    >>> _wanted("DefaultCPUAllocator: can't allocate memory: you tried to allocate 79999999200 bytes. Error code 12")
    ': it takes 80 GB at once'
    >>> _wanted("Unable to allocate 7.28 TiB for an array with shape (1000000, 1000000)"), _wanted("")
    (': it takes 7.28 TiB at once', '')
    """
    found = re.search(r"allocate ([\d.]+) (bytes|[KMGTPE]i?B)", error)
    if found is None:
        return ""
    number, unit = found.groups()
    much = f"{int(number) / 1e9:,.2g} GB" if unit == "bytes" else f"{number} {unit}"
    return f": it takes {much} at once"


@cache
def _command() -> Command:
    """The commands and options, worked out once for each process: it takes a twentieth of a second."""
    return get_command(app)


def main() -> None:
    """The `homebody` command. What a person can put right is said in one sentence, with exit code 2."""
    try:
        with loading("homebody: loading …"):
            code = _command()(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except ClickException as error:
        usage = error.ctx.get_usage() if isinstance(error, UsageError) and error.ctx is not None else ""
        options.refuse(error.format_message(), usage)
        sys.exit(error.exit_code)
    except Abort:
        options.warn("interrupted.", "homebody")
        sys.exit(130)
    except Interrupted as stopped:
        known = stopped.run and stopped.run.exists()
        go_on = stopped.go_on or (f"Go on with `homebody run --resume {stopped.run}`." if known else "")
        options.warn(f"interrupted. {go_on}".rstrip(), "homebody")
        sys.exit(130)
    except (HomebodyError, OSError, MemoryError, RuntimeError) as error:
        if (sentence := _sentence(error)) is None:
            raise
        options.refuse(sentence)
        sys.exit(2)
