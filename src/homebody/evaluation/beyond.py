"""Beyond accuracy: what the lists of all people are like together, and for whom the model works.

Everything is computed from lists of the first k items of the full ranking, from what was trained on, and from each
person's NDCG. A simulation has them; devices never send them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import scipy.sparse
from torch import Tensor

from homebody.core import Evaluated
from homebody.data.splits import Split
from homebody.evaluation.metrics import main_cutoff

__all__ = ["BEYOND", "beyond", "gini"]

BEYOND = ("coverage", "novelty", "diversity", "popularity_lift", "gini", "gap")
"""What tables of several methods show of it."""
LEAST_USERS = 10
"""A group of fewer people is left out: its mean says little."""
MOST_GROUPS = 12
"""A feature of more values is not shown."""
Floats = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]


def beyond(split: Split, evaluated: Evaluated, vectors: Tensor | None = None) -> dict[str, Any] | None:
    """Coverage, novelty, diversity, popularity bias and gaps between groups; None where nothing was measured.

    evaluated: without lists, such as where impressions are asked about, there are gaps alone.
    vectors: (items, d) from which diversity is computed where items have no features.
    """
    if not evaluated.per_user:
        return None
    cutoffs = [int(name.removeprefix("ndcg@")) for name in evaluated.per_user if name.startswith("ndcg@")]
    k = main_cutoff(cutoffs)
    found: dict[str, Any] = {"k": k}
    if lists := evaluated.lists:
        users, items = (lists[name].numpy().astype(np.int64) for name in ("user", "items"))
        found |= _of_lists(split, users, items)
        found |= _diversity(split, items, vectors)
    found["groups"] = list(_groups(split, evaluated.per_user, k))
    found["gaps"] = _gaps(found["groups"], f"ndcg@{k}")
    return found


def gini(counts: npt.NDArray[Any]) -> float:
    """How unequal they are: 0 where all are the same, near 1 where one has everything.

    >>> gini(np.array([2, 2, 2])), gini(np.array([0, 0, 0, 8]))
    (0.0, 0.75)
    """
    ordered = np.sort(counts.astype(np.float64))
    total = float(ordered.sum())
    if not total:
        return 0.0
    place = np.arange(1, len(ordered) + 1)
    return float((2 * place - len(ordered) - 1) @ ordered / (len(ordered) * total))


def _of_lists(split: Split, users: Longs, items: Longs) -> dict[str, float]:
    """Coverage, novelty, exposure and popularity of the items in these lists."""
    owners, learnt = _trained_on(split)
    people = max(1, len(np.unique(owners)))
    share = np.bincount(learnt, minlength=split.n_items) / people
    there = items >= 0
    shown = np.bincount(items[there], minlength=split.n_items)
    unasked = (split.unasked or {}).get("test")
    ranked = np.ones(split.n_items, dtype=np.bool_)
    if unasked is not None:
        ranked[unasked] = False
    # Nobody had it: as if one person did.
    surprise = -np.log2(np.maximum(share, 1 / people))
    of_histories = np.bincount(owners, share[learnt], split.n_users)[users]
    lengths = np.bincount(owners, minlength=split.n_users)[users]
    recommended = _means(share, items, there)
    had = float((of_histories[lengths > 0] / lengths[lengths > 0]).mean()) if (lengths > 0).any() else 0.0
    return {
        "coverage": float((shown[ranked] > 0).mean()),
        "novelty": _means(surprise, items, there),
        "gini": gini(shown[ranked]),
        "popularity": recommended,
        "history_popularity": had,
        "popularity_lift": recommended / had - 1 if had else float("nan"),
    }


def _trained_on(split: Split) -> tuple[Longs, Longs]:
    """Each training interaction's person and item; a repeat counts once."""
    owners = np.repeat(np.arange(split.n_users), np.where(split.learn, split.lengths, 0))
    items = split.population.items[split.interactions("train")].astype(np.int64)
    if split.repeats:
        owners, items = np.divmod(np.unique(owners * split.n_items + items), split.n_items)
    return owners, items


def _means(values: Floats, items: Longs, there: npt.NDArray[np.bool_]) -> float:
    """The mean over lists of a list's mean value."""
    counts = there.sum(axis=1)
    sums = np.where(there, values[np.maximum(items, 0)], 0.0).sum(axis=1)
    return float((sums[counts > 0] / counts[counts > 0]).mean())


