# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Makes rows and a table of answers. The module imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from common.report import Table

from blending.engine import Answer, Answers
from blending.metrics import (
    Interval,
    answer_in,
    divergence,
    exact_match,
    paired_difference,
    recovered,
    same_top,
)
from blending.modes import FULL, PLAIN
from blending.prompts import Prompt, Workload

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Row:
    """One mode, for prompts with some number of missing documents.

    Attributes:
        num_missing: The number of documents of a prompt that were not stored; None for all prompts.
        computed_share: The share of the prompts' tokens that were computed.
        segment_share: The share of stored documents' tokens that were computed; None if nothing
            was stored.
        exact: The mean of exact match.
        exact_difference: The difference of exact match to full recompute.
        exact_recovered: The recovered share of plain reuse's loss; None if it loses nothing.
        divergence: The mean divergence of the answer's tokens from full recompute, in nats.
        same_top: The share of the answer's tokens with the same most probable token as in full
            recompute.
        exact_of_kind: Exact match by kind of question.
    """

    mode: str
    num_missing: int | None
    num_prompts: int
    computed_share: float
    segment_share: float | None
    exact: float
    exact_difference: Interval
    exact_recovered: Interval | None
    divergence: float
    same_top: float
    exact_of_kind: Mapping[str, float]
    p50_s: float


@dataclass(frozen=True, slots=True)
class _Scored:
    """One prompt in one mode."""

    prompt: Prompt
    answer: Answer
    stored_tokens: int
    exact: float
    divergences: list[float]
    same_tops: list[float]


def rows(workload: Workload, found: Mapping[str, Answers], decode: Decode) -> Iterator[Row]:
    """One row for every mode and number of missing documents, and for all prompts of every mode.

    Args:
        workload: The documents and prompts of all modes.
        found: The answers by the name of the mode, with full recompute.
        decode: A function from tokens to text.
    """
    reference = found[FULL.name].answers
    stored = set(workload.stored)

    def score(prompt: Prompt, answer: Answer, of_full: Answer) -> _Scored:
        # The model continues with other text behind its answer, which does not count.
        counted = range(answer_length(of_full.tokens, decode))
        spans = [prompt.tokens[first:end] for first, end in prompt.segments]
        return _Scored(
            prompt,
            answer,
            sum(len(tokens) for tokens in spans if tokens in stored),
            exact_match(answer_in(decode(answer.tokens)), prompt.answer),
            [divergence(of_full.top[n], answer.top[n]) for n in counted],
            [float(same_top(of_full.top[n], answer.top[n])) for n in counted],
        )

    scored = {
        name: list(map(score, workload.prompts, answers.answers, reference))
        for name, answers in found.items()
    }
    cells: list[int | None] = sorted({prompt.num_missing for prompt in workload.prompts})
    if len(cells) > 1:
        cells.append(None)
    for num_missing in cells:
        chosen = {
            name: [each for each in some if num_missing in (None, each.prompt.num_missing)]
            for name, some in scored.items()
        }
        full = chosen[FULL.name]
        for name, some in chosen.items():
            yield _row(name, num_missing, some, full, chosen.get(PLAIN.name, full))


def answer_length(tokens: Sequence[int], decode: Decode) -> int:
    """The number of tokens until the answer is complete."""
    whole = answer_in(decode(tokens))
    for length in range(1, len(tokens) + 1):
        if answer_in(decode(tokens[:length])) == whole:
            return length
    return len(tokens)


def _row(
    name: str,
    num_missing: int | None,
    scored: Sequence[_Scored],
    full: Sequence[_Scored],
    plain: Sequence[_Scored],
) -> Row:
    exact, full_exact, plain_exact = (
        [each.exact for each in some] for some in (scored, full, plain)
    )
    of_kind: dict[str, list[float]] = {}
    for each in scored:
        of_kind.setdefault(each.prompt.kind.value, []).append(each.exact)
    return Row(
        mode=name,
        num_missing=num_missing,
        num_prompts=len(scored),
        computed_share=sum(each.answer.computed_tokens for each in scored)
        / sum(len(each.prompt.tokens) for each in scored),
        segment_share=_segment_share(scored),
        exact=float(np.mean(exact)),
        exact_difference=paired_difference(exact, full_exact),
        exact_recovered=recovered(exact, plain_exact, full_exact),
        divergence=float(np.mean([n for each in scored for n in each.divergences])),
        same_top=float(np.mean([n for each in scored for n in each.same_tops])),
        exact_of_kind={kind: float(np.mean(values)) for kind, values in sorted(of_kind.items())},
        p50_s=float(np.median([each.answer.first_token_s for each in scored])),
    )


def _segment_share(scored: Sequence[_Scored]) -> float | None:
    reused = [each.answer.reused_tokens for each in scored]
    stored_tokens = sum(each.stored_tokens for each in scored)
    if not stored_tokens or all(tokens is None for tokens in reused):
        return None
    return 1 - sum(tokens or 0 for tokens in reused) / stored_tokens


TABLE = Table(
    "mode:<19",
    "missing:>7",
    "n:>4",
    "computed:>8",
    "of segments:>11",
    "EM:>4",
    "difference:>20",
    "recovered:>20",
    "KL:>6",
    "top-1:>5",
    "p50 s:>6",
    "EM by kind:<10",
)


def line(row: Row) -> str:
    """One row of the table."""
    return TABLE.line(
        row.mode,
        _cell(row.num_missing),
        row.num_prompts,
        f"{row.computed_share:.1%}",
        None if row.segment_share is None else f"{row.segment_share:.1%}",
        f"{row.exact:.0%}",
        f"{row.exact_difference:+.0%}",
        None if row.exact_recovered is None else f"{row.exact_recovered:.0%}",
        f"{row.divergence:.3f}",
        f"{row.same_top:.0%}",
        f"{row.p50_s:.2f}",
        ", ".join(f"{kind} {share:.0%}" for kind, share in row.exact_of_kind.items()),
    )


def _cell(num_missing: int | None) -> str:
    return "all" if num_missing is None else str(num_missing)


def storing(workload: Workload, answers: Answers) -> str:
    """The line about the cost of storing the documents."""
    num_tokens = sum(map(len, workload.stored))
    seconds = sum(answers.store_s)
    return (
        f"stored before: {len(workload.stored)} documents, {num_tokens:,} tokens, in "
        f"{seconds:.1f} s ({num_tokens / seconds:.0f} tokens/s)"
    )
