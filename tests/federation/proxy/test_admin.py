"""`homebody proxy`: what an operator types."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from homebody.cli import app
from homebody.errors import HomebodyError
from homebody.federation.envelopes import Envelope, open_envelope, sign_envelope
from homebody.federation.proxy.admin import make
from homebody.federation.proxy.settings import ProxySettings
from homebody.federation.service.keys import make_report_key, read_report_key, read_report_pub

NEXT = "https://server.example.org:9443"


def typed(*words: str | Path) -> Any:
    return CliRunner().invoke(app, ["proxy", *map(str, words)])


def test_a_proxy_is_made_and_told_who_may_send(tmp_path: Path) -> None:
    folder = tmp_path / "proxy"
    done = typed("init", folder, "--next", NEXT, "--hold", "30", "--least-devices", "20", "--host", "proxy.lan")
    assert done.exit_code == 0, done.output
    assert ProxySettings.read(folder) == ProxySettings(next=NEXT, hold=30.0, least_devices=20)
    kinds = {path.relative_to(folder).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
    assert kinds.pop("keys") == 0o700
    assert set(kinds.values()) == {0o600}
    assert {"proxy.toml", "proxy.sqlite", "reports.key", "reports.pub", "keys/ca.pem", "keys/server.key"} <= set(kinds)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    keys = [tmp_path / name / "reports.pub" for name in ("a", "b", "c")]
    for key in keys:
        assert json.loads(typed("key", key.parent, "--json").output)["public"] == str(key)
    assert json.loads(typed("allow", folder, *keys[:2], "--people", "3", "--json").output) == {"added": 2, "senders": 2}
    assert typed("allow", folder, keys[2], "--proxy").output == f"3 may send to {folder}.\n"
    said = json.loads(typed("status", folder, "--json").output)
    assert (said["devices"], said["proxies"], said["held"], said["running"]) == (2, 1, 0, False)
    assert json.loads(typed("forbid", folder, keys[0], "--json").output) == {"removed": 1, "senders": 2}
    assert "may send: 1 device, 1 proxy;" in typed("status", folder).output
    with pytest.raises(HomebodyError, match="is not registered with the proxy"):
        CliRunner().invoke(app, ["proxy", "forbid", str(folder), str(keys[0])], catch_exceptions=False)


def test_allowing_is_all_or_nothing(tmp_path: Path) -> None:
    make(tmp_path / "proxy", ProxySettings(next=NEXT))
    good, bad = make_report_key(tmp_path / "a"), tmp_path / "bad.pub"
    bad.write_text("homebody-reports 1234\n")
    assert isinstance(typed("allow", tmp_path / "proxy", good, bad).exception, HomebodyError)
    assert json.loads(typed("status", tmp_path / "proxy", "--json").output)["devices"] == 0


def test_certificates_of_ones_own(tmp_path: Path) -> None:
    make(tmp_path / "one", ProxySettings(next=NEXT))
    keys = tmp_path / "one" / "keys"
    done = typed(
        "init", tmp_path / "two", "--next", NEXT, "--cert", keys / "server.pem", "--key", keys / "server.key",
        "--next-ca", keys / "ca.pem", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert (tmp_path / "two" / "keys" / "server.pem").read_bytes() == (keys / "server.pem").read_bytes()
    assert (tmp_path / "two" / "next-ca.pem").read_bytes() == (keys / "ca.pem").read_bytes()
    assert not (tmp_path / "two" / "keys" / "ca.key").exists()
    assert read_report_pub(Path(json.loads(done.output)["public"]))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--next", "server"], "next hop is an address"),
        (["--next", "https://"], "next hop is an address"),
        (["--next", "https://host:99999"], "next hop is an address"),
        (["--next", "https://host/path"], "next hop is an address"),
        (["--next", "https://a:b@host"], "must not contain a user name or password"),
        (["--next", "http://example.org"], "pass reports on with https"),
        (["--next", NEXT, "--listen", "nowhere"], "address to listen on"),
        (["--next", NEXT, "--listen", "0.0.0.0:1", "--no-tls"], "leave out --no-tls"),
        (["--next", NEXT, "--hold", "-1"], "The proxy's hold must be at least 0 seconds, not -1.0"),
        (["--next", NEXT, "--least-devices", "0"], "least_devices must be at least 1, not 0"),
        (["--next", NEXT, "--most", "0"], "most must be at least 1, not 0"),
        (["--next", NEXT, "--cert", "x"], "go together"),
        (["--next", NEXT, "--cert", "x", "--key", "y"], "not a certificate and its key"),
        (["--next", NEXT, "--next-ca", "missing.pem"], "cannot be read"),
        (["--next", NEXT, "--next-ca", __file__], "no certificate of an authority"),
        (["--next", "http://localhost:1", "--next-ca", __file__], "needs an address at https"),
        (["--next", NEXT, "--host", "a b"], "is not a host"),
    ],
)
def test_what_makes_no_sense_is_said_and_leaves_nothing(tmp_path: Path, words: list[str], sentence: str) -> None:
    done = typed("init", tmp_path / "proxy", *words)
    assert isinstance(done.exception, HomebodyError)
    assert sentence in str(done.exception)
    assert not (tmp_path / "proxy").exists()


def test_a_folder_that_is_taken_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(HomebodyError, match="not empty"):
        make(tmp_path, ProxySettings(next=NEXT))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(HomebodyError, match="There is no proxy"):
        ProxySettings.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("schema = 9", "newer Homebody"),
        ("schema = 0", "from 1"),
        ("next", "not valid TOML"),
        ("hold = 1.0", "The file of the proxy's settings names no next."),
        (f"next = '{NEXT}'\nholt = 1.0", "did you mean 'hold'"),
        (f"next = '{NEXT}'\nhold = 'long'", "must be a number"),
        (f"next = '{NEXT}'\nleast_devices = true", "must be a whole number"),
    ],
)
def test_settings_that_cannot_be_used(text: str, sentence: str) -> None:
    with pytest.raises(HomebodyError, match=sentence):
        ProxySettings.from_toml(text)


def test_a_key_signs_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    public = make_report_key(tmp_path / "device")
    private = public.with_suffix(".key")
    assert {stat.S_IMODE(path.stat().st_mode) for path in (public, private)} == {0o600}
    known, secret = read_report_key(private)
    sender, _ = open_envelope(sign_envelope(Envelope("message", bytes(16), bytes(16), b""), secret))
    assert sender == known == read_report_pub(public)
    assert public.read_text() == f"homebody-reports {known.hex()}\n"
    with pytest.raises(HomebodyError, match="must not leave its device"):
        read_report_pub(private)
    with pytest.raises(HomebodyError, match="is not a key that signs"):
        read_report_key(public)
    with pytest.raises(HomebodyError, match="already exists"):
        make_report_key(tmp_path / "device")
    with pytest.raises(HomebodyError, match="cannot be read"):
        read_report_pub(tmp_path / "none")
    (tmp_path / "x").write_bytes(b"\xff" * 100_000)
    with pytest.raises(HomebodyError, match="not a public key for reports"):
        read_report_pub(tmp_path / "x")
