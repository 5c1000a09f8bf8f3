"""A section of a page, run as a reader would run it: by copy and paste."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.processes import PATIENCE, free_port
from tests.warm import Nest

DOCS = Path(__file__).resolve().parents[1] / "docs"


@dataclass(frozen=True)
class Section:
    """What stands under a heading of a page in docs/."""

    page: str
    heading: str

    def blocks(self, language: str) -> list[str]:
        text = (DOCS / self.page).read_text(encoding="utf-8")
        section = text.partition(f"## {self.heading}\n")[2].partition("\n## ")[0]
        return re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)

    def paste(self, folder: Path, data: Path, warm: Nest, *, ports: tuple[int, ...], columns: int = 80) -> list[str]:
        """Run the commands in this folder as they stand, on free ports. Returns what each block printed.

        `homebody` is a program that starts warm.
        """
        script = "".join(f"echo ==={number}===\n{code}" for number, code in enumerate(self.blocks("bash")))
        for port in ports:
            assert str(port) in script
            script = script.replace(str(port), str(free_port()))
        (folder / "commands.sh").write_text(f"set -eu\n{script}")
        environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(warm.programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "HOMEBODY_DATA": str(data),
            "COLUMNS": str(columns),
            "OMP_NUM_THREADS": "1",
            "NUMBA_NUM_THREADS": "1",
        }
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            process = subprocess.Popen(
                ["timeout", f"{2 * PATIENCE:.0f}", "bash", "commands.sh"],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            try:
                code = process.wait(2 * PATIENCE + 60)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        logs = (folder / "err", *sorted(folder.glob("*.log")))
        assert code == 0, "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in logs)
        return re.split(r"===\d+===\n", (folder / "out").read_text())[1:]
