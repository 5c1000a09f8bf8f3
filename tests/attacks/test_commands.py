"""Every command on a disk that is full and on one that is read-only: one sentence, an exit code, nothing half-written.

The disk is full for files above some size (RLIMIT_FSIZE), which every program meets as it meets a full disk; the
read-only disk is the real one, in a mount namespace of each command's own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.attacks.conftest import Campaign
from tests.warm import Nest

HARNESS = '''
"""Makes a small world, then runs each command in a child of its own, forked once all modules are loaded."""
import ctypes, hashlib, io, json, os, resource, sys, traceback, warnings
from pathlib import Path

import polars, torch  # noqa
import homebody.adversary.canaries, homebody.adversary.interactions, homebody.cli
import homebody.federation.device.home, homebody.federation.proxy.admin
import homebody.federation.server.admin, homebody.studies.reproduce, homebody.studies.tune
import homebody.report.statement_page
import homebody.suggest, homebody.methods.fedmf

warnings.simplefilter("ignore")
WORLD, ASKED = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
DATA = "synthetic:users=20,items=30,mean=6"


def world():
    from dataclasses import replace
    from homebody.cli import main
    from homebody.recipe import Recipe
    from homebody.run import Watcher, execute
    recipe = Recipe("fedmf", DATA, fields={"factors": 4}, rounds=2)
    execute(recipe, WORLD, name="done")
    class Cut(Exception): pass
    def cut(line):
        raise Cut
    try:
        execute(recipe, WORLD, Watcher(on_round=cut), name="cut")
    except Cut:
        pass
    for command in (
        ["data", "export", DATA, "people.csv", "--users", "0-2"],
        ["server", "init", "server", "--method", "fedmf", "--listen", "127.0.0.1:39999", "--no-tls", "--rounds", "2"],
        ["proxy", "init", "proxy", "--next", "http://127.0.0.1:39998", "--no-tls", "--listen", "127.0.0.1:39997"],
        ["proxy", "key", "sender"],
        ["proxy", "allow", "proxy", "sender/reports.pub"],
        ["client", "init", "device", "--server", "127.0.0.1:39999"],
        ["client", "import", "device", "people.csv"],
        ["keys", "device", "other"],
        ["keys", "add", "server", "other/device.pub", "--name", "other", "--people", "1"],
        ["server", "backup", "server", "kept.sqlite"],
    ):
        sys.argv = ["homebody", *command]
        try:
            main()
        except SystemExit as end:
            assert not end.code, command
    (WORLD / "items.csv").write_text("id,name\\\\n1,one\\\\n2,two\\\\n")
    paper = WORLD / "experiments" / "tiny"
    paper.mkdir(parents=True)
    (paper / "recipe.toml").write_text(
        'title = "t"\\\\ncitation = "c"\\\\n[[table]]\\\\nid = "1"\\\\ntitle = "t"\\\\n'
        f'data = ["{DATA}"]\\\\nmetrics = ["hr@10"]\\\\nseeds = 1\\\\n[[table.row]]\\\\n'
        'name = "p"\\\\nmethod = "popularity"\\\\n'
    )


def forked(work):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.dup2(writing, 1); os.dup2(writing, 2)
        code = 1
        try:
            code = work() or 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(); sys.stderr.flush()
        os._exit(code)
    os.close(writing)
    said = b""
    while part := os.read(reading, 1 << 16):
        said += part
    os.close(reading)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said.decode(errors="replace")


class Attributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def read_only():
    """Everything that is mounted, for this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    ids = os.getuid(), os.getgid()
    if libc.unshare(0x00020000):  # CLONE_NEWNS
        if libc.unshare(0x10000000 | 0x00020000):  # and CLONE_NEWUSER
            os._exit(77)
        Path("/proc/self/setgroups").write_text("deny")
        for file, own in zip(("uid_map", "gid_map"), ids):
            Path(f"/proc/self/{file}").write_text(f"0 {own} 1")
    here = os.fsencode("/")
    if libc.mount(None, here, None, 0x4000 | 0x40000, None):  # MS_REC, MS_PRIVATE
        os._exit(77)
    wanted = Attributes(1)  # MOUNT_ATTR_RDONLY
    if libc.syscall(442, -100, here, 0x8000, ctypes.byref(wanted), ctypes.sizeof(wanted)):  # mount_setattr
        os._exit(77)
    os.chdir(WORLD)  # by its path, so that it is the mount of this namespace


def command(words, disk):
    from homebody.cli import main
    if disk == "read-only":
        read_only()
    elif disk:
        resource.setrlimit(resource.RLIMIT_FSIZE, (disk, disk))
    sys.argv = ["homebody", *words]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))


def tree():
    """Every file and what it holds; locks, and what SQLite keeps beside a database, come and go."""
    found = {}
    for path in sorted(WORLD.rglob("*")):
        name = str(path.relative_to(WORLD))
        if path.is_file() and not name.endswith(("-wal", "-shm", ".lock")) and "asked" not in name:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


