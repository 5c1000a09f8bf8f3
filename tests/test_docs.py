"""What the documentation says is so: its code runs, its commands exist, its links lead somewhere."""

from __future__ import annotations

import ast
import os
import pkgutil
import re
import shlex
import subprocess
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import pytest
import typer
from nbclient import NotebookClient
from tests.warm import Nest
from typer.testing import CliRunner

from homebody import __version__
from homebody.cli import app
from homebody.core import Method
from homebody.data.splits import PROTOCOLS
from homebody.methods import METHODS, find, trust
from homebody.recipe import parse_fields
from homebody.testing import MethodContract

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLE = ROOT / "docs" / "examples" / "biased_mf.py"
NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"
PRIVACY_NOTEBOOK = ROOT / "docs" / "privacy-engineer.ipynb"
NOTEBOOKS = [NOTEBOOK, PRIVACY_NOTEBOOK]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def commands(page: Path) -> Iterator[str]:
    """Every `homebody …` of a page, in its blocks and in its sentences."""
    for code in (*blocks(page, "bash"), *blocks(page, "console")):
        for line in code.replace("\\\n", " ").splitlines():
            command = line.removeprefix("$ ")
            if command.startswith("homebody "):
                # What is the shell's is not the command's.
                yield re.sub(r"( \d?>>? ?\S+)?( &)?$", "", command)
    yield from re.findall(r"`(homebody [^`]+)`", prose(page))


def walks() -> list[str]:
    """Every function that a walk of the architecture names."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("\n## Walks\n")[2].partition("\n## ")[0]
    steps = [line for line in section.splitlines() if re.match(r"\d+\. ", line)]
    return [name for step in steps for name in re.findall(r"`(homebody\.[\w.]+)`", step)]


@pytest.mark.parametrize("name", walks())
def test_the_functions_of_the_walks_exist(name: str) -> None:
    assert callable(pkgutil.resolve_name(name))


def test_the_architecture_has_walks() -> None:
    assert len(walks()) >= 17


def test_files_that_the_architecture_and_the_glossary_name_exist() -> None:
    source = ROOT / "src" / "homebody"
    layout = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("\n## Layout\n")[2]
    tree = layout.partition("```text")[2].partition("```")[0]
    files = {path.name for path in source.rglob("*.py")}
    assert sorted(set(re.findall(r"\b(\w+\.py)\b", tree)) - files) == []
    rooms = {path.name for path in source.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert sorted(room for room in rooms if f"  {room}/" not in tree) == []
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)`", glossary)
    assert len(named) > 20
    assert [name for name in named if not (source / name).exists()] == []


COMMANDS = sorted({(name_of(page), command) for page in PAGES for command in commands(page)})
ABRIDGED = [pair for pair in COMMANDS if "…" in pair[1] or "--help" in pair[1].split() or len(pair[1].split()) == 2]
WHOLE = [pair for pair in COMMANDS if pair not in ABRIDGED]


tool_of = cache(typer.main.get_command)


def contexts(command: str) -> Iterator[Any]:
    """The command line, parsed as far as `homebody` itself would before it starts to work."""
    tool, arguments = tool_of(app), shlex.split(command, comments=True)[1:]
    context = tool.make_context("homebody", arguments)
    while True:
        yield context
        if not hasattr(context.command, "resolve_command"):
            return
        rest = [*context._protected_args, *context.args]
        if not rest and context.command.invoke_without_command:
            return
        name, inner, rest = context.command.resolve_command(context, rest)
        context = inner.make_context(name, rest, parent=context)


class TestCommands:
    @pytest.mark.parametrize(("page", "command"), WHOLE)
    def test_every_command_parses(self, page: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        *_, last = contexts(command)
        given = last.params
        asked = given.get("protocol", "strict")
        assert set([asked] if isinstance(asked, str) else asked) <= set(PROTOCOLS)
        if command.split()[1] in {"run", "compare"}:
            named = given.get("methods") or [given["method"]]
            for method in set(named) - {None, "RUN", "ANOTHER-RUN", "latest"}:
                parse_fields(trust(method), given.get("settings") or [])

    @pytest.mark.parametrize(("page", "command"), ABRIDGED)
    def test_every_abridged_command_exists(self, page: str, command: str) -> None:
        words = [word for word in shlex.split(command)[1:] if word != "…"]
        tool: Any = tool_of(app)
        while words and words[0] in getattr(tool, "commands", {}):
            tool = tool.commands[words.pop(0)]
        assert not words or words[0].startswith("-")
        known = {option for parameter in tool.params for option in parameter.opts} | {"--help"}
        assert {word for word in words if word.startswith("-")} <= known

    def test_there_are_commands_to_check(self) -> None:
        assert len(COMMANDS) > 20
        with pytest.raises(Exception, match="No such option"):
            list(contexts("homebody run fedmf --dta ml-100k"))

    def test_every_make_target_exists(self) -> None:
        targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
        for page in PAGES:
            text = page.read_text(encoding="utf-8")
            named = re.findall(r"^make ([a-z]+)|`make ([a-z]+)", text, re.MULTILINE)
            assert {one or other for one, other in named} <= targets, name_of(page)

    def test_every_method_is_described(self) -> None:
        described = re.findall(
            r"^## ([\w-]+)$", (ROOT / "docs" / "methods.md").read_text(encoding="utf-8"), re.MULTILINE
        )
        assert sorted(described) == sorted(METHODS)

    def test_the_rounds_of_methods_are_those_of_the_table(self) -> None:
        text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
        told = dict(re.findall(r"^\| `([\w-]+)` \| [a-z][^|]* \| (\d*) ?\|$", text, re.MULTILINE))
        assert sorted(told) == sorted(METHODS)
        assert {name: int(rounds) for name, rounds in told.items() if rounds} == {
            name: find(name).about.rounds for name, rounds in told.items() if rounds
        }


class TestPython:
    def test_the_readme_runs_as_it_stands(
        self, real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("HOMEBODY_DATA", str(real_data))
        monkeypatch.chdir(tmp_path)
        (code,), (printed,) = blocks(ROOT / "README.md", "python"), blocks(ROOT / "README.md", "text")
        assert len([line for line in code.splitlines() if line]) <= 10
        exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
        # Scores may round differently on another machine; titles and ε may not.
        assert _words(capsys.readouterr().out) == _words(printed)

    @pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "docs"], ids=name_of)
    def test_code_in_the_docs_runs(self, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """One page's blocks follow one another; a sketch, which says so, has only to be Python."""
        monkeypatch.chdir(tmp_path)
        names: dict[str, Any] = {"__name__": "__main__"}
        for code in blocks(page, "python"):
            tree = ast.parse(code)
            if not code.startswith("# sketch\n"):
                exec(compile(tree, name_of(page), "exec"), names)

    def test_a_file_of_ones_own_by_copy_and_paste(self, tmp_path: Path, warm: Nest) -> None:
        (script,) = (code for code in blocks(ROOT / "docs" / "data.md", "bash") if code.startswith("cat > loans.csv"))
        path = f"{warm.programs}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-e", "-c", script],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert "17 (0 repeat an item)" in done.stdout
        assert "1 of 5 users has fewer than 3 interactions" in done.stdout


