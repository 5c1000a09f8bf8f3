"""What `nearby` takes of one device for its pairs: milliseconds, megabytes up, memory. It is not part of `make bench`.

    python benchmarks/nearby_device.py                                     # 3,706 items, all pairs and a sketch
    python benchmarks/nearby_device.py --items 1682 --history 200

One person with a history of random items. *Method* is the method's own half, in milliseconds: from the history to the
pairs. *Secure sum* is all that follows: clip, rounding, mask, signature. Median of `--repeat` runs, on one core.
*Memory* is the most that a process holds, beyond what it holds before with everything loaded and compiled; each size
has a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import time

import torch

from homebody.core import Catalogue, Data, Tree
from homebody.federation.envelopes import epoch_keys, signing_keys
from homebody.federation.secure_sum.helped import HelpedTerms, HelperEpoch, noise_depth, sign_message
from homebody.methods.nearby import Nearby
from homebody.rng import Rng, SystemRng

BAR = 50.0
"""Milliseconds for the method's own half of 500 items."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=3_706, help="items of the catalogue")
    parser.add_argument("--history", type=int, default=500, help="items of the person")
    parser.add_argument(
        "--buckets", type=int, nargs="*", default=[0, 500_000], help="sizes of the sketch; 0: all pairs"
    )
    parser.add_argument("--repeat", type=int, default=15)
    asked = parser.parse_args()
    fresh = multiprocessing.get_context("spawn")
    print(f"{asked.items:,} items, a history of {asked.history:,}; bar of the method's half: {BAR:g} ms")
    print(f"{'buckets':>9} {'up, MB':>8} {'method, ms':>11} {'secure sum, ms':>15} {'memory, MB':>11}")
    for buckets in asked.buckets:
        case = fresh.Process(target=measure, args=(asked.items, asked.history, buckets, asked.repeat))
        case.start()
        case.join()
        if case.exitcode:
            sys.exit(case.exitcode)


def measure(items: int, history: int, buckets: int, repeat: int) -> None:
    torch.set_num_threads(1)
    answer(9, 5, 0)  # kernels are compiled
    before, runs = held(), [answer(items, history, buckets) for _ in range(repeat)]
    method, masked = (1_000 * statistics.median(run[part] for run in runs) for part in (0, 1))
    size, memory = runs[0][2], held() - before
    print(f"{buckets or 'all':>9} {size / 1e6:8.2f} {method:11.1f} {masked:15.1f} {memory / 1e6:11.0f}")


def answer(items: int, history: int, buckets: int) -> tuple[float, float, int]:
    """Seconds of the method's half and of the secure sum's, and the bytes of the message."""
    method = Nearby(buckets=buckets).phases[1].method
    assert method is not None
    shared: Tree = method.init_shared(Catalogue(items), Rng.of(0))
    shared["popularity"], shared["place"] = Rng.of(1).uniform(items) + 0.1, torch.arange(items)
    own = torch.randperm(items)[:history]
    data = Data(own, own >= 0, own, Catalogue(items))
    began = time.perf_counter()
    update, _ = method.client(shared, {}, method.prepare(data, Rng.of(2)))
    ended = time.perf_counter()
    entries, channel = update["pairs"].size, method.uplink
    ring = channel.ring(entries, people=100)
    terms = HelpedTerms("run", "pairs/1", parties=100, entries=entries, width=ring.width, depth=noise_depth(channel))
    epoch, secret = HelperEpoch(bytes(16), epoch_keys()[0], terms, closes=2e9), signing_keys()[1]
    masking = time.perf_counter()
    message = sign_message(epoch, channel.party([update], ring, SystemRng()), secret)
    return ended - began, time.perf_counter() - masking, len(message)


def held() -> int:
    """The most bytes that this process has held so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


if __name__ == "__main__":
    main()
