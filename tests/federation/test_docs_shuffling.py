"""docs/shuffling.md, copied and pasted: a server, a proxy and three devices train over sealed reports."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.processes import free_port

from homebody.federation.device.home import Home
from homebody.federation.server.admin import opened
from homebody.federation.service.keys import read_report_pub

PAGE = Path(__file__).resolve().parents[2] / "docs" / "shuffling.md"
ROUNDS, PEOPLE, K = 4, 12, 100


def section() -> str:
    text = PAGE.read_text(encoding="utf-8")
    return text.partition("## A server, a proxy and three devices on one machine\n")[2].partition("\n## ")[0]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", section(), re.MULTILINE | re.DOTALL)


def words(text: str) -> list[str]:
    """Without numbers, which chance and the machine decide, and without a run's name."""
    return re.sub(r"\b[0-9a-f]{8}\b|[\d.,:]+", "", text).split()


def paste(folder: Path, data: Path) -> list[str]:
    """Run the page's commands as they stand, but for ports that are free; what each block printed."""
    script = "".join(f"echo ==={number}===\n{code}" for number, code in enumerate(blocks("bash")))
    for port in ("9092", "9093", "9445", "9464"):
        assert port in script
        script = script.replace(port, str(free_port()))
    (folder / "commands.sh").write_text(f"set -eu\n{script}")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOMEBODY_DATA": str(data),
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
    }
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(
            ["timeout", "1200", "bash", "commands.sh"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            code = process.wait(1260)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    logs = ("err", "server.log", "proxy.log", "device0.log")
    assert code == 0, "\n".join((folder / name).read_text()[-3000:] for name in logs if (folder / name).exists())
    return re.split(r"===\d+===\n", (folder / "out").read_text())[1:]


def test_the_page_by_copy_and_paste(real_data: Path, tmp_path: Path) -> None:
    *_, trained, told, known, _ = paste(tmp_path, real_data)
    table, ledger = blocks("text")
    assert words(trained) == words(table)
    assert words(ledger) == words(told[told.index("\n1\n") + 1 :])[: len(words(ledger))]
    assert f"{4 * ROUNDS * K:,} reports sent" in told
    assert f"reports: {PEOPLE * ROUNDS * K:,} accepted, 0 held, {PEOPLE * ROUNDS * K:,} passed on, 0 dropped" in known
    with opened(tmp_path / "server") as (_, records):
        assert [line["clients"] for line in records.rounds()] == [PEOPLE] * ROUNDS
        assert records.counters()["reports_accepted"] == PEOPLE * ROUNDS * K
    with Home(tmp_path / "device0") as home:
        assert len({entry.release for entry in home.ledger("1").entries()}) == ROUNDS
        assert home.outbox.reports() == 4 * ROUNDS * K
    # Neither of the two knows a device by what the other knows it by, and nobody writes an address down.
    for number in range(3):
        other = read_report_pub(tmp_path / f"device{number}" / "reports.pub")
        for file in (tmp_path / "server").rglob("*"):
            assert not file.is_file() or (other not in (held := file.read_bytes()) and other.hex().encode() not in held)
        own = (tmp_path / f"device{number}" / "device.pub").read_bytes().split()[1]
        assert not any(own in file.read_bytes() for file in (tmp_path / "proxy").rglob("*") if file.is_file())
    for name in ("server.log", "proxy.log"):
        assert "127.0.0.1" not in (tmp_path / name).read_text()
