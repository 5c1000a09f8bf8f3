"""The wheel a stranger installs: built here, without a network, and run away from the source tree."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def call(*command: str | Path, cwd: Path) -> str:
    """Run a command with nothing of this process's Python path, and return what it printed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> dict[str, list[str]]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        message = Parser().parsestr(archive.read(name).decode())
    return {key: message.get_all(key, []) for key in message}


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    shipped = {n.removeprefix("homebody/") for n in names if n.startswith("homebody/")}
    source = ROOT / "src" / "homebody"
    modules = {p.relative_to(source).as_posix() for p in source.rglob("*.py")}

    papers = {p.relative_to(ROOT).as_posix() for p in (ROOT / "experiments").glob("*/recipe.toml")}

    assert "py.typed" in shipped
    assert papers
    assert papers | {"report/page.css", "report/page.js"} <= shipped
    assert modules <= shipped
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in names)
    assert {n.split("/")[0] for n in names if ".dist-info/" not in n} == {"homebody"}
    assert not [n for n in names if n.endswith((".pyc", ".nbi", ".nbc", ".data", ".dat", ".csv", ".parquet"))]


def test_sdist_holds_what_is_needed_to_build_and_test(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {n.split("/", 1)[1] for n in archive.getnames() if "/" in n}

    assert {
        "pyproject.toml",
        "constraints.txt",
        "Makefile",
        "LICENSE",
        "README.md",
        "src/homebody/py.typed",
        "examples/deploy/compose.yaml",
        "tests/test_packaging.py",
    } <= names
    assert not [n for n in names if n.startswith(("runs/", "data/", ".venv/")) or "__pycache__" in n]


def test_metadata_says_what_is_needed(metadata: dict[str, list[str]]) -> None:
    assert metadata["License-Expression"] == ["Apache-2.0"]
    assert metadata["Requires-Python"] == [">=3.11"]
    assert {"deploy", "serve", "report", "tune", "dev"} <= set(metadata["Provides-Extra"])
    core = [r for r in metadata["Requires-Dist"] if "extra ==" not in r]
    assert any(r.startswith("torch") and "<2.14" in r for r in core)


def test_installed_wheel_runs_on_its_own(wheel: Path, metadata: dict[str, list[str]], tmp_path: Path) -> None:
    home = tmp_path / "a fresh place"
    venv.create(home, with_pip=False, symlinks=os.name != "nt")
    paths = sysconfig.get_paths("venv", vars={"base": str(home), "platbase": str(home), "installed_base": str(home)})
    scripts, site = Path(paths["scripts"]), Path(paths["purelib"])
    python = scripts / Path(sys.executable).name
    call(
        *(sys.executable, "-m", "pip", "--python", python, "install"),
        *("--quiet", "--no-deps", "--no-index", wheel),
        cwd=tmp_path,
    )
    # Lend it this environment's dependencies. A nested .pth is not followed, so the editable
    # install of the source tree stays out of sight.
    lent = dict.fromkeys(sysconfig.get_path(key) for key in ("purelib", "platlib"))
    (site / "lent.pth").write_text("\n".join(lent), encoding="utf-8")

    where = call(python, "-c", "import homebody; print(homebody.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(site)

    assert "pfedrec: " in call(scripts / "homebody", "reproduce", cwd=tmp_path)
    (version,) = metadata["Version"]
    assert version in call(scripts / "homebody", "--version", cwd=tmp_path).split()
