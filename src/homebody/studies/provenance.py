"""How a page was made: the command, the code and the kind of machine; never a path or a host name."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from homebody import __version__
from homebody.errors import several
from homebody.files import SHARED, replace_all, unwritten
from homebody.report.record import jsonable
from homebody.studies.cells import commit
from homebody.studies.workers import cores

__all__ = ["command_text", "machine", "provenance_of", "slug", "without_paths", "write_all"]


def provenance_of(command: str) -> dict[str, Any]:
    """The command, version, commit, machine and date; the caller updates `seconds`."""
    return {
        "command": command,
        "version": __version__,
        "commit": commit(),
        "machine": machine(),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "seconds": 0.0,
    }


def machine() -> str:
    """Its class: cores, family of processor, memory, GPU or none."""
    import torch

    try:
        memory = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GB memory"
    except (ValueError, OSError):
        memory = "memory unknown"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{several(cores(), 'core')}, {_processor()}, {memory}, {gpu}"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = match[1] if match else platform.processor() or platform.machine()
    return " ".join(re.sub(r"\((R|TM)\)|\bCPU\b|\bProcessor\b|@.*", " ", name).split())


def command_text(words: str, options: Mapping[str, Any]) -> str:
    """The command as one would type it; options that are None or empty were not given.

    >>> command_text("homebody reproduce pfedrec", {"table": "1", "data": ["ml-1m", "my set"], "seeds": None})
    "homebody reproduce pfedrec --table 1 --data ml-1m --data 'my set'"
    """
    parts = [words]
    for name, value in options.items():
        given = value if isinstance(value, list | tuple) else [value]
        parts += [f"--{name} {shlex.quote(str(text))}" for text in given if text is not None]
    return " ".join(parts)


def without_paths(text: str) -> str:
    """A sentence for a page that others read: folders of this machine are cut from it.

    >>> without_paths("The loss is not finite. The rounds before are recorded in /home/me/runs/fedmf-1.")
    'The loss is not finite. The rounds before are recorded in …/fedmf-1.'
    """
    return re.sub(r"(?<![\w.:/])/(?:[^\s/:'\"]+/)+", "…/", text)


def slug(text: str) -> str:
    """A name for a folder.

    >>> slug("synthetic:users=60,items=80"), slug("my loans.csv")
    ('synthetic-users-60-items-80', 'my-loans.csv')
    """
    return re.sub(r"[^\w.]+", "-", text).strip("-.")[:80] or "unnamed"


def write_all(folder: Path, files: Mapping[str, str | dict[str, Any]]) -> None:
    """Write all of the files, or none: pages to show to others."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritten(folder, error) from error
    texts = {
        name: content if isinstance(content, str) else json.dumps(jsonable(content), indent=1) + "\n"
        for name, content in files.items()
    }
    replace_all(folder, texts, mode=SHARED)
