# SPDX-License-Identifier: Apache-2.0
"""Which parts of a prompt are segments, and which of their tokens are reused.

A segment is a text that is known by itself, such as a document, wherever it stands in a prompt: a
request says so, or it stands between separators. One that was computed by itself has made its own
first tokens an attention sink, and has not seen what stands before it. Computing its first tokens
anew takes most of the harm away (EPIC, arXiv 2410.15332): they are its *head*::

    prompt      [exact   |segment A         |segment B, unknown|segment C         |question]
    computed              hhhh               =================== hhhh               ========
    reused                    --------------                        --------------

Pure functions. The last token is always computed: its output is wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from vllm_ascend_kvext.errors import SegmentError
from vllm_ascend_kvext.request_arguments import is_integer, read_argument, shown, truth_of
from vllm_ascend_kvext.token_range import TokenRange, without

SEGMENTS_KEY = "kvext_segments"
STORE_KEY = "kvext_store_segment"


def named_segments(
    extra_args: Mapping[str, Any] | None, num_tokens: int
) -> list[TokenRange] | None:
    """The segments that a request names, ascending, without empty ones; None if it names none.

    In its sampling parameters, `SEGMENTS_KEY` holds pairs of first and end token: lists, or their
    JSON text. ``num_tokens`` is the length of the prompt.

    Raises:
        SegmentError: If they are something else, overlap, or lie outside the prompt.
    """
    value = read_argument(extra_args, SEGMENTS_KEY)
    if value is None:
        return None
    named = sorted(_parse(value))
    for segment in named:
        if not 0 <= segment.first_tokens <= segment.end_tokens <= num_tokens:
            raise _wrong(list(segment), f"first < end, from 0 to the prompt's {num_tokens} tokens")
    segments = [segment for segment in named if segment.num_tokens]
    for before, after in pairwise(segments):
        if after.first_tokens < before.end_tokens:
            raise _wrong([list(before), list(after)], "segments that do not overlap")
    return segments


def is_to_be_stored(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether the prompt of a request is a segment that is to be stored.

    Raises:
        SegmentError: If `STORE_KEY` is no truth value.
    """
    value = read_argument(extra_args, STORE_KEY)
    if value is None:
        return False
    truth = truth_of(value)
    if truth is None:
        raise SegmentError(
            f"{STORE_KEY}: expected true or false, found {shown(value)}. The prompt was computed, "
            "and not stored as a segment: correct it."
        )
    return truth


def separated_segments(token_ids: Sequence[int], separator: Sequence[int]) -> list[TokenRange]:
    """What stands between two separators that follow each other.

    What stands before the first one and behind the last one is no segment: instructions and the
    question. The separators themselves are computed. Ascending, without empty ones.
    """
    starts = _find_all(token_ids, separator)
    width = len(separator)
    return [
        TokenRange(first + width, end) for first, end in pairwise(starts) if first + width < end
    ]


def _find_all(token_ids: Sequence[int], separator: Sequence[int]) -> list[int]:
    """Where a separator begins, from the left; those that overlap one before are left out."""
    wanted = list(separator)
    tokens = list(token_ids)
    found: list[int] = []
    position = 0
    while True:
        try:
            position = tokens.index(wanted[0], position)
        except ValueError:
            return found
        if tokens[position : position + len(wanted)] == wanted:
            found.append(position)
            position += len(wanted)
        else:
            position += 1


def _parse(value: Any) -> list[TokenRange]:
    is_list = isinstance(value, (list, tuple))
    if not is_list or not all(_is_pair(pair) for pair in value):
        raise _wrong(
            value, "a list of pairs of integers, or its JSON text: first and end token of each"
        )
    return [TokenRange(*pair) for pair in value]


def _is_pair(value: Any) -> bool:
    is_list = isinstance(value, (list, tuple))
    return is_list and len(value) == 2 and all(map(is_integer, value))


def _wrong(value: object, expected: str) -> SegmentError:
    return SegmentError(
        f"{SEGMENTS_KEY}: expected {expected}, found {shown(value)}. The prompt was computed "
        "without reusing segments: correct them."
    )


class BlendPlan(NamedTuple):
    """The spans of a prompt behind its exact beginning, ascending.

    ``reused`` is loaded and ``holes`` are computed; all behind is computed by the request itself.
    """

    reused: tuple[TokenRange, ...]
    holes: tuple[TokenRange, ...]

    @property
    def resume_tokens(self) -> int:
        return self.reused[-1].end_tokens


def behind_head(
    segment: TokenRange, stored_tokens: int, head_tokens: int, min_head_tokens: int = 0
) -> TokenRange | None:
    """What is reused of a segment of which ``stored_tokens`` are stored; None if that is nothing.

    A segment shorter than twice its head is computed whole. ``min_head_tokens`` are computed of
    every segment, whatever its length.
    """
    if segment.num_tokens < 2 * head_tokens:
        return None
    first_tokens = segment.first_tokens + max(head_tokens, min_head_tokens)
    end_tokens = segment.first_tokens + stored_tokens
    return TokenRange(first_tokens, end_tokens) if first_tokens < end_tokens else None


def plan_blend(
    num_tokens: int, exact_tokens: int, candidates: Iterable[TokenRange], min_run_tokens: int
) -> BlendPlan | None:
    """Plan a prompt, and what was generated before its request was preempted; None reuses nothing.

    ``candidates`` may be reused, ascending and disjoint; of them, runs shorter than
    ``min_run_tokens`` are computed. ``exact_tokens`` is the length of the exact beginning.
    """
    reused: list[TokenRange] = []
    for candidate in candidates:
        run = TokenRange(max(candidate.first_tokens, exact_tokens), candidate.end_tokens)
        run = TokenRange(run.first_tokens, min(run.end_tokens, num_tokens - 1))
        if run.num_tokens >= max(1, min_run_tokens):
            reused.append(run)
    if not reused:
        return None
    whole = TokenRange(exact_tokens, reused[-1].end_tokens)
    return BlendPlan(tuple(reused), without([whole], reused))
