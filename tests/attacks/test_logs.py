"""What a real federation writes to its logs, its standard output and /metrics: no key, no secret, nobody and nothing
that somebody has."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.attacks.conftest import Campaign
from tests.federation.test_shuffling import Keys, plan
from tests.federation.world import World
from tests.processes import PATIENCE, free_port

from homebody.data import Population
from homebody.federation.flower.gateway import operator_token
from homebody.federation.server.admin import opened


def private_lines(folder: Path) -> Iterator[bytes]:
    """What is in files that only their owner may read, line by line and as hexadecimal; certificates are public."""
    for file in folder.rglob("*"):
        if not file.is_file() or file.suffix in (".log", ".out", ".csv", ".pub", ".sqlite", ".sqlite-wal", ".toml"):
            continue
        content = file.read_bytes()
        if b"CERTIFICATE" in content or file.stat().st_size > 100_000:
            continue
        if "key" in file.name or "secret" in file.name or "PRIVATE" in content.decode("latin-1"):
            yield from (line for line in content.splitlines() if len(line) >= 16 and not line.startswith(b"-----"))
            yield content.hex().encode()


@pytest.mark.parametrize("shuffled", [pytest.param(False, marks=pytest.mark.attack), True])
def test_logs_hold_no_secret_nobody_and_no_item(
    few: Population,
    world: Callable[..., World],
    shuffled: bool,
    campaign: Campaign,
) -> None:
    recipe = plan(4)
    if not shuffled:
        recipe.stages.clear()
    metrics = f"127.0.0.1:{free_port()}"
    federation = world(few, 2, recipe, metrics=metrics, shuffling={"least_devices": 2} if shuffled else None)
    keys = Keys(federation.server)
    try:
        federation.start()
        federation.wait_for("server", "round")
        trainer = federation.trainer()
        assert trainer is not None
        os.kill(trainer, signal.SIGKILL)  # what goes wrong is said, too
        federation.kill("device0")
        federation.start("device0")
        federation.wait_for("server", "finished")
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=PATIENCE) as answer:
            told = answer.read()
    finally:
        epoch_keys = keys.stop()
    for name in list(federation.processes):
        federation.kill(name, signal.SIGTERM)
    files = [*federation.folder.glob("*.log"), *federation.folder.glob("*.out")]
    assert len(files) >= 6
    said = {file.name: file.read_bytes() for file in files} | {"/metrics": told}
    assert all(b"Traceback" not in text for text in said.values())
    secrets = {line for folder in federation.folder.iterdir() if folder.is_dir() for line in private_lines(folder)}
    assert len(secrets) > 10
    with opened(federation.server) as (given, _):
        secrets |= {operator_token((federation.server / "keys" / "secret").read_bytes().strip()).encode()}
        secrets |= {given.run.encode()} if len(given.run) > 8 else set()
    secrets |= {secret.hex().encode() for secret in epoch_keys.values()}
    assert bool(epoch_keys) == shuffled
    # People are called `person 0`, items `i0` and `Item 0`.
    names = re.compile(rb"person \d|Item \d|\bi\d+\b")
    for name, text in said.items():
        leaked = [secret[:12] for secret in secrets if secret in text]
        assert not leaked, (name, leaked)
        assert not names.search(text), (name, names.search(text))
    kind = "a federation with a proxy" if shuffled else "a federation"
    campaign.did(f"logs of {kind}, searched for secrets and people", len(said), secrets=len(secrets))
