# SPDX-License-Identifier: Apache-2.0
"""Whether a model's answers say that its segments may be reused; see ``gate_prompts``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import NamedTuple

Answer = Mapping[int, float]
"""Log-probabilities of the likeliest next tokens, by token id."""

LEAST_LIMITS = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 1e-1}
"""By the type of a model: nats that sums in another order may change a log-probability by, where
two runs without reuse happen to agree."""

NOISE_FACTOR = 4
"""A difference of so many times that of two runs without reuse is not told from it."""


SURE_ERRORS = 2.0
"""Standard errors by which repair has to take answers further away: 95 % of models where it does
nothing pass."""


class InPlace(NamedTuple):
    """Answers to a prompt whose reused KV is exact.

    Attributes:
        alone: Nothing is reused, and nothing computed beside it.
        beside: Nothing is reused, and it is computed beside others.
        reused: Parts of it are reused.
        other: Nothing is reused, and other tokens stand in place of these parts.
    """

    alone: Answer
    beside: Answer
    reused: Answer
    other: Answer


class Moved(NamedTuple):
    """Answers to a prompt whose segments stand elsewhere.

    Attributes:
        alone: Nothing is reused.
        as_stored: Segments are reused as they are.
        repaired: What the engine's options say is computed of them.
    """

    alone: Answer
    as_stored: Answer
    repaired: Answer


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """What was found.

    Attributes:
        passed: Whether segments may be reused.
        message: The numbers behind it.
    """

    passed: bool
    message: str


def judge(in_place: Sequence[InPlace], moved: Sequence[Moved], dtype: str) -> GateVerdict:
    """Judge a model.

    Args:
        in_place: At least one.
        moved: Empty where it does not matter: published results disagree on whether recomputing
            helps models with sliding windows, so these are asked.
        dtype: Of the model, by torch's name without its module.
    """
    reused = max(difference(each.alone, each.reused) for each in in_place)
    noise = max(difference(each.alone, each.beside) for each in in_place)
    other = min(difference(each.alone, each.other) for each in in_place)
    limit = max(NOISE_FACTOR * noise, LEAST_LIMITS.get(dtype, LEAST_LIMITS["bfloat16"]))
    numbers = (
        f"log-probabilities differ by {reused:.2g} where segments are reused in place, by "
        f"{noise:.2g} between two runs without reuse, by {other:.2g} with other tokens there"
    )
    if not (math.isfinite(reused) and reused <= limit):  # The limit may be no number either.
        return GateVerdict(
            False,
            f"{numbers}: expected at most {limit:.2g} of reuse in place. What is stored, loaded or "
            "computed between segments is not what the model computes. Serve it without blending, "
            "and report it.",
        )
    if other <= limit:
        numbers += f": with a limit of {limit:.2g} that says nothing about what is reused in place"
    if not moved:
        return GateVerdict(True, numbers)
    as_stored = [difference(each.alone, each.as_stored) for each in moved]
    repaired = [difference(each.alone, each.repaired) for each in moved]
    numbers += f"; moved, by {mean(as_stored):.2g} as stored and {mean(repaired):.2g} repaired"
    gains = [before - after for before, after in zip(as_stored, repaired, strict=True)]
    are_numbers = all(map(math.isfinite, gains))
    if not (are_numbers and mean(gains) >= -max(limit, SURE_ERRORS * _standard_error(gains))):
        return GateVerdict(
            False,
            f"{numbers}: expected that computing the first tokens of segments brings answers "
            "nearer. It takes them further away in this model, which has sliding windows. Serve it "
            "without blending.",
        )
    return GateVerdict(True, numbers)


def _standard_error(numbers: Sequence[float]) -> float:
    """Of their mean."""
    return stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else 0.0


def difference(wanted: Answer, found: Answer) -> float:
    """Mean absolute difference of the tokens that are likeliest without reuse, in nats.

    A token that is not among the others' likeliest counts as if it were the last of them. Infinite
    if some are no numbers.
    """
    if not wanted or not found:
        return math.inf
    last = min(found.values())
    pairs = [(value, found.get(token, last)) for token, value in wanted.items()]
    # Tokens that a model never answers have infinite ones.
    found_mean = mean(
        0.0 if one == other == -math.inf else abs(one - other) for one, other in pairs
    )
    return found_mean if math.isfinite(found_mean) else math.inf
