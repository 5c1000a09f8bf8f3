"""Seconds a round takes with two real devices and two apps on each.

    python benchmarks/apps.py [--rounds 20]

A server, two devices with a person each and two apps on each device are processes on this machine, with TLS. They train
`fl-mv-dssm` with MovieLens-100K's catalogue and titles, without noise. The median, the first rounds left out, which
compile. It takes about a minute, needs the tests' folder, and is not part of `make bench`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

BAR = 1.0
"""Seconds that a round may take."""
VIEWS = {"profile": 24, "taste": 30}
PEOPLE, FIRST = 2, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(Path(folder) / "world", asked.rounds)
    found = statistics.median(seconds[FIRST:])
    verdict = "met" if found <= BAR else "MISSED"
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; the first round {seconds[0]:.3f} s")
    print(f"a round of FL-MV-DSSM with 4 apps {found:7.3f} s; bar {BAR:g} s: {verdict}")


def measure(folder: Path, rounds: int) -> list[float]:
    """Of each round, as the server logs it."""
    import numpy as np
    from tests.federation.world import World

    from homebody.data import Population, load
    from homebody.recipe import Recipe

    whole, rng = load("ml-100k"), np.random.default_rng(0)
    rows = whole.indptr[PEOPLE]
    people = Population("two", whole.indptr[: PEOPLE + 1], whole.items[:rows], whole.n_items)
    assert whole.item_features is not None
    genres = ["|".join(own or ()) for own in whole.item_features.table["genres"].to_list()]
    columns = {"film": [whole.item_name(item) for item in range(whole.n_items)], "genres": genres}
    apps = {
        view: [{str(n): f"{value:.6f}" for n, value in enumerate(rng.normal(size=size), 1)} for _ in range(PEOPLE)]
        for view, size in VIEWS.items()
    }
    fields = {"views": ",".join(VIEWS)}
    recipe = Recipe("fl-mv-dssm", "devices", rounds=rounds, evaluate_every=0, fields=fields)
    views = [f"{view}={size}" for view, size in VIEWS.items()]
    world = World(folder, people, 2, recipe, columns=columns, views=views, apps=apps, popen=subprocess.Popen)
    try:
        world.start("device0", "device1", *world.apps)
        for device in world.devices:
            world.wait_for(device.name, "view joined", len(VIEWS))
        world.start("server", once=True)
        if world.finish():
            sys.exit("The server failed.")
        return [line["seconds"] for line in world.log("server") if line["event"] == "round"]
    finally:
        world.stop()


if __name__ == "__main__":
    main()
