# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Finds what a shared tier has of a prompt and host memory lacks. The search runs in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_ascend_kvext.shared_tier.names import note_name, object_name, piece_of
from vllm_ascend_kvext.store.entries import Piece, WantedPiece
from vllm_ascend_kvext.store.prefix import Prefix, TierGeometry
from vllm_ascend_kvext.token_range import TokenRange, union, without

Exist = Callable[[Sequence[str]], list[str]]
"""A function like `SharedTier.exist`, for names within one name space."""

_MAX_QUESTIONS = 8
"""The most questions for pieces in the middle of chunks. Each of them finds the piece before."""

_MAX_TAILS = 4096
"""The most boundaries of a prompt at which the search asks for tails."""

_TAILS_OF_A_BATCH = 64
"""The number of boundaries in one question for tails."""


class FoundObject(NamedTuple):
    """An object whose piece equals a piece of a prefix up to ``end_tokens``.

    Behind this token, the two pieces may differ.

    Attributes:
        wanted: The piece as it was asked for, if the prefix belongs to no prompt.
    """

    name: str
    piece: Piece
    end_tokens: int
    prefix: Prefix
    wanted: WantedPiece | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """The question to the tier for one request.

    Attributes:
        tokens: The range from the end of the device's tokens to the last token at which the request
            may resume.
        missing: The chunks in ``tokens`` whose rows host memory lacks. The ends of ``tokens`` may
            cut the first and the last chunk.
        tails_tokens: The last boundary at which host memory has tails; 0 if there is none. If no
            tails are needed, the end of ``tokens``.
        goes_on_behind_holes: Whether rows are of use behind rows that are missing.
        further: Pieces of other prefixes that host memory lacks.
    """

    prefix: Prefix
    geometry: TierGeometry
    tokens: TokenRange
    missing: tuple[TokenRange, ...]
    tails_tokens: int
    goes_on_behind_holes: bool
    further: Sequence[WantedPiece] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to ask."""
        return bool(self.missing or self.tails_tokens < self.tokens.end_tokens or self.further)


def search(question: Question, exist: Exist) -> list[FoundObject]:
    """The objects to get, in the order in which they are wanted.

    Rows come first, ascending, then tails, then the rest.
    """
    rows = _search_rows(question, exist) if question.missing else []
    end_tokens = _rows_end(question, rows)
    tails = _search_tails(question, exist, end_tokens)
    if question.geometry.needs_tails:
        end_tokens = tails[0].end_tokens if tails else question.tails_tokens
    of_use = [each for each in rows if each.piece.first_tokens < end_tokens]
    return [*of_use, *tails, *_search_further(question, exist)]


def _search_rows(question: Question, exist: Exist) -> list[FoundObject]:
    geometry = question.geometry
    after_tokens = question.tokens.first_tokens
    found = _ask(question, exist, [chunk.end_tokens for chunk in question.missing])
    # The tier lacks the end of some chunks. The tier may have an inner boundary of two of these
    # chunks: of the first chunk, in which this prompt may differ from another prompt, and of the
    # last chunk of the prompt.
    lacking = [chunk for chunk in question.missing if chunk.end_tokens not in found]
    for first, end in dict.fromkeys([*lacking[:1], *lacking[-1:]]):
        inner = range(geometry.floor(first) + geometry.unit_tokens, end, geometry.unit_tokens)
        inner_found = _ask(question, exist, inner)
        if inner_found:
            last = max(inner_found)
            found[last] = inner_found[last]
    # A piece in the middle of a chunk begins where an earlier piece ends. Ask for the earlier
    # piece, too.
    latest = found
    for _ in range(_MAX_QUESTIONS):
        begins = {each.piece.first_tokens for each in latest.values()} - found.keys()
        inner_begins = (each for each in begins if each % geometry.chunk_tokens)
        latest = _ask(question, exist, [each for each in inner_begins if each > after_tokens])
        found = found | latest
    return [found[end] for end in sorted(found)]


def _ask(question: Question, exist: Exist, ends: Sequence[int]) -> dict[int, FoundObject]:
    """The objects with the rows before some boundaries, by boundary."""
    names = exist([note_name(question.prefix.key_at(end)) for end in ends]) if ends else []
    return {
        end: FoundObject(name, piece_of(name), end, question.prefix)
        for end, name in zip(ends, names, strict=True)
        if name and _reaches(question.geometry, piece_of(name), end)
    }


def _reaches(geometry: TierGeometry, piece: Piece, end_tokens: int) -> bool:
    """Whether an object can have the rows before a boundary. Other programs may write any name."""
    first, end = piece.first_tokens, piece.end_tokens
    is_cut_at_units = not (first % geometry.unit_tokens or end % geometry.unit_tokens)
    chunk_first = geometry.chunk_start(end_tokens)
    return is_cut_at_units and chunk_first <= first < end_tokens <= end <= geometry.chunk_end(first)


def _rows_end(question: Question, rows: Iterable[FoundObject]) -> int:
    """The token up to which rows can be used, the rows in host memory included."""
    begin = TokenRange(question.tokens.first_tokens, question.tokens.first_tokens)
    found = (TokenRange(each.piece.first_tokens, each.end_tokens) for each in rows)
    runs = union([begin, *without([question.tokens], question.missing), *found])
    return runs[-1 if question.goes_on_behind_holes else 0].end_tokens


def _search_tails(question: Question, exist: Exist, end_tokens: int) -> list[FoundObject]:
    """The last tails up to a boundary, if they lie behind the tails of host memory."""
    unit_tokens = question.geometry.unit_tokens
    begin = question.geometry.floor(max(question.tokens.first_tokens, question.tails_tokens))
    boundaries = range(begin + unit_tokens, end_tokens + 1, unit_tokens)[::-1][:_MAX_TAILS]
    for number in range(0, len(boundaries), _TAILS_OF_A_BATCH):
        batch = boundaries[number : number + _TAILS_OF_A_BATCH]
        names = [object_name(Piece.tails(each), question.prefix.key_at(each)) for each in batch]
        for boundary, name in zip(batch, exist(names), strict=True):
            if name:
                return [FoundObject(name, Piece.tails(boundary), boundary, question.prefix)]
    return []


def _search_further(question: Question, exist: Exist) -> list[FoundObject]:
    asked = []
    for wanted in question.further:
        prefix, piece, *_ = wanted
        name = object_name(piece, prefix.key_at(piece.end_tokens), prefix.key_space)
        asked.append(FoundObject(name, piece, piece.end_tokens, prefix, wanted))
    names = exist([each.name for each in asked]) if asked else []
    return [each for each, name in zip(asked, names, strict=True) if name]