def _words(text: str) -> list[str]:
    return re.sub(r"\d+\.\d+", "", text).split()


class TestExample(MethodContract):
    def method(self) -> Method:
        found = find(trust(f"{EXAMPLE}:BiasedMF"))
        assert issubclass(found, Method)
        return found(factors=4)

    def test_it_is_the_one_in_contributing(self) -> None:
        first, *_ = blocks(ROOT / "CONTRIBUTING.md", "python")
        assert first == EXAMPLE.read_text(encoding="utf-8")
        assert len(first.splitlines()) <= 60

    def test_its_contract_in_contributing_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        (contract,) = (code for code in blocks(ROOT / "CONTRIBUTING.md", "python") if "(MethodContract)" in code)
        names: dict[str, Any] = {"__name__": "test_biased_mf"}
        exec(compile(contract, "CONTRIBUTING.md", "exec"), names)
        names["TestBiasedMF"]().test_a_client_is_the_same_alone_and_in_a_padded_cohort()

    def test_the_stage_in_contributing_runs(self, capsys: pytest.CaptureFixture[str]) -> None:
        (stage,) = (code for code in blocks(ROOT / "CONTRIBUTING.md", "python") if "(Stage)" in code)
        exec(compile(stage, "CONTRIBUTING.md", "exec"), {"__name__": "signs"})
        assert capsys.readouterr().out == "Signs\n"

    def test_it_runs_from_the_command_line(self, tmp_path: Path) -> None:
        command = ["run", f"{EXAMPLE}:BiasedMF", "--data", "synthetic", "--out", str(tmp_path), "--json"]
        done = CliRunner().invoke(app, [*command, "--rounds", "2", "--set", "factors=4"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert ast.literal_eval(done.stdout.replace("null", "None"))["rounds"] == 2


class TestNotebook:
    def test_it_is_short_and_imports_homebody_and_pandas_alone(self) -> None:
        cells = nbformat.read(NOTEBOOK, as_version=4).cells
        assert len(cells) <= 12
        code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
        imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
        assert [ast.unparse(node) for node in imports] == ["import pandas as pd", "import homebody as hb"]
        steps = ("pd.DataFrame", "hb.fit", "hb.compare", ".plot()", "budget=", ".save(", "hb.open")
        assert [step for step in steps if step not in code] == []

    @pytest.mark.processes
    def test_it_runs_and_prints_what_it_is_stored_with(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """In a fresh kernel, without data and without a network."""
        monkeypatch.delenv("HOMEBODY_DATA", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("HOME", str(tmp_path))
        printed = _execute(tmp_path)
        assert _words(printed) == _words(_printed(nbformat.read(NOTEBOOK, as_version=4)))
        assert printed.rstrip().endswith("True"), "the model that was opened ranks as the one that was saved"
        (plain, popular), (private,) = (
            [float(figure) for figure in re.findall(r"(?:HR@10|popularity) (0\.\d+)", line)]
            for line in printed.splitlines()
            if line.startswith("HR@10")
        )
        assert plain > private > popular
        assert not (tmp_path / "shop-model" / "split" / "users.parquet").exists()

    @pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
    def test_it_names_no_machine(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/(home|root|tmp|work|Users)/", text)
        assert '"output_type": "error"' not in text


class TestPrivacyNotebook:
    def test_it_is_short_and_imports_homebody_alone(self) -> None:
        cells = nbformat.read(PRIVACY_NOTEBOOK, as_version=4).cells
        assert len(cells) <= 12
        code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
        imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
        assert [ast.unparse(node) for node in imports] == ["import homebody as hb"]

    @pytest.mark.processes
    def test_it_runs_and_prints_what_it_is_stored_with(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HOMEBODY_DATA", raising=False)
        printed = _execute(tmp_path, PRIVACY_NOTEBOOK)
        assert _words(printed) == _words(_printed(nbformat.read(PRIVACY_NOTEBOOK, as_version=4)))
        bounds = re.findall(r"(\w+): ε at least (\S+), certified (\S+)", printed)
        assert [who for who, *_ in bounds] == ["server", "clients"]
        assert all(0 < float(least) <= float(certified) <= 2 for _, least, certified in bounds)
        ours, popular = map(float, re.findall(r"HR@10 (\S+), popularity (\S+);", printed)[0])
        assert ours > popular
        assert {path.name for path in (tmp_path / "statement").iterdir()} == {"statement.json", "statement.html"}


def _execute(folder: Path, path: Path = NOTEBOOK) -> str:
    """Run a notebook in this environment's own kernel; what it printed."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, kernel_name="python3", timeout=300, resources={"metadata": {"path": str(folder)}})
    with warnings.catch_warnings():
        # The notebook is under test, not the libraries that run it.
        warnings.filterwarnings("ignore", module=r"(jupyter_client|jupyter_core|nbclient|zmq)\b")
        client.execute()
    return _printed(notebook)


def _printed(notebook: Any) -> str:
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", []))
    return "".join(output["text"] for output in outputs if output.get("name") == "stdout")


class TestLinks:
    @pytest.mark.parametrize("page", PAGES, ids=name_of)
    def test_internal_links_lead_somewhere(self, page: Path) -> None:
        _check_links(page, prose(page))

    @pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
    def test_the_notebooks_links_do_too(self, path: Path) -> None:
        cells = nbformat.read(path, as_version=4).cells
        _check_links(path, "\n".join(cell.source for cell in cells if cell.cell_type == "markdown"))

    def test_every_page_is_in_the_index(self) -> None:
        index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
        pages = {path.name for path in (*(ROOT / "docs").glob("*.md"), *NOTEBOOKS)} - {"index.md"}
        assert {name for name in pages if f"({name})" not in index} == set()


def _check_links(page: Path, text: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("https://", "http://")):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{name_of(page)} links to {link}"
        assert path.is_relative_to(ROOT)
        if anchor:
            assert anchor in _anchors(path), f"{name_of(page)} links to {link}"


def _anchors(page: Path) -> set[str]:
    """Headings as GitHub makes anchors of them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


class TestChangelog:
    def test_it_has_what_is_unreleased_and_the_version(self) -> None:
        text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        unreleased = text.partition("## [Unreleased]")[2]
        assert re.search(r"^### (Added|Changed|Deprecated|Removed|Fixed|Security)$", unreleased, re.MULTILINE)
        assert re.search(rf"\b{re.escape(__version__)}\b", text)

    @pytest.mark.parametrize("page", PAGES, ids=name_of)
    def test_no_page_names_a_machine(self, page: Path) -> None:
        assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users)/", page.read_text(encoding="utf-8"))
