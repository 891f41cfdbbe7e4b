# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The answers of engines, and their differences from other answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LOGPROB_TOLERANCE = 1e-4
"""The tolerance in fp32. Prefilling in other chunks changes nothing.

A wrong block changes 2 to 3.
"""

NPU_TOLERANCE = 1e-3
"""The tolerance on the emulated NPU, in fp32. Rounding changes less than a tenth of it."""

WRONG = 0.1
"""The least change that an answer must show where it read wrong pages."""


@dataclass(frozen=True)
class Answer:
    """The result of one request. Values that an engine does not report are empty.

    Attributes:
        hit_tokens: The prompt's tokens that were not computed.
        logprobs: For each step of the reply: the five best tokens, and the token of the reply.
        segments: The first and end token of segments that the request named.
        params: What the response says about segments. None for a plain request.
        probe: The scores of the request's question.
    """

    prompt_tokens: int
    hit_tokens: int
    reply: list[int]
    logprobs: list[dict[str, float]]
    prompt: Sequence[int] = ()
    segments: Sequence[Sequence[int]] = ()
    params: Mapping[str, int] | None = None
    probe: Mapping[str, Any] | None = None

    @property
    def exact_tokens(self) -> int:
        return self.params["kvext_exact_tokens"] if self.params else self.prompt_tokens

    @property
    def reused_tokens(self) -> int:
        return self.params["kvext_reused_tokens"] if self.params else 0


@dataclass(frozen=True)
class Served:
    """The report of one engine, and the log of its process."""

    report: Mapping[str, Any]
    log: str

    @property
    def labels(self) -> list[str]:
        return list(self.report["asked"])

    def answers(self, label: str) -> list[Answer]:
        return [Answer(**answer) for answer in self.report["asked"][label]["answers"]]

    def hit_tokens(self, label: str) -> list[int]:
        return [answer.hit_tokens for answer in self.answers(label)]

    def counted(self, label: str, name: str) -> int:
        """A counter of the engine: its increase while ``label`` was answered."""
        return int(self.report["asked"][label]["counted"].get(name, 0))

    def counted_in_all(self, name: str, labels: Iterable[str] | None = None) -> int:
        """The sum of a counter over some labels, or over all labels."""
        return sum(self.counted(label, name) for label in labels or self.labels)

    def kept_blocks(self, label: str, kind: str) -> list[int]:
        """The cached blocks of each group of one kind, right after ``label`` was answered."""
        kept: list[int] = self.report["asked"][label]["kept_blocks"][kind]
        return kept

    def logprob_error(self, label: str, reference: Served) -> float:
        """The largest difference of a top-5 log-probability from the reference's."""
        return max(self.logprob_errors(label, reference))

    def logprob_errors(self, label: str, reference: Served) -> list[float]:
        """The largest difference in each answer."""
        return errors(self.answers(label), reference.answers(label))

    def check_equal(
        self,
        reference: Served,
        labels: Iterable[str],
        tolerance: float | Callable[[str], float] = LOGPROB_TOLERANCE,
    ) -> float:
        """Assert that answers equal the reference's. Return the largest difference.

        Differences and tolerances are those of log-probabilities. The tolerance may depend on the
        label.
        """
        error_of = {label: self.logprob_error(label, reference) for label in labels}
        for label, error in error_of.items():
            replies = [answer.reply for answer in self.answers(label)]
            assert replies == [answer.reply for answer in reference.answers(label)], label
            assert error <= (tolerance(label) if callable(tolerance) else tolerance), error_of
        return max(error_of.values())

    def check_nothing_is_left(self) -> None:
        """Assert that requests have released everything."""
        assert set(self.report["left"].values()) == {0}, self.report["left"]


def _largest(differences: Iterable[float]) -> float:
    """The largest difference. It is infinite if one is NaN, because ``max`` would ignore NaN."""
    return max(math.inf if math.isnan(each) else each for each in differences)


def errors(answers: Sequence[Answer], references: Sequence[Answer]) -> list[float]:
    return [logprob_error(*both) for both in zip(answers, references, strict=True)]


def logprob_error(answer: Answer, reference: Answer) -> float:
    """The largest difference of a top-5 log-probability from the reference's.

    The reply may be shorter than the reference's.
    """
    steps = reference.logprobs[: len(answer.logprobs)]
    return _largest(
        abs(logprob - theirs.get(token, min(theirs.values())))
        for step, theirs in zip(answer.logprobs, steps, strict=True)
        for token, logprob in step.items()
    )


def oracle_error(log_probabilities: Any, answer: Answer) -> float:
    """The largest difference from the log-probabilities of an oracle. shape: [steps, tokens]."""
    return _largest(
        abs(float(of_token[int(token)]) - logprob)
        for of_token, step in zip(log_probabilities, answer.logprobs, strict=True)
        for token, logprob in step.items()
    )
