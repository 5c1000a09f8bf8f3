"""A recipe: everything that says what to run. TOML on disk, `--set` and options on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from homebody import settings
from homebody.errors import HomebodyError
from homebody.settings import DELTA, setting

# The command line reads the fields of a recipe for its options, and `homebody --help` must not wait for torch: what
# needs more than the fields is imported where it is used.
if TYPE_CHECKING:
    from homebody.core import Method
    from homebody.privacy import Budget
    from homebody.reference import Reference

__all__ = ["Recipe", "parse_fields"]

SCHEMA_VERSION = 2
"""A recipe of version 1 declares no vocabularies: its features take the values that the data have."""
SELECT = "valid/ndcg@10"
"""The metric that chooses the round of a method that ranks."""
DATA, TRAINING, EVALUATION, PRIVACY, OWN = "Data", "Training", "Evaluation", "Privacy", "A file of your own"
"""The panels of `--help`."""
COLUMNS = {
    "user_col": "The column of users.",
    "item_col": "The column of items.",
    "time_col": "The column of times.",
    "rating_col": "The column of ratings.",
    "feature_cols": "The columns of features, such as age,genre; by default all others.",
}


@dataclass(frozen=True)
class Recipe:
    """What to run.

    To add a field, declare it here with `setting`: the option of `homebody run`, `compare`, `tune`, `leaderboard` and
    `inspect`, its help, the key in TOML and the check of its type and bounds follow from the declaration. The order of
    the fields is the order in TOML, which a run's fingerprint covers, so a new field goes last.

    >>> recipe = Recipe("fedmf", "ml-100k", fields={"factors": 8})
    >>> Recipe.from_toml(recipe.to_toml()) == recipe
    True
    >>> recipe.build().factors
    8
    """

    method: str = setting(doc="A name from `homebody methods`, or path/to/file.py:Class.")
    data: str = setting(
        doc="A dataset's name, a file (CSV, Parquet, Excel, JSON lines), a database (sqlite:///…), or synthetic[:…].",
        panel=DATA,
        path="name",
        assume="ml-100k",
    )
    fields: dict[str, Any] = setting({}, "The method's fields that differ from its defaults.")
    rounds: int | None = setting(None, "Training rounds; by default the method's own number.", panel=TRAINING)
    seed: int = setting(0, "The seed of all randomness in a run.")
    split: str = setting(
        "leave-one-out",
        "The data split: leave-one-out, ratio, held-out-users, cold-users, cold-items, cold-both, impressions, "
        "impressions-later or impressions-people.",
        panel=EVALUATION,
    )
    """What is held out: a name from `homebody.data.partitions.WAYS`, with its settings (ratio:test=0.2)."""
    protocol: str = setting(
        "strict",
        "The evaluation protocol: strict, isolated or published. See docs/evaluation.md.",
        panel=EVALUATION,
        rank=-1,
    )
    held_out: str | None = setting(
        None,
        "Which interactions to hold out: latest (of a tie in time, the last in the file), latest-first (the first) or "
        "latest-random (one at random), or random; by default latest if the data has times.",
        panel=EVALUATION,
    )
    negatives: int = setting(
        99, "Negative items that the sampled metrics rank each held-out item against.", panel=EVALUATION
    )
    public: float = setting(
        0.0,
        "The share of people whose data is public. A method's public phase learns from them; metrics leave them out.",
        panel=PRIVACY,
        rank=1,
    )
    cohort: int | None = setting(
        None, "Clients drawn for each round; by default the method's own number, or all of them.", panel=TRAINING
    )
    evaluate_every: int | None = setting(
        None,
        "Evaluate every this many rounds, and after the last; by default the method's own number, or 1.",
        low=0,
        min=1,
        panel=EVALUATION,
        rank=1,
    )
    """0 never evaluates, which only a server of devices may do."""
    select: str | None = setting(
        None, "The validation metric that selects the best round; by default the method's own."
    )
    device: str = setting("cpu", "The processor to train on: cpu or cuda.", panel=TRAINING)
    fused: bool = setting(
        True,
        "Use no fused kernels: run `client` under vmap and draw each device's noise separately (slower).",
        option="--plain",
    )
    columns: dict[str, str] = setting({}, "The columns of a file of your own.", panel=OWN, keys=COLUMNS)
    data_dir: str | None = setting(
        None,
        "A folder with one subfolder per dataset; searched before $HOMEBODY_DATA and the cache.",
        panel=DATA,
        path="folder",
        rank=1,
    )
    user_features: str | None = setting(None, "A CSV or Parquet file with one row per user.", panel=OWN, path="file")
    item_features: str | None = setting(None, "A CSV or Parquet file with one row per item.", panel=OWN, path="file")
    kinds: dict[str, str] = setting(
        {},
        "A column's kind: column=categorical, multi-hot, numeric, text or sequence; guessed by default; repeat.",
        panel=OWN,
        option="--kind",
    )
    vocabularies: dict[str, str] = setting(
        {},
        "Source of a feature's values: feature=A,B,C, file:PATH, hash:64, range:0:100, private:0.5 or found; repeat.",
        panel=PRIVACY,
        option="--vocabulary",
        path="values",
        rank=1,
    )
    """See `homebody.data.vocabularies`. The data set declares the features that are not named here."""
    impressions: str | None = setting(
        None, "A CSV or Parquet file with one row per item shown.", panel=OWN, path="file"
    )
    filters: dict[str, Any] = setting(
        {}, "Use only a part of the data: core=5, min_user=20, …; repeat.", panel=DATA, option="--filter"
    )
    """See `homebody.data.filters.Filters`."""
    cutoffs: list[int] = setting(
        [5, 10, 20], "List lengths k at which metrics are computed, as in HR@k.", low=1, panel=EVALUATION
    )
    slices: list[str] = setting(
        [],
        "Also report the users with this many interactions, such as 20-30; repeat.",
        panel=EVALUATION,
        option="--slice",
    )
    stages: list[str] = setting(
        [],
        "The privacy stages that updates pass through, in order: clip:norm=0.5, secure-sum, gaussian:z=1, …; repeat.",
        panel=PRIVACY,
        option="--stage",
    )
    """Without any, the method's own channel."""
    budget: str | None = setting(
        None,
        "The privacy budget, such as eps=8,delta=1e-6,unit=user,observer=public; training stops before exceeding it.",
        panel=PRIVACY,
    )
    calibrate: bool = setting(False, "Compute the noise that just spends the budget.", panel=PRIVACY)
    delta: float = setting(DELTA, "The δ at which ε is stated if there is no budget.", panel=PRIVACY)
    views: dict[str, str] | None = setting(
        None,
        "What another app knows about people: NAME=FILE.csv, NAME=svd:size=30,share=0.5 or NAME=fedials:…; repeat.",
        panel=DATA,
        option="--view",
        path="name",
        rank=1,
    )
    """See `homebody.data.views` and docs/views.md."""
    time_format: str | None = setting(
        None, "How times are written, such as %d/%m/%Y %H:%M; by default numbers and the usual dates.", panel=OWN
    )
    separator: str | None = setting(
        None, "What stands between values: a character, or tab; found by default.", panel=OWN
    )
    encoding: str | None = setting(None, "The encoding of text files, such as latin-1; UTF-8 by default.", panel=OWN)
    no_header: bool | None = setting(
        None, "The file has no header: its columns are called 1, 2, 3 and so on.", panel=OWN, option="--no-header"
    )
    drop_missing: bool | None = setting(
        None,
        "Leave out, and count, rows without a user, item, time or rating, or with too many or too few values.",
        panel=OWN,
        option="--drop-missing",
    )
    query: str | None = setting(None, "The SELECT that a database answers with the interactions.", panel=OWN)

    def build(self) -> Method | Reference:
        """The method with its fields set."""
        from homebody.methods import build
        from homebody.privacy.specs import with_noise

        return build(self.method, self.fields, with_noise(self.stages) if self.calibrate else self.stages)

    def spends(self) -> bool:
        """Whether its channel has noise that `--calibrate` can find."""
        uplink = getattr(self.build(), "uplink", None)
        return uplink is not None and any(stage.noise_field for stage in uplink.stages)

    def unshuffled(self) -> list[str]:
        """A note where the given stages leave out the shuffle of the method's own channel."""
        from homebody.methods import own_channel
        from homebody.privacy.specs import split_stage

        given = [split_stage(text)[0] for text in self.stages]
        if not own_channel(self.method).facts.shuffled or "one-bit" not in given or "shuffle" in given:
            return []
        return [f"{self.short_method}'s own channel shuffles; these stages do not"]

    def every(self, method: Method | Reference) -> int:
        """Rounds from one evaluation to the next."""
        return method.about.evaluate_every if self.evaluate_every is None else self.evaluate_every

    def selects(self) -> str:
        """The metric that the round is chosen by.

        >>> Recipe("fedmf", "ml-1m").selects(), Recipe("privrec", "ml-1m", fields={"output": "explicit"}).selects()
        ('valid/ndcg@10', 'valid/rmse')
        """
        return self.build().scoring.select if self.select is None else self.select

    def allowed(self) -> Budget | None:
        """The budget, read and checked."""
        if self.budget is None:
            return None
        from homebody.privacy import Budget

        return Budget.parse(self.budget)

    @property
    def stated_at(self) -> float:
        """The δ that ε is stated at."""
        allowed = self.allowed()
        return allowed.delta if allowed else self.delta

    def check(self) -> None:
        """Refuse values of the wrong type, out of bounds, or that contradict one another.

        What checks δ, vocabularies, views and budgets takes seconds to import: it is imported where a recipe names any.
        """
        settings.check(self, "The recipe's ")
        if not self.cutoffs:
            raise HomebodyError("The metrics need a cut-off, such as cutoffs = [10].")
        if self.delta != DELTA:
            from homebody.privacy.budget import check_delta

            check_delta(self.delta)
        if self.separator is not None or self.encoding is not None:
            from homebody.data.origins import Layout

            Layout.of(separator=self.separator, encoding=self.encoding)
        if self.vocabularies:
            from homebody.data.vocabularies import parse

            for name, text in self.vocabularies.items():
                parse(name, text)
        if self.views:
            from homebody.data.views import parse_views

            parse_views(self.views)
        if self.calibrate and self.budget is None:
            raise HomebodyError("--calibrate finds the noise that spends a budget: give one, such as --budget eps=8.")
        self.allowed()
        if not -(2**63) <= self.seed < 2**63:
            raise HomebodyError(f"The seed must fit in 64 bits; {self.seed} does not.")

    def measured(self) -> list[int]:
        """The cut-offs that are computed: those asked for, and the one that the round is chosen by.

        >>> Recipe("fedmf", "ml-100k", cutoffs=[5]).measured()
        [5, 10]
        """
        _, at, k = (self.select or SELECT).rpartition("@")
        return sorted({*self.cutoffs, *([int(k)] if at and k.isdecimal() and int(k) else [])})

    def options(self) -> list[str]:
        """What is typed after the method to say the same, as `homebody run` takes it.

        >>> Recipe("fedmf", "ml-1m", fields={"factors": 8}, slices=["20-30"]).options()
        ['--data', 'ml-1m', '--slice', '20-30', '--set', 'factors=8']
        >>> Recipe("fedmf", "ml-1m", select="valid/ndcg@10").options()
        ['--data', 'ml-1m']
        """
        typed = dict(settings.words(self))
        if self.select is not None and self.select == replace(self, select=None).selects():
            del typed["select"]
        words = [
            *typed.pop("data"),
            *(word for name, words in typed.items() if name not in ("method", "fields") for word in words),
        ]
        for name, value in self.fields.items():
            words += ["--set", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
        return words

    def to_toml(self) -> str:
        return settings.to_toml(self, SCHEMA_VERSION)

    @classmethod
    def from_toml(cls, text: str) -> Self:
        values, version = settings.load(text, "The recipe", SCHEMA_VERSION)
        return cls.from_values(values, version)

    @classmethod
    def from_values(cls, values: dict[str, Any], version: int = SCHEMA_VERSION) -> Self:
        """A recipe from the values of a TOML table."""
        if version < 2:
            from homebody.data.vocabularies import ALL

            values = {"vocabularies": {ALL: "found"}, **values}
        recipe = settings.read(cls, values, "The recipe", "recipe field")
        recipe.check()
        return recipe

    @property
    def short_method(self) -> str:
        """The method's name, or the class of a file of one's own."""
        return self.method.rpartition(":")[2]

    @property
    def name(self) -> str:
        """A short name for a folder."""
        short = [self.short_method, Path(self.data).stem, self.protocol, f"seed{self.seed}"]
        return "-".join(part.replace(":", "_").replace(",", "_").replace("=", "")[:40] for part in short)


def parse_fields(method: str, given: Sequence[str]) -> dict[str, Any]:
    """`field=value` texts as the values of a method's fields.

    >>> parse_fields("fedmf", ["factors=8", "learning_rate=0.05"])
    {'factors': 8, 'learning_rate': 0.05}
    >>> parse_fields("fedmf", ["factor=8"])
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: There is no field of fedmf 'factor'; did you mean 'factors'? Known: batch_size, \
dual, epochs, factors, item_rate, learning_rate, negatives.
    """
    from homebody.methods import find, no_field
    from homebody.settings import params

    known = {spec.name: spec.default for spec in params(find(method))}
    values = {}
    for pair in given:
        name, equals, text = pair.partition("=")
        if not equals:
            raise HomebodyError(f"--set takes field=value, not '{pair}'.")
        if name not in known:
            raise no_field(method, name, known)
        values[name] = settings.parse(name, text, type(known[name]))
    return values


def fingerprint(parts: Mapping[str, bytes | memoryview]) -> str:
    """A short checksum of named buffers."""
    import hashlib

    digest = hashlib.sha256()
    for name, part in parts.items():
        digest.update(name.encode())
        digest.update(part)
    return digest.hexdigest()[:16]


def under_one_budget(recipes: Sequence[Recipe]) -> tuple[list[Recipe], list[str]]:
    """These recipes side by side, where a budget is to be spent: without it where no noise could spend it, and a note
    on each method of these. If there is no noise in any, all stay as they are, and are refused.

    >>> rows = [Recipe(name, "ml-100k", budget="eps=8", calibrate=True) for name in ("popularity", "nearby")]
    >>> [recipe.budget for recipe in under_one_budget(rows)[0]], under_one_budget(rows)[1]
    ([None, 'eps=8'], ['popularity has no noise that spends a budget: its row shows its own ε.'])
    """
    spending = [recipe.calibrate and recipe.spends() for recipe in recipes]
    if not any(spending):
        return list(recipes), []
    rows, without = list[Recipe](), dict[str, None]()
    for recipe, spends in zip(recipes, spending, strict=True):
        rows.append(recipe if spends else replace(recipe, budget=None, calibrate=False))
        if not spends:
            without[recipe.short_method] = None
    return rows, [f"{name} has no noise that spends a budget: its row shows its own ε." for name in without]
