"""A compiled sum over neighbours, for many people at once."""

from __future__ import annotations

import numpy as np

from homebody.parallel import parallel

__all__ = ["add_up_neighbours"]


@parallel(over="items")
def add_up_neighbours(lower, upper, items, neighbour, weight, owned, out):
    """out[u, j] = the sum of the weights of those neighbours of items[j] that person u has.

    neighbour, weight (M, K): the neighbours of each item; owned (M, people): 1 where a person has the item, with people
    innermost, so that a neighbour is added for everyone by vector instructions; out (people, items). An item writes to
    a column of its own, so items may run in parallel.
    """
    people = owned.shape[1]
    for place in range(lower, upper):
        item = items[place]
        total = np.zeros(people, dtype=np.float32)
        for rank in range(neighbour.shape[1]):
            near, by = neighbour[item, rank], weight[item, rank]
            if 0 <= near < len(owned):  # neighbours come from the server
                for person in range(people):
                    total[person] += by * owned[near, person]
        for person in range(people):
            out[person, place] = total[person]
