"""Methods of installed packages: found by metadata, told apart by their code, and imported by nobody who only asks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.packaged import install
from typer.testing import CliRunner

from homebody.cli import app
from homebody.errors import HomebodyError
from homebody.methods import find
from homebody.methods.packages import PackagedMethod, packaged, packaged_methods


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """What was imported in a test is not there in the next."""
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("my_package", "other_package")]:
        del sys.modules[name]


def test_what_is_installed_is_found_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert packaged("biased-mf") is None
    monkeypatch.syspath_prepend(install(tmp_path / "site", "1.0"))
    known = packaged("biased-mf")
    assert known is not None
    assert (known.package, known.version, len(known.fingerprint)) == ("my-package", "1.0", 32)
    assert str(known) == f"my-package 1.0 (code {known.fingerprint[:12]})"
    assert PackagedMethod.of_code("biased-mf", known.code) == known
    assert packaged_methods() == ["biased-mf"]
    assert "my_package" not in sys.modules
    assert find("biased-mf").__module__ == "my_package.biased_mf"
    with pytest.raises(HomebodyError, match="did you mean 'biased-mf'"):
        find("biased-fm")


def test_other_code_has_another_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prints = set()
    for number, change in enumerate(("", "# one more line\n")):
        site = install(tmp_path / f"site{number}", "1.0")
        (site / "my_package" / "helper.py").write_text(change)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(site)
            known = packaged("biased-mf")
            assert known is not None
            prints.add(known.fingerprint)
            # What was imported stays what it was.
            (site / "my_package" / "helper.py").write_text("# changed since\n")
            assert packaged("biased-mf") == known
    assert len(prints) == 2


def test_two_packages_with_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install(tmp_path / "one", "1.0"))
    monkeypatch.syspath_prepend(install(tmp_path / "two", "2.0", package="other-package"))
    for ask in (find, packaged):
        with pytest.raises(HomebodyError, match=r"Two packages bring .* 'biased-mf', my-package and other-package"):
            ask("biased-mf")


def test_the_command_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = install(tmp_path / "site", "1.0")
    monkeypatch.syspath_prepend(site)
    monkeypatch.syspath_prepend(install(tmp_path / "other", "2.0", package="other-package", method="broken"))
    (tmp_path / "other" / "other_package" / "biased_mf.py").write_text("import nothing_of_that_name\n")

    def said(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["methods", *arguments], env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output
        return done.output

    listed = said()
    assert "my-package 1.0: " in listed
    assert "The method broken (other_package.biased_mf:BiasedMF) cannot be imported" in listed
    known = packaged("biased-mf")
    assert known is not None
    assert f"from the package my-package 1.0, code {known.fingerprint}" in said("biased-mf")
    entries = {entry["name"]: entry for entry in json.loads(said("--json"))["methods"]}
    assert (entries["biased-mf"]["package"], entries["biased-mf"]["code"]) == ("my-package 1.0", known.fingerprint)
    assert "package" not in entries["fedmf"]
    assert entries["broken"]["kind"] == "cannot be used"
