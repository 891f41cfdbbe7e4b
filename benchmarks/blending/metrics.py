# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Scores answers: plain functions of texts and of top log-probabilities."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LogProbs = Mapping[int, float]
"""The log-probabilities of the most probable tokens, by token."""

RESAMPLES = 4000
_END_OF_ANSWER = re.compile(r"[.,;!?\n\"]")
_NO_WORD = re.compile(r"[^a-z0-9 ]")
_MIN_REST = 1e-12


def answer_in(text: str) -> str:
    """The text of an answer up to the end of its sentence or clause."""
    return _END_OF_ANSWER.split(text.lstrip(' "\n'), maxsplit=1)[0].strip()


def words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation and articles."""
    found = _NO_WORD.sub(" ", text.lower()).split()
    return [word for word in found if word not in ("a", "an", "the")]


def exact_match(said: str, wanted: str) -> float:
    """1 if both texts have the same words, otherwise 0."""
    return float(words(said) == words(wanted))


def divergence(reference: LogProbs, other: LogProbs) -> float:
    """Kullback-Leibler divergence of two next-token distributions, in nats.

    Each distribution has only its most probable tokens. Tokens that both distributions have count
    one by one, and all other tokens count as one token. The result is a lower bound of the
    divergence over the vocabulary.
    """
    common = reference.keys() & other.keys()
    total = sum(math.exp(reference[token]) * (reference[token] - other[token]) for token in common)
    rest, other_rest = (
        max(_MIN_REST, 1.0 - sum(math.exp(each[token]) for token in common))
        for each in (reference, other)
    )
    return total + rest * math.log(rest / other_rest)


def same_top(reference: LogProbs, other: LogProbs) -> bool:
    """Whether both distributions have the same most probable token."""
    return max(reference, key=reference.__getitem__) == max(other, key=other.__getitem__)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its confidence interval of 95 %."""

    mean: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def paired_difference(
    values: Sequence[float], reference: Sequence[float], seed: int = 0
) -> Interval:
    """The mean difference over the same questions, by a bootstrap over questions.

    Raises:
        ValueError: The numbers of values differ, or are 0.
    """
    if len(values) != len(reference) or not values:
        raise ValueError(
            f"expected values for the same questions, found {len(values)} and {len(reference)}"
        )
    differences = np.asarray(values, dtype=float) - np.asarray(reference, dtype=float)
    means = _resampled(len(differences), seed, lambda chosen: differences[chosen].mean(axis=1))
    return Interval(float(differences.mean()), *_percentiles(means))


def recovered(
    values: Sequence[float], worst: Sequence[float], best: Sequence[float], seed: int = 0
) -> Interval | None:
    """The share of the worst mode's loss against the best mode that is recovered.

    A resample in which the worst mode loses nothing is left out.

    Returns:
        None if the worst mode loses nothing.
    """
    found, low, high = (np.asarray(each, dtype=float) for each in (values, worst, best))
    lost = (high - low).mean()
    if lost <= 0:
        return None

    def shares(chosen: np.ndarray) -> np.ndarray:
        of_all = (high - low)[chosen].mean(axis=1)
        gained = (found - low)[chosen].mean(axis=1)
        return gained[of_all > 0] / of_all[of_all > 0]

    mean = float((found - low).mean() / lost)
    return Interval(mean, *_percentiles(_resampled(len(found), seed, shares)))


def _resampled(
    num_values: int, seed: int, statistic: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return statistic(rng.integers(0, num_values, (RESAMPLES, num_values)))


def _percentiles(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
