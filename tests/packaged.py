"""A package of a method of one's own, installed into a folder as pip would."""

from __future__ import annotations

from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "docs" / "examples" / "biased_mf.py"


def install(site: Path, version: str, *, package: str = "my-package", method: str = "biased-mf") -> Path:
    """As `pip install --target` does it: the modules, and the metadata that names the method."""
    module = package.replace("-", "_")
    (site / module).mkdir(parents=True)
    (site / module / "__init__.py").write_text(f'"""Version {version}."""\n')
    (site / module / "biased_mf.py").write_text(EXAMPLE.read_text())
    about = site / f"{module}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (about / "entry_points.txt").write_text(f"[homebody.methods]\n{method} = {module}.biased_mf:BiasedMF\n")
    return site
