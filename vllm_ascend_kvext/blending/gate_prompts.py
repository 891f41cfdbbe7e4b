# SPDX-License-Identifier: Apache-2.0
"""What a model is asked before its segments are reused: prompts of random tokens.

*In place*: a segment stands where it was stored, behind the same sink. Whichever of its tokens are
reused, all KV is exact, so the answer has to be that of a prompt without reuse::

    stored      [sink][segment                     ]
    in place    [sink][segment                     ] others  copy
    reused               -----     -----     -----

*Moved*: segments stand elsewhere, behind each other, so answers differ. They are asked for with
segments as they are stored, and with what is repaired of them.

Prompts end with a copy of some tokens of a segment, so that models which retrieve have something to
find; see ``layer_search``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ascend_kvext.blending.errors import BlendingError
from vllm_ascend_kvext.blending.segments import Segment
from vllm_ascend_kvext.holes.span_plan import Run

NUM_SEGMENTS = 3
"""That are stored, each of them with a prompt in place."""

NUM_MOVED = 6
"""Prompts with several of them."""

LEAST_SEGMENT_TOKENS = 96
_LEAST_REUSED_TOKENS = 48
"""Of each segment that is moved."""

_REPEATED_TOKENS = 32
"""First tokens of a segment that occur in it once more: their keys are compared."""

_COPY_TOKENS = 12
_OTHER_TOKENS = 9
"""No multiple of a page."""

_NUM_PARTS = 7
"""Of a segment in place: every second one is reused."""


@dataclass(frozen=True, slots=True)
class GatePrompt:
    """A prompt in which a model's segments are reused.

    Attributes:
        token_ids: All of it.
        segments: Where the stored ones stand; ascending.
    """

    token_ids: tuple[int, ...]
    segments: tuple[Segment, ...]

    def without(self, runs: Sequence[Run], others: Sequence[int]) -> tuple[int, ...]:
        """The tokens, with others in place of some.

        Args:
            runs: What is replaced.
            others: At least as many tokens as the prompt has.
        """
        token_ids = list(self.token_ids)
        for run in runs:
            first, end = run
            token_ids[first:end] = others[first:end]
        return tuple(token_ids)


@dataclass(frozen=True, slots=True)
class GatePrompts:
    """All that a model is asked.

    Attributes:
        segments: That are stored, without the sink.
        in_place: For each segment, a prompt that begins with it.
        moved: Prompts with several of them.
        others: Random tokens, as many as the longest prompt has.
    """

    segments: tuple[tuple[int, ...], ...]
    in_place: tuple[GatePrompt, ...]
    moved: tuple[GatePrompt, ...]
    others: tuple[int, ...]


def make_prompts(
    sink_ids: Sequence[int],
    vocabulary_tokens: int,
    repaired_tokens: int,
    least_reused_tokens: int,
    page_tokens: int,
    most_prompt_tokens: int,
) -> GatePrompts:
    """Random tokens, the same at each call.

    Args:
        sink_ids: What segments are computed behind.
        vocabulary_tokens: Of the model. Its first and last quarter are left out: special tokens
            are there.
        repaired_tokens: What is computed at least of each reused segment, from its beginning on.
        least_reused_tokens: Fewer are not reused.
        page_tokens: Of the largest pages. Segments lie in several, and what is reused of them too.
        most_prompt_tokens: That there is room for.

    Raises:
        BlendingError: There is no room for a segment that would be reused.
    """
    segment_tokens = max(
        LEAST_SEGMENT_TOKENS,
        2 * page_tokens,
        2 * repaired_tokens,
        repaired_tokens + max(_LEAST_REUSED_TOKENS, least_reused_tokens),
    )
    fixed_tokens = len(sink_ids) + _OTHER_TOKENS + _COPY_TOKENS
    num_together = min(NUM_SEGMENTS, (most_prompt_tokens - fixed_tokens) // segment_tokens)
    if num_together < 1:
        raise BlendingError(
            f"model check: expected room for a prompt of {fixed_tokens + segment_tokens} tokens, "
            f"in which a segment of {segment_tokens} is reused, found room for "
            f"{most_prompt_tokens}. Give the engine a longer context or more KV blocks, or serve "
            "this model without blending."
        )
    draw = _Draw(vocabulary_tokens)
    segments = tuple(draw.segment(segment_tokens) for _ in range(NUM_SEGMENTS))
    sink = tuple(sink_ids)
    in_place = tuple(draw.in_place(sink, segment) for segment in segments)
    moved = []
    for number in range(NUM_MOVED):
        together = [segments[(number + each) % NUM_SEGMENTS] for each in range(num_together)]
        moved.append(draw.moved(sink, together))
    num_others = max(len(prompt.token_ids) for prompt in (*in_place, *moved))
    return GatePrompts(segments, in_place, tuple(moved), draw.tokens(num_others))


class _Draw:
    """Random tokens."""

    def __init__(self, vocabulary_tokens: int) -> None:
        self._rng = random.Random(0)
        first_id = vocabulary_tokens // 4
        self._ids = range(first_id, first_id + max(1, vocabulary_tokens // 2))

    def tokens(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(self._ids, k=num_tokens))

    def segment(self, num_tokens: int) -> tuple[int, ...]:
        tokens = self.tokens(num_tokens - _REPEATED_TOKENS)
        return tokens + tokens[:_REPEATED_TOKENS]

    def in_place(self, sink: tuple[int, ...], segment: tuple[int, ...]) -> GatePrompt:
        token_ids = (*sink, *segment, *self.tokens(_OTHER_TOKENS), *self._copy(segment))
        return GatePrompt(token_ids, (Segment(len(sink), len(sink) + len(segment)),))

    def moved(self, sink: tuple[int, ...], segments: Sequence[tuple[int, ...]]) -> GatePrompt:
        token_ids = sink + self.tokens(_OTHER_TOKENS)
        places = []
        for segment in segments:
            places.append(Segment(len(token_ids), len(token_ids) + len(segment)))
            token_ids += segment
        return GatePrompt(token_ids + self._copy(self._rng.choice(segments)), tuple(places))

    def _copy(self, segment: tuple[int, ...]) -> tuple[int, ...]:
        """Some that occur in a segment once."""
        end = len(segment) - _REPEATED_TOKENS - _COPY_TOKENS
        first = self._rng.randrange(_REPEATED_TOKENS, end)
        return segment[first : first + _COPY_TOKENS]


def parts_of(segment: Segment) -> tuple[Run, ...]:
    """Every second part of a segment; neither its first tokens nor its last ones."""
    ends = [
        segment.first_tokens + segment.num_tokens * part // _NUM_PARTS
        for part in range(1, _NUM_PARTS)
    ]
    return tuple(Run(*ends[part : part + 2]) for part in range(0, len(ends), 2))
