"""`homebody serve`: what an operator may get wrong is said in a sentence, and nothing is half-made."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from tests.serving.conftest import films, made
from typer.testing import CliRunner

from homebody.cli import app
from homebody.errors import HomebodyError
from homebody.federation.service.certificates import make_certificates
from homebody.privacy.queries import Query
from homebody.serving.model import Served
from homebody.serving.operator import init, reload, report
from homebody.serving.settings import FILE, ServiceSettings


def source(seed: int = 0) -> object:
    """In the place of a run's folder."""

    def served(query: Query | None) -> Served:
        return films(seed=seed, query="" if query is None else str(query)).served

    return served


def test_a_service_is_made_reloaded_and_described(tmp_path: Path) -> None:
    folder = tmp_path / "service"
    done = init(folder, source(), ServiceSettings(query="choice:epsilon=5"), hosts=["serve.example.org"])  # type: ignore[arg-type]
    assert (done.items, sorted(path.name for path in (folder / "keys").iterdir())) == (
        300, ["ca.key", "ca.pem", "server.key", "server.pem"],
    )  # fmt: skip
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in folder.rglob("*"))
    again = reload(folder, source(1))  # type: ignore[arg-type]
    assert again.model != done.model
    state = report(folder)
    assert (state["model"], state["models_before"], state["running"]) == (again.model, 1, False)
    shown = CliRunner().invoke(app, ["serve", "status", str(folder)]).stdout
    assert "(not running)" in shown
    assert "queries: choice:epsilon=5" in shown


def test_a_servers_folder_is_taken_for_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, asked = tmp_path / "server", []
    server.mkdir()
    (server / "server.toml").touch()

    def served_model(folder: Path, query: Query | None) -> Served:
        asked.append(folder)
        return films(query=str(query)).served

    monkeypatch.setattr("homebody.federation.server.served.served_model", served_model)
    words = ["init", str(tmp_path / "service"), "--run", str(server), "--query", "choice:epsilon=5", "--no-tls"]
    done = CliRunner().invoke(app, ["serve", *words], catch_exceptions=False)
    assert "300 items" in done.stdout
    assert asked == [server]
    with pytest.raises(HomebodyError, match=r"no such run|holds no run|There is no run"):
        CliRunner().invoke(app, ["serve", "init", str(tmp_path / "b"), "--run", str(tmp_path)], catch_exceptions=False)
    assert not (tmp_path / "b").exists()


def test_certificates_of_ones_own(tmp_path: Path) -> None:
    for name, content in make_certificates().items():
        (tmp_path / name).write_bytes(content)
    given = {"cert": tmp_path / "server.pem", "key": tmp_path / "server.key"}
    init(tmp_path / "service", source(), ServiceSettings(), **given)  # type: ignore[arg-type]
    assert sorted(path.name for path in (tmp_path / "service" / "keys").iterdir()) == ["server.key", "server.pem"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"query": "choise:epsilon=5"}, "There is no kind of query 'choise'; did you mean 'choice'"),
        ({"query": "choice:epsilon=-1"}, "epsilon must be above 0"),
        ({"listen": "0.0.0.0:9447", "tls": False}, "Other machines can reach 0.0.0.0: leave out --no-tls"),
        ({"listen": "localhost"}, "An address to listen on is HOST:PORT, such as 127.0.0.1:9447"),
        ({"rows": 1}, "The service's rows must be at least 2, not 1"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(HomebodyError, match=sentence):
        ServiceSettings(**settings)  # type: ignore[arg-type]


def test_settings_are_read_strictly(tmp_path: Path) -> None:
    made(tmp_path / "service", films())
    file = tmp_path / "service" / FILE
    file.write_text(file.read_text() + "row = 3\n")
    with pytest.raises(HomebodyError, match="There is no setting of a service 'row'; did you mean 'rows'"):
        report(tmp_path / "service")
    with pytest.raises(HomebodyError, match=r"There is no service in .*: make one with `homebody serve init"):
        report(tmp_path)


def test_nothing_is_half_made(tmp_path: Path) -> None:
    def fails(query: Query | None) -> Served:
        raise HomebodyError("There is no such run.")

    with pytest.raises(HomebodyError, match="There is no such run"):
        init(tmp_path / "service", fails, ServiceSettings())
    assert not (tmp_path / "service").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(HomebodyError, match="is there already and not empty: a service gets a folder of its own"):
        init(tmp_path / "other", source(), ServiceSettings())  # type: ignore[arg-type]


def test_commands_beside_a_service(tmp_path: Path) -> None:
    made(tmp_path / "service", films())
    folder, file = str(tmp_path / "service"), tmp_path / "items.jsonl"
    file.write_text(json.dumps({"id": "new", "vector": [1.0] * 16}))

    def typed(*words: str) -> dict[str, object]:
        done = CliRunner().invoke(app, ["serve", *words, "--json"], catch_exceptions=False)
        return dict(json.loads(done.stdout))

    assert typed("items", "add", folder, str(file)) == {"added": 1, "version": 3}
    assert typed("items", "remove", folder, "new", "film-1") == {"removed": 2, "version": 5}
    assert len(str(typed("token", "add", folder, "ann")["token"])) > 40
    assert typed("status", folder)["tokens"] == {"ann": "reader"}
    assert typed("token", "remove", folder, "ann") == {"removed": "ann"}
    with pytest.raises(HomebodyError, match="There is no item 'film-1'"):
        CliRunner().invoke(app, ["serve", "items", "remove", folder, "film-2", "film-1"], catch_exceptions=False)
    file.write_text('{"id": "more", "vector": [1.0]}\n{"id": "cut off')
    with pytest.raises(HomebodyError, match="a JSON object a line: line 2 is not JSON"):
        CliRunner().invoke(app, ["serve", "items", "add", folder, str(file)], catch_exceptions=False)
    assert typed("status", folder)["version"] == 5  # all or none
