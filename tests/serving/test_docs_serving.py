"""docs/serving.md, copied and pasted: a service of films and one of news answer every curl of the page."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.pages import DOCS, Section
from tests.warm import Nest

from homebody.serving.openapi import ENDPOINTS
from homebody.serving.rows import Part

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="the page is pasted with curl")
PAGE = (DOCS / "serving.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Sections(Section):
    """Some headings as one."""

    more: tuple[str, ...] = ()
    before: str = ""

    def blocks(self, language: str) -> list[str]:
        named = [Section(self.page, heading).blocks(language) for heading in (self.heading, *self.more)]
        return [*([self.before] if self.before else []), *(block for blocks in named for block in blocks)]


def test_every_endpoint_is_on_the_page() -> None:
    for endpoint in ENDPOINTS:
        path = re.escape(endpoint.path)
        for name, shown in (("model", r"\$MODEL"), ("choice", r"\d{3}"), ("id", "new")):
            path = path.replace(re.escape(f"{{{name}}}"), shown)
        method = "-X DELETE " if endpoint.method == "DELETE" else ""
        assert re.search(rf'{method}"?(\$URL|http://localhost:9448){path}\b', PAGE), endpoint.path


def test_the_readme(real_data: Path, tmp_path: Path, warm: Nest) -> None:
    section = Section("../README.md", "From a catalogue too large for a device")
    (shown,) = section.paste(tmp_path, real_data, warm, ports=(9447,))
    offer = json.loads(shown.splitlines()[-1])
    assert (offer["query"], offer["rows"]) == ("choice:epsilon=5", 500)


def test_films(real_data: Path, tmp_path: Path, warm: Nest) -> None:
    section = Sections("serving.md", "Run a service", ("Every endpoint",))
    shown = section.paste(tmp_path, real_data, warm, ports=(9447,))
    offer = json.loads(shown[1])
    assert offer["ways"] == ["table", "shelf", "query"]
    said = section.blocks("json")
    assert offer.keys() == json.loads(said[0].replace("…", "")).keys()
    assert shown[8].splitlines() == said[1].splitlines()
    assert json.loads((tmp_path / "shelf.json").read_text())["items"]
    assert len(json.loads((tmp_path / "list.json").read_text())["items"]) == 50
    assert len(Part.read((tmp_path / "half.letter").read_bytes())) == 50
    assert len(Part.read((tmp_path / "table.letter").read_bytes())) == offer["items"]
    assert [json.loads(line) for line in shown[6].splitlines()] == [
        {"added": 1, "version": 3}, {"removed": 1, "version": 4},
    ]  # fmt: skip
    assert f"100 50 {offer['items']}" in shown[9]


def test_news(tmp_path: Path, warm: Nest) -> None:
    files = Section("news.md", "Use data").blocks("bash") or re.findall(
        r"^```bash\n(cat > reads.csv.*?)^homebody run", (DOCS / "news.md").read_text(), re.MULTILINE | re.DOTALL
    )
    made = next(block for block in files if "reads.csv" in block).partition("homebody run")[0]
    section = Sections("serving.md", "News: the service ranks", before=made)
    shown = section.paste(tmp_path, tmp_path, warm, ports=(9448,))
    ranked = json.loads(shown[1].splitlines()[-1])["ranked"]
    assert len(ranked) == 3
    assert {entry["id"] for entry in ranked} <= {f"n{number}" for number in range(1, 7)}
    assert '{"added": 1, "version": 3}' in shown[2]
