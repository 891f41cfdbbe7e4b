# SPDX-License-Identifier: Apache-2.0
"""What a shared tier has of one prompt, of that which host memory lacks. Made on a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_ascend_kvext.shared_tier.names import note_name, object_name, rows_of_name
from vllm_ascend_kvext.store.entries import Piece
from vllm_ascend_kvext.store.lookup import MAX_PIECES
from vllm_ascend_kvext.store.prefix import Prefix, TierGeometry

MAX_TAILS_ASKED = 4096
"""Boundaries at which tails are asked for, the last ones. A folder answers some 300 in 1 ms."""
_TAILS_OF_A_BATCH = 64

Exist = Callable[[Sequence[str]], list[str]]


class Span(NamedTuple):
    """Tokens of one chunk, as far as the prompt has them; whether host memory has their rows."""

    first_tokens: int
    end_tokens: int
    is_in_host: bool


class FoundObject(NamedTuple):
    """An object with something of the prompt.

    Attributes:
        piece: All that it has.
        end_tokens: Up to where that is the prompt's: less than all where the prompt parts from the
            one that was put.
    """

    name: str
    piece: Piece
    end_tokens: int


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked for one request.

    Attributes:
        spans: Chunks, ascending without a gap, from where the device ends to where the request may
            resume at most.
        after_tokens: What the device has.
        tails_tokens: The last boundary at which host memory has tails; 0 if there is none.
        goes_on_behind_holes: Whether rows are of use behind others that nobody has.
    """

    prefix: Prefix
    geometry: TierGeometry
    spans: tuple[Span, ...]
    after_tokens: int
    tails_tokens: int
    goes_on_behind_holes: bool


def search(question: Question, exist: Exist) -> list[FoundObject]:
    """What to fetch, in the order in which it is wanted: rows ascending, then tails."""
    geometry = question.geometry
    rows = _search_rows(question, exist) if geometry.needs_rows else []
    end_tokens = question.spans[-1].end_tokens
    if geometry.needs_rows:
        end_tokens = _rows_end(question, rows)
    if not geometry.needs_tails:
        return [each for each in rows if each.piece.first_tokens < end_tokens]
    least_tokens = max(question.after_tokens, question.tails_tokens)
    tails = _search_tails(question, exist, least_tokens, end_tokens)
    boundary_tokens = tails[0].end_tokens if tails else question.tails_tokens
    return [*(each for each in rows if each.piece.first_tokens < boundary_tokens), *tails]


def _search_rows(question: Question, exist: Exist) -> list[FoundObject]:
    missing = [span for span in question.spans if not span.is_in_host]
    found = _ask(question, exist, [span.end_tokens for span in missing])
    # A chunk that another prompt has too, but not to its end, or that is the prompt's last.
    lacking = [span for span in missing if span.end_tokens not in found]
    for span in dict.fromkeys([*lacking[:1], *lacking[-1:]]):
        unit_tokens = question.geometry.unit_tokens
        first = question.geometry.floor(max(span.first_tokens, question.after_tokens))
        inner = _ask(question, exist, range(first + unit_tokens, span.end_tokens, unit_tokens))
        if inner:
            last = max(inner)
            found[last] = inner[last]
    # Pieces of a chunk that begin where others end.
    starts = {question.geometry.chunk_start(end) for end in found}
    latest = dict(found)
    for _ in range(MAX_PIECES):
        ends = [
            first
            for each in latest.values()
            if (first := each.piece.first_tokens) > question.after_tokens
            and first not in starts
            and first not in found
        ]
        latest = _ask(question, exist, ends)
        found |= latest
    return [found[end] for end in sorted(found)]


def _ask(question: Question, exist: Exist, ends: Sequence[int]) -> dict[int, FoundObject]:
    """Objects with the rows before some boundaries, by boundary."""
    names = exist([note_name(question.prefix.key_at(end)) for end in ends]) if ends else []
    found = {}
    for end, name in zip(ends, names, strict=True):
        piece = rows_of_name(name)
        if piece is not None and piece.first_tokens < end <= piece.end_tokens:
            found[end] = FoundObject(name, piece, end)
    return found


def _rows_end(question: Question, rows: Sequence[FoundObject]) -> int:
    """Up to where rows are of use, those in host memory included."""
    known = [(each.piece.first_tokens, each.end_tokens) for each in rows]
    known += [(first, end) for first, end, is_in_host in question.spans if is_in_host]
    end_tokens = question.after_tokens
    for first_tokens, last_tokens in sorted(known):
        if first_tokens > end_tokens and not question.goes_on_behind_holes:
            break
        end_tokens = max(end_tokens, last_tokens)
    return end_tokens


def _search_tails(
    question: Question, exist: Exist, least_tokens: int, end_tokens: int
) -> list[FoundObject]:
    """The tails at the last boundary that has some, behind a token and not behind another."""
    unit_tokens = question.geometry.unit_tokens
    first = question.geometry.floor(least_tokens) + unit_tokens
    boundaries = range(first, end_tokens + 1, unit_tokens)[-MAX_TAILS_ASKED:][::-1]
    for number in range(0, len(boundaries), _TAILS_OF_A_BATCH):
        batch = boundaries[number : number + _TAILS_OF_A_BATCH]
        pieces = [Piece.tails(boundary) for boundary in batch]
        keys = [question.prefix.key_at(boundary) for boundary in batch]
        names = exist([object_name(*each) for each in zip(pieces, keys, strict=True)])
        for piece, name in zip(pieces, names, strict=True):
            if name:
                return [FoundObject(name, piece, piece.end_tokens)]
    return []
