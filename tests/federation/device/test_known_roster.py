"""The roster of a device: the newest that was accepted stays, whatever comes after it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from homebody.errors import HomebodyError
from homebody.federation.device.home import Home
from homebody.federation.secure_sum.identities import identity_of
from homebody.federation.secure_sum.roster import BadRoster, Roster

SIGNER, OTHER, *KEYS = (ec.derive_private_key(number + 2, ec.SECP384R1()) for number in range(6))
DEVICES = [identity_of(key.public_key()) for key in KEYS]


def text(key: ec.EllipticCurvePrivateKey) -> str:
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.create(tmp_path / "device", server="127.0.0.1:9092", roster_key=text(SIGNER), fewest=4)


def test_settings_are_kept(home: Home) -> None:
    home.close()
    with Home(home.path) as again:
        assert (again.settings.fewest, again.settings.roster_key) == (4, text(SIGNER))
        assert again.roster.required


def test_without_a_key_the_server_is_believed(tmp_path: Path) -> None:
    with Home.create(tmp_path / "device", server="127.0.0.1:9092") as home:
        assert (home.settings.fewest, home.roster.required, home.roster.known("run")) == (3, False, None)
        with pytest.raises(HomebodyError, match="has no key to check rosters with"):
            home.roster.accept(Roster.of(1, DEVICES).signed(SIGNER))
        assert not (home.path / "roster.signed").exists()


def test_a_home_of_an_earlier_version_opens_and_believes_the_server(home: Home) -> None:
    home.close()
    with sqlite3.connect(home.path / "home.sqlite") as database:
        database.execute("DELETE FROM setting WHERE name IN ('fewest', 'roster_key')")
    database.close()
    with Home(home.path) as again:
        assert (again.settings.fewest, again.roster.known("run")) == (3, None)


def test_with_a_key_and_no_roster_it_takes_no_part(home: Home) -> None:
    with pytest.raises(BadRoster, match="among devices of a signed roster only, and has none yet"):
        home.roster.known("run")


def test_the_newest_roster_stays(home: Home) -> None:
    first, second = Roster.of(5, DEVICES[:3]), Roster.of(6, DEVICES)
    assert home.roster.accept(first.signed(SIGNER)) == first
    assert home.roster.known("run") == first.devices
    home.roster.accept(second.signed(SIGNER))
    with pytest.raises(BadRoster, match="Roster 5 is older than roster 6, which this device has accepted"):
        home.roster.accept(first.signed(SIGNER))
    with pytest.raises(BadRoster, match="another roster of the number 6"):
        home.roster.accept(Roster.of(6, DEVICES[:3]).signed(SIGNER))
    home.close()
    with Home(home.path) as again:
        assert again.roster.known("run") == second.devices
        assert again.roster.accept(second.signed(SIGNER)) == second  # signed again, it is the same


@pytest.mark.parametrize(
    "content",
    [
        Roster.of(9, DEVICES).signed(OTHER),
        Roster.of(9, DEVICES).content,
        Roster.of(9, DEVICES).signed(SIGNER)[:-1],
        b"",
    ],
    ids=["another signer", "unsigned", "cut", "empty"],
)
def test_what_is_refused_changes_nothing(home: Home, content: bytes) -> None:
    home.roster.accept(Roster.of(5, DEVICES[:3]).signed(SIGNER))
    before = (home.path / "roster.signed").read_bytes()
    with pytest.raises(BadRoster):
        home.roster.accept(content)
    assert (home.path / "roster.signed").read_bytes() == before
    assert home.roster.known("run") == frozenset(DEVICES[:3])


def test_a_roster_of_one_run_is_for_no_other(home: Home) -> None:
    home.roster.accept(Roster.of(1, DEVICES, "spring").signed(SIGNER))
    assert home.roster.known("spring") == frozenset(DEVICES)
    with pytest.raises(BadRoster, match="is for another run"):
        home.roster.known("autumn")


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: content[:60] + b"x" + content[61:]])
def test_a_damaged_file_is_refused_and_not_taken_for_none(home: Home, damage: object) -> None:
    home.roster.accept(Roster.of(5, DEVICES).signed(SIGNER))
    file = home.path / "roster.signed"
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    for read in (lambda: home.roster.known("run"), lambda: home.roster.accept(Roster.of(4, DEVICES).signed(SIGNER))):
        with pytest.raises(HomebodyError, match="is damaged: remove it, and the server sends it again"):
            read()


def test_under_a_new_key_the_old_rosters_count_no_more(home: Home) -> None:
    home.roster.accept(Roster.of(5, DEVICES).signed(SIGNER))
    home.configure(roster_key=text(OTHER))
    assert home.roster.current() is None
    with pytest.raises(BadRoster, match="not signed by the key"):
        home.roster.accept(Roster.of(6, DEVICES).signed(SIGNER))
    home.roster.accept(Roster.of(1, DEVICES[:3]).signed(OTHER))
    assert home.roster.known("run") == frozenset(DEVICES[:3])


def test_a_full_disk_leaves_the_roster_as_it_was(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.roster.accept(Roster.of(5, DEVICES[:3]).signed(SIGNER))

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    newer = Roster.of(6, DEVICES).signed(SIGNER)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(HomebodyError, match="No space left on device"):
            home.roster.accept(newer)
    assert home.roster.known("run") == frozenset(DEVICES[:3])
    assert not [file.name for file in home.path.iterdir() if "partial" in file.name]


@pytest.mark.parametrize("fewest", [2, 0, -1, 3.0, "5", True, 1 << 20])
def test_a_device_takes_part_among_three_or_more(tmp_path: Path, fewest: object) -> None:
    with pytest.raises(HomebodyError, match="among 3 or more"):
        Home.create(tmp_path / "device", server="127.0.0.1:9092", fewest=fewest)  # type: ignore[arg-type]
    assert not (tmp_path / "device").exists()
