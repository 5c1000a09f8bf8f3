"""docs/news.md, copied and pasted, with small settings where full ones take long."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pages import DOCS, Section
from tests.processes import PATIENCE
from tests.warm import Nest

from homebody.data.pretrained import pretrained_at
from homebody.federation.device.home import Home
from homebody.federation.server.admin import opened

DEVICES = Section("news.md", "On real devices")
PAGE = (DOCS / "news.md").read_text(encoding="utf-8")
SMALL = {
    "run fedrec --data MINDsmall": "--rounds 1 --cohort 4 --set d=20 --set heads=2 --set words=random",
    "run fedrec": "--rounds 1 --set d=20",
    "run dp-fedrec": "--rounds 1 --set d=20",
    "run news-cen": "--rounds 1 --set d=20",
    "run privaterec --data ibm-articles --set guarantee=published": "--rounds 1 --set d=20",
    "run privaterec --data ibm-articles": "--set d=20 --set steps=2",
    "inspect": "--set d=20",
    "audit": "--users 10",
    "audit runs/choice/* --attack words": "--trials 1000",
    "audit runs/choice/* --attack canary": "--canaries 100",
}
"""What a command that begins so gets in addition; the longest beginning counts."""


def shortened(line: str) -> str:
    if not line.startswith("homebody "):
        return line
    command = line.removeprefix("homebody ")
    known = [start for start in SMALL if command.startswith(start)]
    return f"{line} {SMALL[max(known, key=len)]}" if known else line


def blocks(*parts: str) -> list[str]:
    """The commands under these headings."""
    sections = re.split(r"^##+ (.+)$", PAGE, flags=re.MULTILINE)
    found = dict(zip(sections[1::2], sections[2::2], strict=True))
    return [code for part in parts for code in re.findall(r"^```bash\n(.*?)^```$", found[part], re.M | re.S)]


def pasted(codes: list[str], folder: Path, data: Path, warm: Nest) -> list[str]:
    """What each block printed."""
    lines = [shortened(line) for code in codes for line in ["echo ======", *code.splitlines()]]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(warm.programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "HOMEBODY_DATA": str(data),
        "COLUMNS": "200",
    }
    done = subprocess.run(
        ["bash", "-eu", "-c", "\n".join(lines)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split("======\n")[1:]


def test_files_of_ones_own(tmp_path: Path, warm: Nest) -> None:
    (printed,) = pasted(blocks("Your own files"), tmp_path, tmp_path, warm)
    assert "ε certified, one user, over the whole training: server 20, clients 20, public 20" in printed


@pytest.mark.parametrize(
    ("heading", "folder", "name"), [("MIND", "mind-sample", "MINDsmall"), ("EB-NeRD", "ebnerd-demo", "ebnerd_demo")]
)
def test_supplied_data(real_data: Path, tmp_path: Path, warm: Nest, heading: str, folder: str, name: str) -> None:
    if not (real_data / folder).exists():
        pytest.skip(f"no {folder}")
    (tmp_path / name).symlink_to(real_data / folder)
    (printed,) = pasted(blocks(heading), tmp_path, real_data, warm)
    assert "mean over impressions: AUC" in printed


def test_the_rest_of_the_page(real_data: Path, tmp_path: Path, warm: Nest) -> None:
    if not (real_data / "ibm-articles").exists() or pretrained_at("all-minilm-l6-v2") is None:
        pytest.skip("no ibm-articles, or no language model")
    headings = ("Train", "Read the ledger", "See what a device sends", "Recommend", "Serve, in a simulation", "Attack")
    got, trained, ledger, seen, ranked, served, attacked = pasted(
        blocks("IBM's articles", *headings), tmp_path, real_data, warm
    )
    assert "22,091 of 2,315 users" in got
    assert trained.count("mean over impressions: AUC") == 7
    assert "about one interaction: a mechanism of ε = 5 (replace-one); no sampling; ε = 5 each" in ledger
    assert "about one person, with everything they did: ε = 30 at" in ledger
    assert "about one click, rating or view: ε = 15 at" in ledger
    assert "about one person, with everything they did: ε = ∞ at" in ledger
    assert "it takes 143 bytes, whatever the history is" in seen
    assert "this person's history" in seen
    assert len(re.findall(r"^ +\d+ {2,}\S", ranked, re.M)) == 10
    assert served.count("mean over impressions: AUC") == 2
    assert len(re.findall(r"the gradient +1\.000 .* 1\.000 ", attacked)) == 2
    assert "CONTRADICTED" not in attacked


def test_four_devices_train_on_their_impressions(tmp_path: Path, warm: Nest) -> None:
    files, _ = blocks("Your own files")[0].split("homebody run")
    subprocess.run(["bash", "-eu", "-c", files], cwd=tmp_path, check=True)
    ports = (9092, 9093, 9445, 9448, 9464)
    *_, trained, told, _, served = DEVICES.paste(tmp_path, tmp_path, warm, ports=ports, columns=200)
    assert "privaterec on devices: not measured" in trained
    assert "over the whole training: server 20, clients 20, public 20" in trained
    assert "ann clicked n3." in told
    assert "with 2 reports for the proxy" in told
    assert "about one interaction: a mechanism of ε = 5 (replace-one); no sampling; ε = 5 each" in told
    with opened(tmp_path / "server") as (_, records):
        assert [line["clients"] for line in records.rounds()] == [4, 4]
        assert records.counters()["reports_accepted"] == 8
    with Home(tmp_path / "device-ann") as home:
        shown = home.impressions.of("ann")[-1]
        assert (set(shown.shown), shown.clicked, shown.ranked) == ({"n3", "n4", "n5", "n6"}, ("n3",), "device")
    assert "Ranked by the service for what was told" in served
    with Home(tmp_path / "device-ben") as home:
        shown = home.impressions.of("ben")[-1]
        assert (set(shown.shown), shown.clicked) == ({f"n{number}" for number in range(1, 7)}, ("n4",))
        assert shown.ranked == "server"


def test_the_totals_of_the_page_are_those_of_its_settings() -> None:
    from homebody import PrivateRec

    method = PrivateRec()
    each, rounds = method.epsilon, method.reports
    assert f"its default of {rounds} reports and ε = {each:g} certifies {each * rounds:g} for one" in PAGE
    assert f"interaction and {2 * each * rounds:g} for one person" in PAGE
