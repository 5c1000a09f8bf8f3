"""A compiled sum over neighbours, for many people at once."""

from __future__ import annotations

import numpy as np

from homebody.parallel import parallel

__all__ = ["add_up_neighbours"]


@parallel(over="items")
def add_up_neighbours(lower, upper, items, neighbour, weight, owned, out):
    """out[u, j]: the weights of those of item j's neighbours that u has; `owned` has a row for each item.

    A neighbour is added for everyone in one run: most of it is zeros, and still there is nothing faster.
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