os.chdir(WORLD)
code, said = forked(world)
assert code == 0, said
for one in ASKED:
    before = tree()
    code, said = forked(lambda: command(one["words"], one["disk"]))
    after = tree()
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    print(json.dumps({**one, "code": code, "said": said, "changed": changed}), flush=True)
'''.replace("\\\\n", "\\n")

DATA = "synthetic:users=20,items=30,mean=6"
WRITING = [
    f"run fedmf --data {DATA} --rounds 2 --set factors=4 --out NEW --json",
    "run --resume cut --json",
    f"compare popularity --data {DATA} --seeds 1 --out NEW --json",
    f"leaderboard --data {DATA} --methods popularity --seeds 1 --jobs 1 --out NEW --json",
    f"tune fedmf --data {DATA} --trials 1 --rounds 1 --jobs 1 --out NEW --json",
    f"tune fedmf --data {DATA} --trials 1 --rounds 1 --jobs 2 --out NEW --json",
    "reproduce tiny --jobs 1 --out NEW --json",
    "account --run done --statement NEW",
    "account gaussian --noise 1 --plot NEW.html",
    f"data export {DATA} NEW.csv",
    "server init NEW --method fedmf --listen 127.0.0.1:39990 --no-tls",
    "server items server items.csv",
    "server backup server NEW.sqlite",
    "client init NEW --server 127.0.0.1:39990",
    "client import device people.csv --person someone",
    "client append device 0 5",
    "client delete device 0 --all",
    "client export device NEW.csv",
    "client people device --add someone",
    "client pause device",
    "client opt-out device 0",
    "proxy init NEW --next http://127.0.0.1:39991 --no-tls --listen 127.0.0.1:39992",
    "proxy key NEW",
    "proxy forbid proxy sender/reports.pub",
    "keys init NEW",
    "keys device NEW",
    "keys remove server other",
]
READING = [
    "methods",
    "show done",
    "inspect fedmf --data " + DATA,
    "account --run done",
    "account gaussian --noise 1",
    "recommend done --user 0",
    "audit done --attack interactions --users 5",
    f"data info {DATA}",
    "data list",
    "server status server",
    "client people device",
    "client ledger device",
    "client status device",
    "client recommend device 0",
    "proxy status proxy",
    "reproduce",
]
STARTING = ["server start server --once", "client start device", "proxy run proxy"]
"""What runs until it is told to stop, unless it cannot even begin."""


def asked(words: list[str], disk: int | str) -> list[dict[str, Any]]:
    return [
        {"name": one, "words": one.replace("NEW", f"new{number}").split(), "disk": disk}
        for number, one in enumerate(words)
    ]


def outcomes(tmp_path: Path, questions: list[dict[str, Any]], warm: Nest) -> list[dict[str, Any]]:
    (tmp_path / "world").mkdir()
    (tmp_path / "asked.json").write_text(json.dumps(questions))
    # It forks itself, so it needs what the warm process has: one thread, and a threading layer that survives a fork.
    done = warm.run(
        [sys.executable, "-c", HARNESS, str(tmp_path / "world"), str(tmp_path / "asked.json")],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def refused(found: list[dict[str, Any]]) -> int:
    return sum(one["code"] == 2 for one in found)


def insist(one: dict[str, Any], failed: bool) -> None:
    """It ended well; or with one sentence, the exit code of a refusal, and everything as it was."""
    about = f"{' '.join(one['words'])} [{one['disk']}] → {one['code']}: {one['said'][-1500:]} {one['changed']}"
    assert "Traceback" not in one["said"], about
    if failed:
        assert one["code"] == 2, about
        last = one["said"].splitlines()[-1]
        assert last.startswith("homebody: "), about
        assert last.endswith("."), about
        assert one["changed"] == [], about
    else:
        assert one["code"] in (0, 2), about


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.attack), 4])
def test_no_command_leaves_half_of_something_on_a_full_disk(
    every: int, campaign: Campaign, tmp_path: Path, warm: Nest
) -> None:
    found = outcomes(tmp_path, asked([*WRITING[::every], *READING[:: 2 * every]], 60), warm)
    for one in found:
        insist(one, failed=one["name"] in WRITING)
    campaign.did("commands on a full disk", len(found), refused=refused(found))


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.attack), 4])
def test_no_command_writes_to_a_read_only_disk(every: int, campaign: Campaign, tmp_path: Path, warm: Nest) -> None:
    found = outcomes(tmp_path, asked([*WRITING[1::every], *READING[:: 2 * every], *STARTING], "read-only"), warm)
    if any(one["code"] == 77 for one in found):
        pytest.skip("no mount namespace can be made here")
    for one in found:
        insist(one, failed=one["name"] not in READING)
    campaign.did("commands on a read-only disk", len(found), refused=refused(found))


@pytest.mark.attack
@pytest.mark.parametrize("size", [1, 2_000, 5_000, 20_000, 60_000, 150_000])
def test_nor_does_one_that_fills_up_while_it_works(size: int, campaign: Campaign, tmp_path: Path, warm: Nest) -> None:
    """What got so far as to record rounds may be resumed; nothing else is left unfinished."""
    found = outcomes(tmp_path, asked([*WRITING, *READING], size), warm)
    campaign.did(f"commands where files end at {size:,} bytes", len(found), refused=refused(found))
    for one in found:
        about = f"{one['words']} {one['code']} {one['said'][-1500:]}"
        assert "Traceback" not in one["said"], about
        assert one["code"] in (0, 2), about
        assert not any(name.endswith(".partial") for name in one["changed"]), about
