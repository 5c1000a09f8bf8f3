"""What a secure sum takes, before anybody takes part."""

from __future__ import annotations

import math
from typing import Any

from homebody.errors import HomebodyError
from homebody.federation.secure_sum.graph import design
from homebody.federation.secure_sum.messages import FEWEST, Terms, traffic
from homebody.privacy.secure_sum import COLLUDING, LEAST, SEMI_HONEST, honest

__all__ = ["cost"]


def cost(
    parties: int, entries: int, width: int, least: float | None = None, colluding: float | None = None
) -> dict[str, Any]:
    """Neighbours, shares, odds, noise and bytes of a secure sum in which everyone answers, for people and programs.

    >>> figures = cost(1000, entries=54_000, width=4)
    >>> figures["degree"], figures["threshold"], figures["exchanges"][2]
    (96, 37, {'exchange': 'masked', 'sent': 216105, 'received': 8256})
    """
    chosen = LEAST if least is None else least, COLLUDING if colluding is None else colluding
    if parties < FEWEST:
        raise HomebodyError(f"A secure sum takes {FEWEST} parties or more, not {parties:,}: devices refuse fewer.")
    terms = Terms("-", "-", parties, entries, width, *chosen)
    graph = design(parties, terms.quorum, terms.colluders)
    lost = "Odds are those of a sum that loses as many parties as it may. If it loses more, nothing is opened."
    return {
        "parties": parties,
        "quorum": max(FEWEST, terms.quorum),
        "colluders": terms.colluders,
        "degree": graph.degree,
        "threshold": graph.threshold,
        "complete": graph.complete,
        "privacy": graph.privacy,
        "failure": graph.failure,
        "excess_noise": math.sqrt(parties / honest(parties, *chosen)),
        "exchanges": [
            {"exchange": exchange, "sent": sent, "received": received}
            for exchange, (sent, received) in traffic(terms, graph.degree).items()
        ],
        "notes": [lost] if graph.complete else [SEMI_HONEST, lost],
    }
