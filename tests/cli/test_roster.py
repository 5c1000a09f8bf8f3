"""`homebody keys signer`, `roster` and `sign-roster`, and what devices and servers do with a roster."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from homebody.cli import app
from homebody.errors import HomebodyError
from homebody.federation.device.home import Home


def ran(*words: object) -> str:
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False).output


def answered(*words: object) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(ran(*words, "--json"))
    return answer


def refused(*words: object) -> str:
    with pytest.raises(HomebodyError) as refusal:
        ran(*words)
    return str(refusal.value)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a signer's key and three devices that know it."""
    monkeypatch.chdir(tmp_path)
    ran("keys", "signer", "signer")
    for name in ("a", "b", "c"):
        ran("client", "init", name, "--server", "127.0.0.1:9092", "--roster-key", "signer/signer.pub", "--fewest", 3)
    return tmp_path


DEVICES = ("a/device.pub", "b/device.pub", "c/device.pub")


def test_a_signers_key_is_private_and_not_written_over(tmp_path: Path) -> None:
    made = answered("keys", "signer", tmp_path / "signer")
    assert {name: Path(file).name for name, file in made.items()} == {"key": "signer.key", "public": "signer.pub"}
    assert stat.S_IMODE(Path(made["key"]).stat().st_mode) == 0o600
    assert "already exists" in refused("keys", "signer", tmp_path / "signer")


def test_from_public_keys_to_a_roster_that_a_device_accepts(place: Path) -> None:
    text = ran("keys", "roster", *DEVICES, "--out", "roster.bin", "--number", 5)
    fingerprints = {name: answered("client", "roster", name)["fingerprint"] for name in ("a", "b", "c")}
    for name, fingerprint in fingerprints.items():
        assert f"{fingerprint}  {name}/device.pub" in text
    signed = answered("keys", "sign-roster", "roster.bin", "--key", "signer/signer.key", "--out", "roster.signed")
    assert (signed["number"], signed["devices"]) == (5, sorted(fingerprints.values()))
    assert signed["digest"] in text
    assert "No roster yet" in ran("client", "roster", "a")
    held = answered("client", "roster", "a", "roster.signed")
    assert held["roster"] == {"number": 5, "run": "", "devices": 3}
    with Home("a") as home:
        known = home.roster.known("any")
        assert known is not None
        assert len(known) == 3
        assert home.settings.fewest == 3


def test_numbers_grow_by_themselves(place: Path) -> None:
    numbers = [answered("keys", "roster", *DEVICES, "--out", f"{n}.bin")["number"] for n in range(2)]
    assert 1_700_000_000 < numbers[0] <= numbers[1]


def test_a_device_without_a_key_is_given_one(place: Path) -> None:
    ran("client", "init", "old", "--server", "127.0.0.1:9092")
    assert "any devices that the server names" in ran("client", "roster", "old")
    ran("keys", "roster", *DEVICES, "--out", "roster.bin")
    ran("keys", "sign-roster", "roster.bin", "--key", "signer/signer.key", "--out", "roster.signed")
    assert "has no key to check rosters with" in refused("client", "roster", "old", "roster.signed")
    text = ran("client", "roster", "old", "roster.signed", "--key", "signer/signer.pub", "--fewest", 5)
    assert "Among 5 devices or more." in text
    assert "This device is not in it" in text


def test_where_the_roster_is_refused_the_key_stays(place: Path) -> None:
    ran("keys", "signer", "other")
    ran("keys", "roster", *DEVICES, "--out", "roster.bin")
    ran("keys", "sign-roster", "roster.bin", "--key", "signer/signer.key", "--out", "roster.signed")
    before = answered("client", "roster", "a")
    assert "not signed by the key" in refused("client", "roster", "a", "roster.signed", "--key", "other/signer.pub")
    assert answered("client", "roster", "a") == before


def test_what_cannot_be_listed_or_signed_is_refused_and_nothing_is_written(place: Path) -> None:
    out = ("--out", "out")
    key = ("--key", "signer/signer.key")
    Path("short").write_bytes(b"HBR1")
    assert "same device: leave one out" in refused("keys", "roster", *DEVICES, DEVICES[0], *out)
    assert "3 to 1,048,576 devices, not 2" in refused("keys", "roster", *DEVICES[:2], *out)
    assert "is a private key" in refused("keys", "roster", *DEVICES[:2], "c/device.key", *out)
    assert "ends too early" in refused("keys", "sign-roster", "short", *key, *out)
    assert "This is no roster" in refused("keys", "sign-roster", "a/device.pub", *key, *out)
    assert "cannot be read" in refused("keys", "sign-roster", "missing", *key, *out)
    ran("keys", "roster", *DEVICES, "--out", "roster.bin")
    assert "no ECDSA P-384 private key" in refused(
        "keys", "sign-roster", "roster.bin", "--key", "signer/signer.pub", *out
    )
    assert not Path("out").exists()
    before = Path("a/device.key").read_bytes()
    assert "already exists" in refused("keys", "roster", *DEVICES, "--out", "a/device.key")
    assert "already exists" in refused("keys", "sign-roster", "roster.bin", *key, "--out", "a/device.key")
    assert Path("a/device.key").read_bytes() == before
    ran("keys", "sign-roster", "roster.bin", *key, *out)
    assert "signed already" in refused("keys", "sign-roster", "out", *key, "--out", "twice")


def test_a_server_passes_a_roster_on_and_says_who_is_left_out(place: Path) -> None:
    stages = ("--stage", "clip:norm=1", "--stage", "skellam:z=2", "--stage", "secure-sum")
    ran("server", "init", "server", "--method", "fedmf", *stages)
    for name in ("a", "b", "c", "d"):
        if name == "d":
            ran("client", "init", name, "--server", "127.0.0.1:9092")
        ran("keys", "add", "server", f"{name}/device.pub", "--name", name)
    assert answered("server", "roster", "server") == {"roster": None}
    status = answered("server", "status", "server")
    assert status["roster"] is None
    assert status["assumes"][-1].startswith("No roster: devices with a key for one take no part")
    for number in (5, 6):
        ran("keys", "roster", *DEVICES, "--out", f"{number}.bin", "--number", number)
        ran("keys", "sign-roster", f"{number}.bin", "--key", "signer/signer.key", "--out", f"{number}.signed")
    assert "not signed" in refused("server", "roster", "server", "6.bin")
    given = answered("server", "roster", "server", "6.signed")
    assert (given["roster"]["number"], given["roster"]["devices"], given["unlisted"]) == (6, 3, ["d"])
    assert "which is newer than 5" in refused("server", "roster", "server", "5.signed")
    assert "not asked in secure sums: d." in ran("server", "roster", "server")
    text = ran("server", "status", "server")
    assert "Roster 6 names 3 devices." in text
    assert "never a single vector" in text
    ran("server", "backup", "server", "backup.sqlite")
    Path("server/server.sqlite").unlink()
    ran("server", "restore", "server", "backup.sqlite")
    assert answered("server", "roster", "server")["roster"] == given["roster"]


def test_a_device_is_not_made_with_a_wrong_key(place: Path) -> None:
    init = ("client", "init", "new", "--server", "127.0.0.1:9092", "--roster-key")
    assert "`homebody keys signer` makes one" in refused(*init, __file__)
    assert "must not leave whoever signs with it" in refused(*init, "signer/signer.key")
    assert not Path("new").exists()
