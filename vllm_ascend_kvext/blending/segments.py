# SPDX-License-Identifier: Apache-2.0
"""Which parts of a prompt are segments: what a request says of it, or where separators stand.

A segment is a text that is known by itself, such as a document, wherever it stands in a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from vllm_ascend_kvext.blending.errors import SegmentError
from vllm_ascend_kvext.request_arguments import is_integer, read_argument, shown

SEGMENTS_KEY = "kvext_segments"
STORE_KEY = "kvext_store_segment"

# The OpenAI server turns true into a number or a text. Numbers equal truth values.
_TRUTHS: dict[Any, bool] = {True: True, False: False, "true": True, "false": False}


class Segment(NamedTuple):
    """Consecutive tokens of a prompt.

    Attributes:
        first_tokens: Tokens before it.
        end_tokens: Tokens up to its end.
    """

    first_tokens: int
    end_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.end_tokens - self.first_tokens


def named_segments(extra_args: Mapping[str, Any] | None, num_tokens: int) -> list[Segment] | None:
    """The segments that a request names.

    Args:
        extra_args: Of its sampling parameters. `SEGMENTS_KEY` holds pairs of first and end token:
            lists, or their JSON text.
        num_tokens: Of the prompt.

    Returns:
        In ascending order, without empty ones; None if the request says nothing.

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
    truth = None
    if isinstance(value, (str, int, float)):  # A list has no hash.
        truth = _TRUTHS.get(value.strip().lower() if isinstance(value, str) else value)
    if truth is None:
        raise SegmentError(
            f"{STORE_KEY}: expected true or false, found {shown(value)}. The prompt was computed, "
            "and not stored as a segment: correct it."
        )
    return truth


def separated_segments(token_ids: Sequence[int], separator: Sequence[int]) -> list[Segment]:
    """What stands between two separators that follow each other.

    What stands before the first one and behind the last one is no segment: instructions and the
    question. The separators themselves are computed.

    Args:
        token_ids: Of the prompt.
        separator: Token ids, at least one.

    Returns:
        In ascending order, without empty ones.
    """
    starts = _find_all(token_ids, separator)
    width = len(separator)
    return [Segment(first + width, end) for first, end in pairwise(starts) if first + width < end]


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


def _parse(value: Any) -> list[Segment]:
    is_list = isinstance(value, (list, tuple))
    if not is_list or not all(_is_pair(pair) for pair in value):
        raise _wrong(
            value, "a list of pairs of integers, or its JSON text: first and end token of each"
        )
    return [Segment(*pair) for pair in value]


def _is_pair(value: Any) -> bool:
    is_list = isinstance(value, (list, tuple))
    return is_list and len(value) == 2 and all(map(is_integer, value))


def _wrong(value: object, expected: str) -> SegmentError:
    return SegmentError(
        f"{SEGMENTS_KEY}: expected {expected}, found {shown(value)}. The prompt was computed "
        "without reusing segments: correct them."
    )
