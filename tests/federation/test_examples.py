"""The examples of running it: what they call exists, and they name no machine and no package index."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from homebody.cli import app
from homebody.federation.flower.superlink import MOST_CONNECTIONS
from homebody.federation.server.plan import ServerPlan

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "deploy"
FILES = sorted(path for path in FOLDER.iterdir() if path.is_file())
UNITS = sorted(FOLDER.glob("*.service"))


tool_of = cache(typer.main.get_command)


def parses(words: list[str]) -> str:
    """Read a command line as `homebody` itself would; the last command's name."""
    context: Any = tool_of(app).make_context("homebody", list(words))
    while hasattr(context.command, "resolve_command"):
        name, inner, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
        context = inner.make_context(name, rest, parent=context)
    return f"{context.parent.info_name} {context.info_name}"


def unit(path: Path) -> dict[str, dict[str, list[str]]]:
    """A unit file by section and name; a name may stand several times."""
    found: dict[str, dict[str, list[str]]] = {}
    section = ""
    for line in filter(None, path.read_text(encoding="utf-8").splitlines()):
        if line.startswith("#"):
            continue
        if header := re.fullmatch(r"\[(\w+)\]", line):
            section = header[1]
            continue
        name, _, value = line.partition("=")
        found.setdefault(section, {}).setdefault(name, []).append(value)
    return found


def services() -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))["services"]


def in_the_script() -> Iterator[tuple[str, list[str]]]:
    """What setup.sh has each service run with homebody."""
    text = (FOLDER / "setup.sh").read_text(encoding="utf-8").replace("\\\n", " ")
    text = re.sub(r"\$\(\(.*?\)\)", "0", text).replace("$n", "0")
    for line in text.splitlines():
        words = shlex.split(line.strip(), comments=True)
        if words[:1] == ["once"] and words[1].startswith(("server", "device")):
            yield words[1], words[2:]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_starts_what_its_name_says_and_gives_up_on_exit_code_2(path: Path) -> None:
    service = unit(path)["Service"]
    (command,) = service["ExecStart"]
    program, *words = shlex.split(command)
    what = path.stem.removeprefix("homebody-").removesuffix("@")
    assert Path(program).name == "homebody"
    assert parses(words) == f"{what} start"
    assert service["User"] == service["Group"] == service["StateDirectory"] == [path.stem.replace("@", "-%i")]
    assert service["StateDirectoryMode"] == ["0700"]
    assert words[-1].startswith(f"%S/{service['StateDirectory'][0]}/")
    assert service["RestartPreventExitStatus"] == ["2"]
    # Kernels are compiled while it runs.
    assert "MemoryDenyWriteExecute" not in service
    assert service["NoNewPrivileges"] == service["ProtectHome"] == ["yes"]
    assert service["CapabilityBoundingSet"] == [""]
    assert service["ProtectSystem"] == ["strict"]


OWN = {"User", "Group", "StateDirectory", "CacheDirectory", "EnvironmentFile", "Environment", "ExecStart"}
OWN |= {"RestartSec", "KillMode", "TimeoutStopSec", "Nice", "LimitNOFILE", "RuntimeDirectory", "RuntimeDirectoryMode"}
"""What units differ in, beside the network that an app has not."""


def hardening(name: str) -> dict[str, list[str]]:
    service = unit(FOLDER / f"homebody-{name}.service")["Service"]
    return {key: value for key, value in service.items() if key not in OWN}


def test_all_units_are_hardened_alike() -> None:
    assert len(UNITS) == 4
    assert hardening("server") == hardening("client") == hardening("serve")
    alone = {"RestrictAddressFamilies": ["AF_UNIX"], "PrivateNetwork": ["yes"], "IPAddressDeny": ["any"]}
    assert hardening("view@") == {**hardening("client"), **alone}


def test_an_app_reaches_the_socket_that_its_device_listens_on() -> None:
    """The folder of a device is closed to apps, so its socket lies elsewhere; an invitation names it."""
    client = unit(FOLDER / "homebody-client.service")["Service"]
    words = shlex.split(client["ExecStart"][0])
    where = words[words.index("--socket") + 1]
    assert where.startswith(f"%t/{client['RuntimeDirectory'][0]}/")
    assert client["RuntimeDirectoryMode"] == ["0755"]
    text = (FOLDER / "homebody-view@.service").read_text(encoding="utf-8")
    assert f"--socket {where.replace('%t', '/run')} " in text
    assert "PrivateUsers=" not in text, "the device would see another user than the app's"


def test_what_the_unit_of_an_app_asks_for_first_are_commands() -> None:
    text = (FOLDER / "homebody-view@.service").read_text(encoding="utf-8").replace(" \\\n#", " ")
    commands = [line.partition("/homebody ")[2] for line in text.splitlines() if line.startswith("#   sudo")]
    assert [parses(shlex.split(command)) for command in commands] == ["views add", "view init", "view import"]


def test_the_server_may_open_as_many_files_as_its_door_holds_connections() -> None:
    wanted = MOST_CONNECTIONS + 256
    (unit_,) = (unit(path)["Service"] for path in UNITS if path.stem == "homebody-server")
    assert int(unit_["LimitNOFILE"][0]) >= wanted
    assert services()["server"]["ulimits"]["nofile"] >= wanted
    assert all(unit(path)["Service"]["LimitNOFILE"] for path in UNITS)


def test_the_compose_file_starts_a_server_and_four_devices() -> None:
    found = services()
    assert sorted(found) == ["device0", "device1", "device2", "device3", "server"]
    for name, service in found.items():
        assert parses(service["command"]) == ("server start" if name == "server" else "client start")
        assert service["volumes"] == [f"{name}:/state"]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "ports" not in service
    context = (FOLDER / "compose.yaml").parent / found["server"]["build"]["context"]
    assert (context / found["server"]["build"]["dockerfile"]).samefile(FOLDER / "Dockerfile")


def test_setup_makes_what_the_compose_file_starts() -> None:
    found = services()
    made = [(service, parses(words), words) for service, words in in_the_script()]
    assert [name for _, name, _ in made] == [
        "server init",
        "data export",
        "client init",
        "client import",
        "keys add",
    ]
    folders = {name.split()[0]: words[2] for _, name, words in made if name.endswith("init")}
    assert found["server"]["command"][-1] == folders["server"]
    assert found["device0"]["command"][-1] == folders["client"]
    server = next(words for _, name, words in made if name == "server init")
    client = next(words for _, name, words in made if name == "client init")
    host, _, port = client[client.index("--server") + 1].partition(":")
    assert host in found
    assert host == server[server.index("--host") + 1]
    assert server[server.index("--listen") + 1].endswith(f":{port}")


def test_the_server_that_setup_asks_for_can_be_made(tmp_path: Path) -> None:
    (words,) = (words for _, words in in_the_script() if words[:2] == ["server", "init"])
    words[words.index("--items") + 1] = "synthetic:users=9,items=20,mean=6"
    words[2] = str(tmp_path / "server")
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert ServerPlan.read(tmp_path / "server").host == "0.0.0.0"


def test_the_image_copies_what_is_there() -> None:
    root = FOLDER.parents[1]
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for word in line.split()]
    assert {"pyproject.toml", "src", "constraints.txt"} <= set(copied)
    assert all((root / word).exists() for word in copied)
    assert re.search(r"^USER (?!root)\w+$", text, re.MULTILINE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_names_no_machine_and_no_index(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.])/(home|root|work|Users)/", text)
    assert not re.search(r"index-url|--extra-index|https?://(?!127\.0\.0\.1)", text)
