"""What a model that is given to others is: how it was trained, how good it is, and what its training told whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from homebody.report import words
from homebody.report.markdown import plain, table
from homebody.report.statement_page import NO_STAGES, sentence

__all__ = ["model_card"]

SHOWN = ("hr@10", "ndcg@10", "full/hr@10", "full/ndcg@10", "rmse", "mae", "impressions/auc", "impressions/ndcg@10")


def model_card(
    result: Mapping[str, Any],
    stated: Mapping[str, Any],
    about: Mapping[str, str],
    settings: Mapping[str, Any],
    files: Mapping[str, str],
) -> str:
    """The card as Markdown. about: title and paper. files: what lies beside it, each with what it holds.

    It names no seed: whoever knows the seed can take the noise of a simulation away again.
    """
    lines = [
        f"# {plain(about['title'] or result['method'])}, trained on {plain(result['data'])}",
        "",
        f"`{result['method']}`, trained by Homebody {stated['versions']['derived']}."
        + (f" Paper: {plain(about['paper'])}." if about["paper"] else ""),
        "",
        "## Files",
        "",
        *(f"- `{name}`: {meaning}" for name, meaning in files.items()),
        "",
        "None of them holds anybody's interactions.",
        "",
        "## How it was trained",
        "",
        *_trained(result, settings),
        "",
        "## How good it is",
        "",
        *_figures(result),
        "",
        "## What its training told whom",
        "",
        *_privacy(stated),
        "",
    ]
    return "\n".join(lines)


def _trained(result: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    yield f"- {result['rounds']:,} rounds; the parameters are those of round {result['chosen_round']:,}."
    if settings:
        yield "- Settings: " + ", ".join(f"`{name} = {value}`" for name, value in settings.items()) + "."
    if result["stopped"]:
        yield f"- {plain(result['stopped'])}"
    yield from (f"- {plain(note)}" for note in result["notes"])


def _figures(result: Mapping[str, Any]) -> Iterator[str]:
    beside: Mapping[str, Mapping[str, Any]] = result.get("references") or {}
    names = [name for name in SHOWN if name in result["metrics"]]
    if not names:
        yield "It was not measured."
        return
    rows = [
        [words.metric_name(name), *(words.number(part.get(name)) for part in (result["metrics"], *beside.values()))]
        for name in names
    ]
    yield from table(("metric", "test", *beside), rows)
    yield ""
    yield f"{plain(result['meaning'])}."
    yield from (f"\n{plain(caution)}" for caution in result.get("cautions", []))


def _privacy(stated: Mapping[str, Any]) -> Iterator[str]:
    """The statement in short; the whole of it is a file beside the card."""
    for row in stated["certified"]:
        about = "one person" if row["unit"] == "user" else row["means"]
        meaning = words.epsilon_meaning(row["epsilon"], row["delta"], about)
        yield f"- {plain(sentence(row))}." + (f" {plain(meaning.sentence)}" if row["releases"] else "")
    yield ""
    central = stated["run"]["kind"] == "centralised"
    if central:
        yield "Everyone's history was collected in one place."
    else:
        yield from _numbered([f"{stage['stage']}: {stage['means']}" for stage in stated["stages"]] or [NO_STAGES])
    yield "\nThis assumes:\n"
    yield from (f"- {plain(line)}" for line in stated["assumptions"])
    yield "\nOutside of it:\n"
    yield from (f"- {plain(line)}" for line in stated["outside"])
    yield "\n`statement.html` and `statement.json` are the whole statement."


def _numbered(lines: Sequence[str]) -> Iterator[str]:
    yield from (f"{number}. {plain(line)}" for number, line in enumerate(lines, start=1))
