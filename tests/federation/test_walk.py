"""The call chain of a device's round is the one that docs/architecture.md lists, and it is short.

A function counts if it is on the call stack at one of five moments: the letter is sent, the method computes, the update
passes the channel, the server decodes it, and the sum is formed. What is nested in a function counts with it. The
harness carries letters in the process, so the functions that carry them over Flower are named here.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.federation.conftest import Mail

from homebody.federation import wire
from homebody.federation.server import aggregate
from homebody.privacy import Channel
from homebody.recipe import Recipe
from homebody.simulation import clients

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
MOST = 20
ROOMS = ("homebody.federation.", "homebody.simulation.")
OVER_FLOWER = {
    "homebody.federation.flower.link.Link.send",
    "homebody.federation.flower.link.Link.receive",
    "homebody.federation.flower.fleet.Fleet.pull",
    "homebody.federation.flower.fleet.Fleet.answer",
    "homebody.federation.device.client._Client.run",
    "homebody.federation.device.client._Client._reply",
}


def listed() -> list[str]:
    section = PAGE.read_text(encoding="utf-8").partition("### A device's round\n")[2].partition("\n### ")[0]
    return re.findall(r"^\d+\. `([\w.]+)`", section, flags=re.MULTILINE)


def chain(frame: FrameType | None) -> set[str]:
    """Our functions on this stack."""
    found = set()
    while frame is not None:
        name = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname.partition('.<locals>')[0]}"
        found |= {name} if name.startswith(ROOMS) else set()
        frame = frame.f_back
    return found


def test_a_devices_round_is_the_walk_of_the_architecture(
    town: Callable[..., Any], people: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe("fedmf", "devices", rounds=1, evaluate_every=0, fields={"factors": 2}, stages=["clip:norm=1"])
    one = town(people([6]), [1], recipe)
    seen: set[str] = set()
    answering = [False]
    moments = 0

    def watch(owner: Any, name: str) -> None:
        """Look at the stacks of both threads whenever this function is entered in a round."""
        plain = getattr(owner, name)

        def watched(*given: Any, **more: Any) -> Any:
            nonlocal moments
            if answering[0]:
                main = sys._current_frames()[threading.main_thread().ident]  # type: ignore[index]
                moments += 1
                seen.update(chain(sys._getframe(1)) | chain(main))
            return plain(*given, **more)

        monkeypatch.setattr(owner, name, watched)

    watch(Mail, "send")
    watch(clients, "train_many")
    watch(wire, "decode_update")
    watch(aggregate, "Summed")  # the sum is formed
    left = Channel.device

    def leaves(self: Channel, *given: Any) -> Any:
        caller = sys._getframe(1)
        if answering[0] and caller.f_code.co_name == "_leave":  # and not where shapes are found with nobody's data
            seen.update(chain(caller))
        return left(self, *given)

    monkeypatch.setattr(Channel, "device", leaves)
    runtime = one.runtime()
    collect = runtime.collect

    def collecting(*given: Any) -> Any:
        answering[0] = True
        try:
            return collect(*given)
        finally:
            answering[0] = False

    runtime.collect = collecting
    one.fit(runtime)
    assert moments >= 3
    assert seen | OVER_FLOWER == set(listed())
    assert len(listed()) == len(set(listed())) <= MOST
