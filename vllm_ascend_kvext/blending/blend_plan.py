# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a prompt are reused from segments, and which are computed.

A segment that was computed by itself has made its own first tokens an attention sink, and has not
seen what stands before it. Computing its first tokens anew takes most of the harm away (EPIC,
arXiv 2410.15332): they are its *head*::

    prompt      [exact   |segment A         |segment B, unknown|segment C         |question]
    computed              hhhh               =================== hhhh               ========
    reused                    --------------                        --------------

Pure functions of lengths. The last token is always computed: its output is wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_ascend_kvext.blending.segments import Segment
from vllm_ascend_kvext.holes.span_plan import Run


@dataclass(frozen=True, slots=True)
class BlendPlan:
    """The spans of a prompt behind its exact beginning.

    Attributes:
        exact_tokens: Before it, everything is exact.
        reused: Ascending; approximate from the first of them on.
        holes: What is computed before `resume_tokens`, ascending.
        resume_tokens: From here on all is computed, by the request itself.
    """

    exact_tokens: int
    reused: tuple[Run, ...]
    holes: tuple[Run, ...]
    resume_tokens: int

    @property
    def reused_tokens(self) -> int:
        return sum(run.num_tokens for run in self.reused)


def behind_head(
    segment: Segment, stored_tokens: int, head_tokens: int, least_head_tokens: int = 0
) -> Run | None:
    """What is reused of one segment if its head is computed; None if that is nothing.

    Args:
        segment: Where it stands.
        stored_tokens: How much of it is stored, from its beginning on.
        head_tokens: Length of a head; 0 reuses segments as they are. A segment shorter than twice
            that is computed whole.
        least_head_tokens: The same for all segments, whatever their length.
    """
    if segment.num_tokens < 2 * head_tokens:
        return None
    first_tokens = segment.first_tokens + max(head_tokens, least_head_tokens)
    end_tokens = segment.first_tokens + stored_tokens
    return Run(first_tokens, end_tokens) if first_tokens < end_tokens else None


def plan_blend(
    num_tokens: int, exact_tokens: int, candidates: Iterable[Run], least_run_tokens: int
) -> BlendPlan | None:
    """Plan a prompt.

    Args:
        num_tokens: Of the prompt, and of what was generated before the request was preempted.
        exact_tokens: Its exact beginning.
        candidates: What may be reused, ascending and disjoint.
        least_run_tokens: A shorter run is computed.

    Returns:
        None if nothing is reused.
    """
    reused: list[Run] = []
    for candidate in candidates:
        run = Run(max(candidate.first_tokens, exact_tokens), candidate.end_tokens)
        run = Run(run.first_tokens, min(run.end_tokens, num_tokens - 1))
        if run.num_tokens >= max(1, least_run_tokens):
            reused.append(run)
    if not reused:
        return None
    return BlendPlan(
        exact_tokens,
        tuple(reused),
        tuple(_between(exact_tokens, reused)),
        reused[-1].end_tokens,
    )


def _between(first_tokens: int, runs: Sequence[Run]) -> Iterable[Run]:
    for run in runs:
        if first_tokens < run.first_tokens:
            yield Run(first_tokens, run.first_tokens)
        first_tokens = run.end_tokens
