"""A secure sum of many devices in this process: seconds, bytes, and whether the sum is right bit for bit.

    python benchmarks/secure_sum.py              # all cases
    python benchmarks/secure_sum.py complete     # 100 parties; also: sparse and helped (1,000), device (one of 100)

Vectors have 54,000 numbers of 4 bytes. A third of the parties is lost after they sent shares. That costs the server
most: it computes the masks again that the lost had with others. CPU seconds are those of all parties and the server
together, on one core. All signatures are checked. One that many devices check is checked once here: elsewhere each of
them is on a machine of its own. `device` is all the work of one device, signatures included. `helped` is a sum that a
helper opens, with its noise; the bar is for helper and server together, without the devices. It is not part of
`make bench`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec

from homebody.federation.envelopes import epoch_keys, signing_keys
from homebody.federation.secure_sum import signatures
from homebody.federation.secure_sum.collector import Collector
from homebody.federation.secure_sum.helped import HelpedSum, HelpedTerms, Helper, HelperEpoch, draw_noise, sign_message
from homebody.federation.secure_sum.messages import EXCHANGES, Terms
from homebody.federation.secure_sum.party import Party

ENTRIES, WIDTH = 54_000, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="complete, sparse, device, helped; by default all")
    cases: dict[str, Callable[[], None]] = {
        "complete": lambda: whole_sum(100, bar=5.0),
        "sparse": lambda: whole_sum(1000, bar=40.0),
        "device": lambda: one_device(100, bar=0.5),
        "helped": lambda: helped_sum(1000, bar=1.0),
    }
    for name in parser.parse_args().cases or cases:
        cases[name]()


def whole_sum(parties: int, bar: float) -> None:
    """A sum of all parties, with the CPU time of each exchange on both sides."""
    checked, signatures._holds = signatures._holds, lru_cache(maxsize=None)(signatures._holds)
    try:
        members, collector, vectors = world(parties)
        lost = set(range(0, parties, 3)[: parties - collector.terms.quorum])
        wall = time.perf_counter()
        spent: dict[str, list[float]] = {}
        sent = received = 0
        while (asked := collector.ask()) is not None:
            began, answers = time.process_time(), []
            for number in asked.own:
                if number in lost and asked.exchange not in ("keys", "shares"):
                    continue
                question = asked.question(number)
                answers.append((number, members[number].answer(asked.exchange, question, lambda n=number: vectors[n])))
                received, sent = received + len(question), sent + len(answers[-1][1])
            answered = time.process_time()
            collector.take(answers)
            spent[asked.exchange] = [answered - began, time.process_time() - answered]
        seconds = time.perf_counter() - wall
    finally:
        signatures._holds = checked
    assert collector.result is not None
    left = [number for number in range(parties) if number not in lost]
    right = np.sum(vectors[left], axis=0) & np.uint64(2 ** (8 * WIDTH) - 1)
    assert np.array_equal(collector.result.numbers, right), "the sum is wrong"
    assert collector.result.survivors == tuple(left)
    cpu = sum(map(sum, spent.values()))
    print(
        f"{parties:,} parties, {len(lost)} lost, the sum is right: {cpu:.2f} s of CPU, {seconds:.2f} s (bar {bar:g} s)"
    )
    for exchange, (devices, server) in spent.items():
        print(f"  {exchange:<10} devices {devices:7.3f} s   server {server:7.3f} s")
    print(f"  bytes: {sent / parties:,.0f} sent and {received / parties:,.0f} received by a party, on average")


def one_device(parties: int, bar: float) -> None:
    """The CPU time of one device among many, all of whom answer, with every signature that it checks."""
    members, collector, vectors = world(parties)
    spent = dict.fromkeys(EXCHANGES, 0.0)
    checked, known = signatures._holds, lru_cache(maxsize=None)(signatures._holds)
    while (asked := collector.ask()) is not None:
        began = time.process_time()
        answers = [(0, members[0].answer(asked.exchange, asked.question(0), lambda: vectors[0]))]
        spent[asked.exchange] = time.process_time() - began
        signatures._holds = known  # the others are not measured
        for number in list(asked.own)[1:]:
            answer = members[number].answer(asked.exchange, asked.question(number), lambda n=number: vectors[n])
            answers.append((number, answer))
        collector.take(answers)
        signatures._holds = checked
    parts = ", ".join(f"{exchange} {seconds:.3f}" for exchange, seconds in spent.items())
    print(f"one device of {parties}: {sum(spent.values()):.3f} s of CPU (bar {bar:g} s): {parts}")


def helped_sum(parties: int, bar: float) -> None:
    """A sum that a helper opens: a third of the devices send nothing."""
    draw_noise(20, 1)  # compiles the sampler
    terms = HelpedTerms("benchmark", "1", parties=parties, entries=ENTRIES, width=WIDTH, depth=20)
    (public, secret), keys = epoch_keys(), [signing_keys() for _ in range(parties)]
    epoch = HelperEpoch(bytes(16), public, terms, closes=2e9)
    vectors = np.random.default_rng(0).integers(0, 2 ** (8 * WIDTH), size=(parties, ENTRIES), dtype=np.uint64)
    noise: list[np.ndarray] = []

    def draw(depth: int, entries: int) -> np.ndarray:
        noise.append(draw_noise(depth, entries))
        return noise[0]

    wall, marks = time.perf_counter(), [time.process_time()]
    left = [number for number in range(parties) if number % 3][: terms.quorum]
    left += range(0, 3 * (terms.quorum - len(left)), 3)
    messages = [(number, sign_message(epoch, vectors[number], keys[number][1])) for number in left]
    marks.append(time.process_time())
    total = HelpedSum(epoch)
    assert all(total.take(number, message) for number, message in messages)
    request = total.request()
    marks.append(time.process_time())
    answer = Helper(epoch, secret, {known for known, _ in keys}.__contains__, draw=draw).open(request)
    marks.append(time.process_time())
    found = total.opened(answer)
    marks.append(time.process_time())
    seconds = time.perf_counter() - wall
    right = (np.sum(vectors[left], axis=0) - noise[0].view(np.uint64)) & np.uint64(2 ** (8 * WIDTH) - 1)
    assert np.array_equal(found, right), "the sum is wrong"
    devices, collected, helper, opened = np.diff(marks)
    print(
        f"{parties:,} parties with a helper, {parties - len(left)} lost, the sum is right: "
        f"{collected + helper + opened:.2f} s of CPU without devices (bar {bar:g} s), {seconds:.2f} s in all"
    )
    print(
        f"  devices {devices:.3f} s, one {devices / len(left):.5f} s; server {collected + opened:.3f} s; "
        f"helper {helper:.3f} s"
    )
    print(f"  bytes: {len(messages[0][1]):,} sent by a device, {len(request):,} to the helper, {len(answer):,} back")


def world(parties: int) -> tuple[list[Party], Collector, np.ndarray]:
    terms = Terms("benchmark", "1", parties=parties, entries=ENTRIES, width=WIDTH)
    members = [Party.join(terms, number, ec.generate_private_key(ec.SECP384R1())) for number in range(parties)]
    vectors = np.random.default_rng(0).integers(0, 2 ** (8 * WIDTH), size=(parties, ENTRIES), dtype=np.uint64)
    return members, Collector(terms, {party.number: party.identity for party in members}), vectors


if __name__ == "__main__":
    main()
