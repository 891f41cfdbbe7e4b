# SPDX-License-Identifier: Apache-2.0
"""From answers to rows, a table and verdicts. Imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from blending.answers import Answer, Answers
from blending.metrics import (
    Interval,
    answer_in,
    divergence,
    exact_match,
    f1,
    paired_difference,
    recovered,
    same_top,
)
from blending.modes import (
    FULL,
    HEADS_16,
    HEADS_16_TEXT,
    PLAIN,
    PREFIX_CACHING,
    QUESTION_10,
    QUESTION_10_TEXT,
)
from blending.prompts import Prompt, Workload
from blending.questions import Kind

Decode = Callable[[Sequence[int]], str]

LEAST_RECOVERED = 0.9
MOST_COMPUTED = 0.2
LEAST_SPEED_UP = 2.0


@dataclass(frozen=True, slots=True)
class Row:
    """One mode, for prompts with some number of missing documents.

    Attributes:
        mode: Its name.
        num_missing: Documents of a prompt that nobody has stored; None: all prompts.
        num_prompts: Measured.
        computed_share: Of the prompts' tokens, that were computed.
        segment_share: Of the tokens of stored documents, that were computed; None: nothing was
            stored.
        exact: Exact match, mean.
        exact_difference: To full recompute.
        f1: Mean.
        f1_difference: To full recompute.
        exact_recovered: Share of what plain reuse loses; None: it loses nothing.
        divergence: Of the answer's tokens from full recompute's, in nats, mean.
        same_top: Share of the answer's tokens whose most probable one is full recompute's.
        exact_of_kind: Exact match by kind of question.
        p50_s: Time to the first token, median.
        p99_s: Time to the first token.
    """

    mode: str
    num_missing: int | None
    num_prompts: int
    computed_share: float
    segment_share: float | None
    exact: float
    exact_difference: Interval
    f1: float
    f1_difference: Interval
    exact_recovered: Interval | None
    divergence: float
    same_top: float
    exact_of_kind: Mapping[str, float]
    p50_s: float
    p99_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Scored:
    """One prompt in one mode."""

    prompt: Prompt
    answer: Answer
    stored_tokens: int
    exact: float
    f1: float
    divergences: list[float]
    same_tops: list[float]


def rows(workload: Workload, found: Mapping[str, Answers], decode: Decode) -> Iterator[Row]:
    """By number of missing documents and of all prompts, of every mode.

    Args:
        workload: That all modes were asked.
        found: By the name of the mode, full recompute among them.
        decode: Tokens to text.
    """
    reference = found[FULL.name].answers
    stored = set(workload.stored)
    of_cells = sorted({prompt.num_missing for prompt in workload.prompts})
    for num_missing in (*of_cells, *([None] if len(of_cells) > 1 else [])):
        chosen = [
            number
            for number, prompt in enumerate(workload.prompts)
            if num_missing in (None, prompt.num_missing)
        ]
        scored = {
            name: [
                _score(workload.prompts[n], answers.answers[n], reference[n], decode, stored)
                for n in chosen
            ]
            for name, answers in found.items()
        }
        for name, of_mode in scored.items():
            yield _row(name, num_missing, of_mode, scored[FULL.name], scored.get(PLAIN.name))


def _score(
    prompt: Prompt,
    answer: Answer,
    reference: Answer,
    decode: Decode,
    stored: Collection[tuple[int, ...]],
) -> _Scored:
    said = answer_in(decode(answer.tokens))
    counted = range(answer_length(reference.tokens, decode))
    return _Scored(
        prompt,
        answer,
        sum(end - first for first, end in prompt.segments if prompt.tokens[first:end] in stored),
        exact_match(said, prompt.answer),
        f1(said, prompt.answer),
        [divergence(reference.top[n], answer.top[n]) for n in counted],
        [float(same_top(reference.top[n], answer.top[n])) for n in counted],
    )


def answer_length(tokens: Sequence[int], decode: Decode) -> int:
    """Tokens until the answer is complete; behind it the model goes on with something else."""
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
    plain: Sequence[_Scored] | None,
) -> Row:
    exact, full_exact = ([each.exact for each in some] for some in (scored, full))
    f1s, full_f1s = ([each.f1 for each in some] for some in (scored, full))
    plain_exact = [each.exact for each in plain] if plain is not None else full_exact
    seconds = [each.answer.first_token_s for each in scored]
    of_kind = {
        kind.value: float(np.mean([each.exact for each in scored if each.prompt.kind is kind]))
        for kind in Kind
        if any(each.prompt.kind is kind for each in scored)
    }
    return Row(
        mode=name,
        num_missing=num_missing,
        num_prompts=len(scored),
        computed_share=sum(each.answer.computed_tokens for each in scored)
        / sum(len(each.prompt.tokens) for each in scored),
        segment_share=_segment_share(scored),
        exact=float(np.mean(exact)),
        exact_difference=paired_difference(exact, full_exact),
        f1=float(np.mean(f1s)),
        f1_difference=paired_difference(f1s, full_f1s),
        exact_recovered=recovered(exact, plain_exact, full_exact),
        divergence=float(np.mean([n for each in scored for n in each.divergences])),
        same_top=float(np.mean([n for each in scored for n in each.same_tops])),
        exact_of_kind=of_kind,
        p50_s=float(np.percentile(seconds, 50)),
        p99_s=float(np.percentile(seconds, 99)),
    )


def _segment_share(scored: Sequence[_Scored]) -> float | None:
    if all(each.answer.reused_tokens is None for each in scored):
        return None
    stored_tokens = sum(each.stored_tokens for each in scored)
    if not stored_tokens:
        return None
    return 1 - sum(each.answer.reused_tokens or 0 for each in scored) / stored_tokens


HEAD = (
    f"{'mode':19} {'missing':>7} {'n':>4} | {'computed':>8} {'of segments':>11} | {'EM':>4} "
    f"{'difference':>20} {'F1':>4} {'difference':>20} {'recovered':>20} | {'KL':>6} {'top-1':>5} | "
    f"{'p50':>7} {'p99':>7} | EM by kind"
)


def line(row: Row) -> str:
    """One row of the table."""
    kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in row.exact_of_kind.items())
    of_segments = "" if row.segment_share is None else f"{row.segment_share:.1%}"
    exact, f1s = f"{row.exact_difference:+.0%}", f"{row.f1_difference:+.0%}"
    regained = "" if row.exact_recovered is None else f"{row.exact_recovered:.0%}"
    cell = _cell(row.num_missing)
    return (
        f"{row.mode:19} {cell:>7} {row.num_prompts:4} | {row.computed_share:8.1%} "
        f"{of_segments:>11} | {row.exact:4.0%} {exact:>20} {row.f1:4.0%} {f1s:>20} {regained:>20} "
        f"| {row.divergence:6.3f} {row.same_top:5.0%} | {row.p50_s:6.2f}s {row.p99_s:6.2f}s | "
        f"{kinds}"
    )


def _cell(num_missing: int | None) -> str:
    return "all" if num_missing is None else str(num_missing)


def storing(workload: Workload, answers: Answers) -> str:
    """What it cost to store the documents."""
    num_tokens = sum(map(len, workload.stored))
    seconds = sum(answers.store_s)
    return (
        f"stored before: {len(workload.stored)} documents, {num_tokens:,} tokens, in "
        f"{seconds:.1f} s ({num_tokens / seconds:.0f} tokens/s)"
    )


def verdicts(found: Sequence[Row]) -> Iterator[str]:
    """What was expected, and whether it holds, for every number of missing documents."""
    by_name = {(row.mode, row.num_missing): row for row in found}
    for num_missing in dict.fromkeys(row.num_missing for row in found):
        full = by_name[FULL.name, num_missing]
        cached = by_name.get((PREFIX_CACHING.name, num_missing))
        for mode in (HEADS_16, QUESTION_10, HEADS_16_TEXT, QUESTION_10_TEXT):
            row = by_name.get((mode.name, num_missing))
            if row is None:
                continue
            what = f"{mode.name}, {_cell(num_missing)} missing"
            if row.exact_recovered is not None:
                is_met = row.exact_recovered.mean >= LEAST_RECOVERED
                yield _verdict(is_met, f"{what}: recovers {row.exact_recovered:.0%} of exact match")
            if row.segment_share is not None:
                is_met = row.segment_share <= MOST_COMPUTED
                yield _verdict(
                    is_met, f"{what}: computes {row.segment_share:.1%} of what is stored"
                )
            speed_up = full.p50_s / row.p50_s
            is_met = speed_up >= LEAST_SPEED_UP
            yield _verdict(
                is_met, f"{what}: first token {speed_up:.1f} x sooner than full recompute"
            )
            if cached is not None:
                speed_up = cached.p50_s / row.p50_s
                sooner = f"{what}: first token {speed_up:.1f} x sooner than prefix caching alone"
                yield _verdict(speed_up > 1, sooner)


def _verdict(is_met: bool, text: str) -> str:
    return f"{'met' if is_met else 'NOT MET':8} {text}"
