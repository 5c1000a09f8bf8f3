"""Keys and certificates: what is written, who may read it, what is refused."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)
from typer.testing import CliRunner

from homebody.cli.keys import app as keys
from homebody.errors import HomebodyError
from homebody.federation.service.certificates import make_authority, make_device_key, read_public, renew_certificate


def test_an_authority_signs_the_servers_certificate(tmp_path: Path) -> None:
    files = make_authority(tmp_path / "keys", ["server.lan", "192.168.1.7", "localhost"])
    assert [file.name for file in files] == ["ca.pem", "ca.key", "server.pem", "server.key", "secret"]
    ca = x509.load_pem_x509_certificate((tmp_path / "keys" / "ca.pem").read_bytes())
    server = x509.load_pem_x509_certificate((tmp_path / "keys" / "server.pem").read_bytes())
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "server.lan"]
    assert [str(name) for name in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1", "192.168.1.7"]
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    for name, certificate in (("ca.key", ca), ("server.key", server)):
        key = load_pem_private_key((tmp_path / "keys" / name).read_bytes(), None)
        assert key.public_key() == certificate.public_key()
    secret = (tmp_path / "keys" / "secret").read_text()
    assert len(bytes.fromhex(secret)) == 32


def test_a_certificate_is_renewed_for_another_name(tmp_path: Path) -> None:
    folder = tmp_path / "server"
    make_authority(folder / "keys", ["old.example.org"])
    before = {file.name: file.read_bytes() for file in (folder / "keys").iterdir()}
    done = CliRunner().invoke(keys, ["renew", str(folder), "--host", "new.example.org", "--json"])
    assert json.loads(done.output) == {"names": ["localhost", "127.0.0.1", "::1", "new.example.org"]}
    after = {file.name: file.read_bytes() for file in (folder / "keys").iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"server.pem", "server.key"}
    server = x509.load_pem_x509_certificate(after["server.pem"])
    server.verify_directly_issued_by(x509.load_pem_x509_certificate(after["ca.pem"]))
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "new.example.org"]
    assert load_pem_private_key(after["server.key"], None).public_key() == server.public_key()
    assert stat.S_IMODE((folder / "keys" / "server.key").stat().st_mode) == 0o600
    (folder / "keys" / "ca.key").write_bytes(b"nonsense")
    with pytest.raises(HomebodyError, match=r"The authority in .* cannot be read"):
        renew_certificate(folder / "keys")


def test_only_their_owner_may_read_them(tmp_path: Path) -> None:
    files = [*make_authority(tmp_path / "server"), make_device_key(tmp_path / "device")]
    files.append(files[-1].with_suffix(".key"))
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "server").stat().st_mode) == 0o700


def test_two_are_never_alike(tmp_path: Path) -> None:
    one, other = make_device_key(tmp_path / "1"), make_device_key(tmp_path / "2")
    assert read_public(one) != read_public(other)
    make_authority(tmp_path / "1")
    make_authority(tmp_path / "2")
    for name in ("ca.key", "server.key", "secret"):
        assert (tmp_path / "1" / name).read_bytes() != (tmp_path / "2" / name).read_bytes()


def test_a_devices_key_is_in_two_halves(tmp_path: Path) -> None:
    public = make_device_key(tmp_path)
    assert (public, public.read_bytes()[:20]) == (tmp_path / "device.pub", b"ecdsa-sha2-nistp384 ")
    private = load_ssh_private_key((tmp_path / "device.key").read_bytes(), None)
    assert private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) == read_public(public)


def test_what_stands_beside_a_key_is_dropped(tmp_path: Path) -> None:
    public = make_device_key(tmp_path)
    plain = read_public(public)
    public.write_bytes(plain + b" ada@kitchen\n")
    assert read_public(public) == plain


@pytest.mark.parametrize("name", ["ca.pem", "server.key", "secret"])
def test_nothing_is_written_over(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(HomebodyError, match=f"{name} already exists"):
        make_authority(tmp_path)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [(name, b"mine")]


def test_a_devices_key_is_not_written_over(tmp_path: Path) -> None:
    public = make_device_key(tmp_path)
    before = public.read_bytes()
    with pytest.raises(HomebodyError, match=r"device\.key already exists"):
        make_device_key(tmp_path)
    (tmp_path / "device.key").unlink()
    with pytest.raises(HomebodyError, match=r"device\.pub already exists"):
        make_device_key(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["device.pub"]
    assert public.read_bytes() == before


def test_nothing_half_written_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    real, opened = os.open, []

    def full(path: Path, *more: int) -> int:
        opened.append(path)
        if len(opened) == 3:
            raise OSError(28, "No space left on device")
        return real(path, *more)

    monkeypatch.setattr("os.open", full)
    with pytest.raises(HomebodyError, match="No space left on device"):
        make_authority(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["", "a b", "server:9092", "https://server", "-a.org", "a..b", "x" * 64, "münchen"])
def test_what_is_no_host_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(HomebodyError, match="is not a host"):
        make_authority(tmp_path / "keys", [host])
    assert not (tmp_path / "keys").exists()


def test_only_a_p384_public_key_is_read(tmp_path: Path) -> None:
    openssh = (Encoding.OpenSSH, PublicFormat.OpenSSH)
    wrong = {
        "p256": ec.generate_private_key(ec.SECP256R1()).public_key().public_bytes(*openssh),
        "rsa": rsa.generate_private_key(65537, 2048).public_key().public_bytes(*openssh),
        "ed25519": ed25519.Ed25519PrivateKey.generate().public_key().public_bytes(*openssh),
        "nonsense": b"nonsense",
        "empty": b"",
        "cut": make_device_key(tmp_path / "whole").read_bytes()[:80],
        "binary": bytes(range(256)),
    }
    for name, text in wrong.items():
        (tmp_path / name).write_bytes(text)
        with pytest.raises(HomebodyError, match=f"{name} is no ECDSA P-384 public key"):
            read_public(tmp_path / name)
    with pytest.raises(HomebodyError, match="cannot be read: No such file"):
        read_public(tmp_path / "missing")


def test_a_private_key_is_sent_home(tmp_path: Path) -> None:
    make_device_key(tmp_path)
    pkcs8 = ec.generate_private_key(ec.SECP384R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "other").write_bytes(pkcs8)
    for name in ("device.key", "other"):
        with pytest.raises(HomebodyError, match="must not leave its device"):
            read_public(tmp_path / name)


def test_the_command_writes_and_says_what_to_do(tmp_path: Path) -> None:
    made = CliRunner().invoke(keys, ["init", str(tmp_path / "server"), "--host", "server.lan"])
    assert made.exit_code == 0
    assert "ca.pem to every device" in made.output
    assert (tmp_path / "server" / "secret").exists()
    made = CliRunner().invoke(keys, ["device", str(tmp_path / "device"), "--json"])
    assert json.loads(made.output)["public"] == str(tmp_path / "device" / "device.pub")
    again = CliRunner().invoke(keys, ["device", str(tmp_path / "device")])
    assert isinstance(again.exception, HomebodyError)
