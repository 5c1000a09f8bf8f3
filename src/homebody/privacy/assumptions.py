"""What a secure sum shows to whom, and what that rests on, in sentences for people."""

from __future__ import annotations

from homebody.privacy.channel import Channel
from homebody.privacy.secure_sum import COMPLETE, HELPER, SEMI_HONEST, threshold

__all__ = ["OWN_NOISE", "ROSTER", "assumptions"]

ROSTER = (
    "Assumed: the parties are devices of other people. A server that invents parties knows what they add. A roster of "
    "devices that somebody other than the server signed says who they are."
)
OWN_NOISE = (
    "This device has no key for rosters, so it cannot know whether the parties of a secure sum are other people's "
    "devices: it counts on its own noise alone."
)


def assumptions(channel: Channel, parties: int | None = None) -> tuple[str, ...]:
    """What the server and the parties of a channel's secure sum see, and what must hold for that; nothing without one.

    parties: how many are in a round, if that is known.

    >>> from homebody.privacy import Clip, SecureSum
    >>> for line in assumptions(Channel(Clip(1.0), SecureSum()), 100):
    ...     print(line)
    The server sees the sum of 67 of 100 parties or more, and never a single vector.
    The server and all parties see who takes part.
    Assumed: no more than 10 of 100 parties collude with the server.
    Assumed: the parties are devices of other people. A server that invents parties knows what they add. A roster of \
devices that somebody other than the server signed says who they are.
    """
    stage = channel.facts.sum
    if stage is None:
        return ()
    least, colluding = stage.shares
    share, some = f"{least:.0%} of a round's parties", f"{colluding:.0%} of a round's parties"
    if parties is not None:
        share = f"{threshold(parties, least):,} of {parties:,} parties"
        some = f"{int(colluding * parties + 1e-9):,} of {parties:,} parties"
    seen = f"The server sees the sum of {share} or more, and never a single vector."
    if stage.helper:
        return seen, HELPER, "Assumed: server and helper do not collude."
    return (
        seen,
        "The server and all parties see who takes part.",
        f"Assumed: no more than {some} collude with the server.",
        ROSTER,
        *([SEMI_HONEST] if parties is None or parties > COMPLETE else []),
    )
