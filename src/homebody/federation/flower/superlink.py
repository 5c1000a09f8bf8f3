"""Flower's SuperLink in a process of ours, behind the gateway. It keeps everything in memory: it carries messages and
holds no truth.

    python -m homebody.federation.flower.superlink --port 9092 --secret FILE --cert server.pem --key server.key
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from base64 import b64decode
from pathlib import Path
from typing import TYPE_CHECKING

from homebody.errors import HomebodyError, install
from homebody.federation.flower.gateway import LIMIT, Gateway, Headers, quiet_flower
from homebody.federation.service.logs import Lines, follow_parent
from homebody.federation.service.text import is_loopback

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["Gateway", "main"]

MOST_CONNECTIONS = 60_000
"""At one time: a device holds two. The system's limit of open files (LimitNOFILE) may allow fewer."""


def _is_known(app: FastAPI, headers: Headers) -> bool:
    """Whether a registered key has signed these headers; the SuperLink itself also looks at the time and the node."""
    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

    try:
        key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER.lower().encode()], validate=True)
        signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER.lower().encode()], validate=True)
        signed = headers[TIMESTAMP_HEADER.lower().encode()]
        if app.state.linkstate_factory.state().get_node_id_by_public_key(key) is None:
            return False
        return verify_signature(bytes_to_public_key(key), signed, signature)
    except (KeyError, ValueError, TypeError):
        return False


class _Lines(Lines):
    """Without the noise of pulls that are held when the link ends."""

    def emit(self, record: logging.LogRecord) -> None:
        cancelled = record.exc_info and record.exc_info[0] is asyncio.CancelledError
        if not cancelled and "graceful shutdown" not in record.msg:
            super().emit(record)


def _serve(asked: argparse.Namespace) -> None:
    if (asked.cert is None) != (asked.key is None):
        raise HomebodyError("--cert and --key go together: give both, or neither on this machine alone.")
    if asked.cert is None and not is_loopback(asked.host):
        raise HomebodyError(
            f"The link listens on {asked.host}, which others can reach, only with a certificate: make one with "
            "`homebody keys init` and give --cert and --key."
        )
    for file in filter(None, (asked.secret, asked.cert, asked.key)):
        if not file.is_file():
            raise HomebodyError(f"There is no file {file}: `homebody keys init` makes it.")
    secret = asked.secret.read_bytes().strip()
    if len(secret) < 16:
        raise HomebodyError(f"The secret in {asked.secret} has {len(secret)} bytes; it takes at least 16.")
    from homebody.federation.service.web import Limits, listen, server

    listening = listen(asked.host, asked.port, asked.elsewhere)
    quiet_flower()
    os.environ["FLWR_DATABASE"] = ":flwr-in-memory:"
    try:
        from flwr.superlink.main import create_app
    except ImportError as error:
        raise HomebodyError(f"The link needs the extra: {install('deploy')}.") from error

    app = create_app()
    app.state.enable_supernode_auth = True
    app.state.superexec_auth_secret = secret
    gateway = Gateway(app, secret, asked.limit, known=lambda headers: _is_known(app, headers))
    logging.basicConfig(handlers=[_Lines()], level=logging.ERROR)
    answering = server(
        gateway,
        listening,
        cert=asked.cert,
        key=asked.key,
        limits=Limits(in_all=MOST_CONNECTIONS),
        # Longer than a device's client keeps an idle connection: it should be the one to close it.
        keep_alive=75,
        # Pulls are held for long, and nothing here is worth waiting for.
        farewell=1,
        # By it devices put their clocks right.
        date=True,
    )
    if asked.follow_parent:
        follow_parent(lambda: setattr(answering, "should_exit", True))
    with listening:
        answering.run(sockets=[listening])


def main(given: list[str] | None = None) -> None:
    """The process. What a person can put right is said in one sentence, with exit code 2."""
    parser = argparse.ArgumentParser(
        "homebody.federation.flower.superlink", description="A SuperLink behind a gateway."
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--secret", type=Path, required=True, help="The file that holds the operator's secret.")
    parser.add_argument("--cert", type=Path, help="The server's certificate, PEM.")
    parser.add_argument("--key", type=Path, help="The certificate's key, PEM.")
    parser.add_argument("--limit", type=int, default=LIMIT, help="The most bytes of one device's request.")
    parser.add_argument("--elsewhere", default="give another --port", help="What to do if the address is taken.")
    parser.add_argument("--follow-parent", action="store_true", help="End when standard input does.")
    try:
        _serve(parser.parse_args(given))
    except HomebodyError as error:
        print(f"homebody: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