def _diversity(split: Split, items: Longs, vectors: Tensor | None) -> dict[str, Any]:
    """The mean distance of two items of a list, 1 - cosine: the mean over features, or of the method's vectors."""
    tables = list(_features(split))
    if tables:
        apart = [_apart(table, known, items) for table, known in tables]
        return {"diversity": float(np.mean(apart)), "diversity_by": "item features"}
    if vectors is None:
        return {}
    rows = vectors.detach().double().cpu().numpy()
    length = np.linalg.norm(rows, axis=1)
    unit = rows / np.where(length > 0, length, 1.0)[:, None]
    return {"diversity": _apart(unit, length > 0, items), "diversity_by": "item vectors"}


def _features(split: Split) -> Iterator[tuple[scipy.sparse.csr_matrix, npt.NDArray[np.bool_]]]:
    """Each feature of items that has values to compare, as rows of length 1, and which items have it."""
    for column in split.encoded["items"].columns.values():
        if column.kind == "number":
            continue
        codes = column.values if column.values.ndim > 1 else column.values[:, None]
        item, place = np.nonzero(codes > 0)
        table = scipy.sparse.csr_matrix(
            (np.ones(len(item)), (item, codes[item, place])), shape=(len(codes), column.size + 1)
        )
        length = np.sqrt(np.asarray(table.multiply(table).sum(axis=1)).ravel())
        yield scipy.sparse.diags(1 / np.where(length > 0, length, 1.0)) @ table, length > 0


def _apart(unit: Any, known: npt.NDArray[np.bool_], items: Longs) -> float:
    """The mean over lists of 1 - the mean cosine of two different items, of those that are known.

    The squared length of a sum of m unit rows is m and twice the cosines of all pairs.
    """
    there = (items >= 0) & known[np.maximum(items, 0)]
    who, place = np.nonzero(there)
    ones = np.ones(len(who))
    lists = scipy.sparse.csr_matrix((ones, (who, items[who, place])), shape=(len(items), len(known)))
    total = lists @ unit
    squared = (
        np.asarray(total.multiply(total).sum(axis=1)).ravel() if scipy.sparse.issparse(total) else (total**2).sum(1)
    )
    count = there.sum(axis=1)
    some = count > 1
    cosine = (squared[some] - count[some]) / (count[some] * (count[some] - 1))
    return float((1.0 - cosine).mean()) if some.any() else float("nan")


def _groups(split: Split, per_user: Mapping[str, Tensor], k: int) -> Iterator[dict[str, Any]]:
    """The people of each group, and their mean NDCG: by thirds of activity, and by each declared category."""
    users = per_user["user"].numpy()
    measured = {name: per_user[name].numpy() for name in (f"ndcg@{k}", f"full/ndcg@{k}") if name in per_user}

    def group(by: str, name: str, inside: npt.NDArray[np.bool_]) -> dict[str, Any]:
        means = {metric: float(values[inside].mean()) for metric, values in measured.items()}
        return {"by": by, "group": name, "users": int(inside.sum()), **means}

    lengths = split.lengths[users]
    edges = np.quantile(lengths, [1 / 3, 2 / 3], method="inverted_cdf") if len(lengths) else np.zeros(2)
    third = np.searchsorted(edges, lengths)  # whoever is at an edge is below it
    for number in np.unique(third).tolist():
        inside = third == number
        if inside.sum() >= LEAST_USERS and inside.sum() < len(users):
            yield group("activity", f"{lengths[inside].min():,} to {lengths[inside].max():,} items", inside)
    features = split.population.user_features
    if features is None:
        return
    for column in [name for name, kind in features.kinds.items() if kind == "categorical"]:
        values = np.array(features.table[column].gather(pl.Series(users)).cast(pl.String).fill_null("").to_list())
        names, counts = np.unique(values, return_counts=True)
        large = [name for name in names[counts >= LEAST_USERS].tolist() if name]
        if 2 <= len(large) <= MOST_GROUPS:
            for name in large:
                yield group(column, name, values == name)


def _gaps(groups: list[dict[str, Any]], metric: str) -> dict[str, float]:
    """For each way to group people, how far the best group is ahead of the worst."""
    means: dict[str, list[float]] = {}
    for one in groups:
        means.setdefault(one["by"], []).append(one[metric])
    return {by: max(values) - min(values) for by, values in means.items() if len(values) > 1}
