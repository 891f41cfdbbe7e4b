# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Finds the segments of a prompt, and chooses which of their tokens are reused.

A segment is a text that may stand anywhere in a prompt, such as a document. A request names its
segments, or separators mark them. A segment that was computed by itself has made its own first
tokens an attention sink, and has not seen the text before it. Computing its first tokens anew
removes most of the harm (EPIC, arXiv 2410.15332). These tokens are its *head*::

    prompt      [exact   |segment A         |segment B, unknown|segment C         |question]
    computed              hhhh               =================== hhhh               ========
    reused                    --------------                        --------------

The functions are pure. The last token of a prompt is always computed, because its output is wanted.
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

    `SEGMENTS_KEY` in its sampling parameters holds pairs of first and end token, as lists or as
    their JSON text. ``num_tokens`` is the length of the prompt.

    Raises:
        SegmentError: The value is something else, or segments overlap or lie outside the prompt.
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
        SegmentError: The value of `STORE_KEY` is no truth value.
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
    """The texts between neighbouring separators, ascending, without empty ones.

    The text before the first separator is instructions, and the text behind the last separator is
    the question: neither is a segment. The separators themselves are computed.
    """
    starts = _find_all(token_ids, separator)
    width = len(separator)
    return [
        TokenRange(first + width, end) for first, end in pairwise(starts) if first + width < end
    ]


def _find_all(token_ids: Sequence[int], separator: Sequence[int]) -> list[int]:
    """The tokens at which separators begin, ascending.

    A separator that overlaps an earlier separator is left out.
    """
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

    The ``reused`` spans are loaded, and the ``holes`` are computed. The request itself computes all
    tokens behind them.
    """

    reused: tuple[TokenRange, ...]
    holes: tuple[TokenRange, ...]

    @property
    def resume_tokens(self) -> int:
        return self.reused[-1].end_tokens


def behind_head(
    segment: TokenRange, stored_tokens: int, head_tokens: int, min_head_tokens: int = 0
) -> TokenRange | None:
    """The reused part of a segment with ``stored_tokens`` stored tokens; None if it is empty.

    A segment shorter than twice its head is computed whole. At least the first ``min_head_tokens``
    of every segment are computed, whatever its length.
    """
    if segment.num_tokens < 2 * head_tokens:
        return None
    first_tokens = segment.first_tokens + max(head_tokens, min_head_tokens)
    end_tokens = segment.first_tokens + stored_tokens
    return TokenRange(first_tokens, end_tokens) if first_tokens < end_tokens else None


def plan_blend(
    num_tokens: int, exact_tokens: int, candidates: Iterable[TokenRange], min_run_tokens: int
) -> BlendPlan | None:
    """Plan the tokens of a request; None if nothing is reused.

    After a preemption, the tokens of a request are its prompt and the tokens generated before.
    ``candidates`` are the ranges that may be reused, ascending and disjoint. Runs that are shorter
    than ``min_run_tokens`` are computed. ``exact_tokens`` is the length of the exact beginning.
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
