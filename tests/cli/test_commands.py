"""The command as a whole, and `methods`: light, and honest about itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import homebody
from homebody.cli import app, main
from homebody.methods import METHODS, find
from homebody.settings import params

HEAVY = {"torch", "numba", "numpy", "polars", "safetensors", "sqlite3", "scipy", "dp_accounting"}


def alone(*arguments: str) -> tuple[str, set[str]]:
    """What the command prints in a process of its own, and which modules that took."""
    script = (
        "import sys; from homebody.cli import main; sys.argv = ['homebody', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    code = end.code\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, set(done.stderr.split())


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["homebody", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [[], ["run"], ["compare"], ["methods"], ["show"], ["recommend"], ["data"], ["account"], ["inspect"], ["audit"]],
)
def test_help_loads_nothing_heavy(command: list[str]) -> None:
    text, modules = alone(*command, "--help")
    assert "Usage:" in text
    assert not modules & HEAVY


def test_an_operator_lets_a_device_in_without_loading_what_trains(tmp_path: Path) -> None:
    for words in (["server", "init", "server", "--method", "fedmf"], ["keys", "device", "device"]):
        place = str(tmp_path / words[2])
        assert CliRunner().invoke(app, [*words[:2], place, *words[3:]], catch_exceptions=False).exit_code == 0
    server, key = str(tmp_path / "server"), str(tmp_path / "device" / "device.pub")
    for words in (["keys", "add", server, key, "--name", "hall"], ["keys", "remove", server, "hall"]):
        text, modules = alone(*words)
        assert "hall" in text
        assert not modules & (HEAVY - {"sqlite3", "numpy"})  # the database, and what Flower imports


def test_a_roster_is_listed_and_signed_without_loading_what_trains(tmp_path: Path) -> None:
    for words in (["signer", "signer"], *(["device", name] for name in ("a", "b", "c"))):
        made = CliRunner().invoke(app, ["keys", words[0], str(tmp_path / words[1])], catch_exceptions=False)
        assert made.exit_code == 0
    keys = [str(tmp_path / name / "device.pub") for name in ("a", "b", "c")]
    listed, signed = str(tmp_path / "roster.bin"), str(tmp_path / "roster.signed")
    signer = str(tmp_path / "signer" / "signer.key")
    for words in (["roster", *keys, "--out", listed], ["sign-roster", listed, "--key", signer, "--out", signed]):
        text, modules = alone("keys", *words)
        assert "3 devices" in text
        assert not modules & HEAVY


def test_help_names_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(monkeypatch, capsys, "--help")
    for name in ("run", "compare", "methods", "show", "recommend", "data", "account", "inspect", "audit"):
        assert f" {name} " in text


def test_version() -> None:
    text, modules = alone("--version")
    assert text == f"homebody {homebody.__version__}\n"
    assert not modules & HEAVY


def test_methods_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = {row["name"]: row for row in json.loads(printed(monkeypatch, capsys, "methods", "--json"))["methods"]}
    assert set(found) == set(METHODS) >= {"fedials", "fedmf", "ials", "pfedrec", "popularity"}
    central = {name for name, row in found.items() if row["kind"] == "centralised"}
    assert central == {"dssm", "ials", "mf", "ncf", "news-cen", "popularity", "privrec-cen", "random"}
    assert all(row["title"] for row in found.values())
    assert "Zhang et al." in found["pfedrec"]["paper"]
    for name, row in found.items():
        fields = {field["name"]: field["default"] for field in row["fields"]}
        assert fields == {spec.name: spec.default for spec in params(find(name))}
        assert all(field["doc"] for field in row["fields"])


def test_methods_for_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(monkeypatch, capsys, "methods")
    for name in METHODS:
        assert f" {name} " in text
    assert "homebody methods NAME" in text
    assert "learning_rate" not in text
    assert len(text.splitlines()) <= len(METHODS) + 15


def test_no_title_of_a_method_is_shortened(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["homebody", "methods"])
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit):
        main()
    text = " ".join(capsys.readouterr().out.split())
    for name in METHODS:
        assert f"{name} {find(name).about.title}" in text


def test_one_method_for_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(monkeypatch, capsys, "methods", "fedmf")
    assert "fedmf (federated)" in text
    assert "Chai et al." in text
    (line,) = [line for line in text.splitlines() if "learning_rate" in line]
    assert "0.1" in line
    assert "0 …" in line
    one = json.loads(printed(monkeypatch, capsys, "methods", "fedmf", "--json"))["methods"]
    assert [row["name"] for row in one] == ["fedmf"]


def test_a_method_shows_its_channel_and_its_choices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    text = printed(monkeypatch, capsys, "methods", "fmf-ldp")
    assert "its channel, unless stages are given: --stage one-bit:epsilon=2.5,k=100 --stage shuffle\n" in text
    (line,) = [line for line in text.splitlines() if " decoder " in line]
    assert "improved or published" in line
    assert "1:100:log" in printed(monkeypatch, capsys, "methods", "privrec")
    (one,) = json.loads(printed(monkeypatch, capsys, "methods", "fmf-ldp", "--json"))["methods"]
    assert one["channel"] == ["one-bit:epsilon=2.5,k=100", "shuffle"]
    for name in ("fedmf", "ials"):
        assert "its channel" not in printed(monkeypatch, capsys, "methods", name)


@pytest.mark.parametrize(
    "words", [[], ["data"], ["account"], ["server"], ["client", "views"]], ids=lambda words: " ".join(words) or "none"
)
def test_a_group_without_a_command_shows_its_help_and_fails(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["homebody", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert "Commands" in shown.out + shown.err


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["comapre"], "There is no command 'comapre'; did you mean 'compare'?"),
        (["server", "statsu"], "There is no command 'statsu'; did you mean 'status'?"),
        (["client", "views", "lst"], "There is no command 'lst'; did you mean 'list'?"),
        (["account", "gausian"], "There is no command 'gausian'; did you mean 'gaussian'?"),
        (["status"], "There is no command 'status'; did you mean 'server status'?"),
        (["xyzzy"], "There is no command 'xyzzy'."),
    ],
)
def test_a_misspelt_command_is_suggested_once(typed: list[str], said: str) -> None:
    done = CliRunner().invoke(app, typed, env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert said in done.output
    assert done.output.lower().count("did you mean") == said.count("did you mean")
