"""The figures of docs/accounting.md on news methods are those that the code gives."""

from __future__ import annotations

import re
from math import exp, log, sqrt
from pathlib import Path

import numpy as np

from homebody.privacy.accountant import epsilon
from homebody.privacy.queries import Attention, analytic_multiplier, attention_l1, attention_l2, before_padding

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "accounting.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## News: interests, clicks and gradients\n")[2].partition("\n## ")[0]
DELTA = 1e-3


def rows(head: str) -> list[list[str]]:
    """The cells of the table whose head begins so."""
    table = SECTION.partition(f"| {head} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in table]


def test_what_printed_noise_certifies() -> None:
    table = rows("padding p")
    assert [row[0] for row in table] == ["0", "0.2", "0.5", "0.8"]
    for p, sigma, click, history in table:
        hidden = float(p)
        inside, small = before_padding(10.0, DELTA, hidden)
        event = Attention(inside, small, noise="gaussian", guarantee="published", size=5).event
        printed = sqrt(2 * log(1.25 / small)) / inside
        assert f"{printed:.4f}" == sigma
        amplified = log(hidden + (1 - hidden) * exp(epsilon([(event, 1)], small).epsilon))
        assert f"{amplified:.2f}" == click
        assert f"{epsilon([(event, 1)], DELTA).epsilon:.2f}" == history


def test_classical_and_analytic_noise() -> None:
    for text, classical, analytic in rows("ε"):
        assert f"{sqrt(2 * log(1.25 / DELTA)) / float(text):.3f}" == classical
        assert f"{analytic_multiplier(float(text), DELTA):.3f}" == analytic


def test_every_number_in_the_text_has_a_source() -> None:
    said = re.sub(r"```.*?```", "", SECTION, flags=re.DOTALL)
    assert "n = 160,000 its ε of 10 is 4,000" in said
    assert 10 * sqrt(160_000) == 4_000
    assert f"σ = {sqrt(2) * analytic_multiplier(10.0, DELTA):.4f} θ certifies ε = 10.00" in said


def test_no_two_attentions_are_farther_apart_than_the_page_says() -> None:
    """Random and extreme pairs; the extremes come within a thousandth of both bounds."""
    draw = np.random.default_rng(0)
    for theta in (0.4, 0.6, 1.0, 2.0):
        for basis in (2, 5, 16):
            one, other = (_clipped(draw.dirichlet(np.full(basis, 0.2), 2_000), theta) for _ in range(2))
            assert np.linalg.norm(one - other, axis=1).max() <= attention_l2(theta)
            assert np.abs(one - other).sum(1).max() <= attention_l1(theta, basis)
            evenly = [np.repeat([1 / places, 0.0], [places, basis - places]) for places in range(1, basis)]
            rest = [np.repeat([0.0, 1 / (basis - places)], [places, basis - places]) for places in range(1, basis)]
            first, last = _clipped(np.array(evenly), theta), _clipped(np.array(rest), theta)
            assert np.abs(first - last).sum(1).max() >= 0.999 * attention_l1(theta, basis)
            ends = _clipped(np.eye(basis)[:2], theta)
            assert np.linalg.norm(ends[0] - ends[1]) >= 0.999 * attention_l2(theta)


def _clipped(weights: np.ndarray, theta: float) -> np.ndarray:
    return weights * np.minimum(1.0, theta / np.linalg.norm(weights, axis=1, keepdims=True))
