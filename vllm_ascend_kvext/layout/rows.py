# SPDX-License-Identifier: Apache-2.0
"""Which rows of each group a chunk of tokens keeps: the same for store and load, by construction.

A row is counted from the first token of the request: row ``r`` covers the tokens from
``r * tokens_per_row`` on. Pure arithmetic; knows neither pages in memory nor a host buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.errors import TokenRangeError
from vllm_ascend_kvext.layout.model import LayoutGroup, StatePolicy


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens ``first`` to ``end - 1`` of a request.

    Raises:
        TokenRangeError: If it is empty or begins before the request.
    """

    first: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end:
            raise TokenRangeError(
                f"token range: expected 0 <= first < end, found {self.first} and {self.end}; "
                "leave out empty ranges"
            )

    @property
    def num_tokens(self) -> int:
        return self.end - self.first


def kept_rows(
    group: LayoutGroup, tokens: TokenRange, states: StatePolicy = StatePolicy.EXACT
) -> range:
    """The rows that a chunk keeps of one group; empty where there is nothing to keep.

    Rows end with the last whole one. A window keeps the pages that the token behind the chunk's
    end still reads: whole pages, because vLLM caches whole pages and a later hit on one of them
    reads what stands before the window.

    Raises:
        TokenRangeError: If the group holds states of page ends only and the range ends within a
            page: what it holds there is the state of some other token.
    """
    if group.holds_states and states is StatePolicy.SKIP:
        return range(0)
    if group.is_snapshot and tokens.end % group.tokens_per_page:
        raise TokenRangeError(
            f"KV cache group {group.scheduler_group}: a range that ends at token {tokens.end} has "
            f"no state, states are kept every {group.tokens_per_page} tokens; end chunks at "
            "multiples of that, or skip states"
        )
    first_row = tokens.first // group.tokens_per_row
    end_row = tokens.end // group.tokens_per_row
    tail_row = _tail_first_token(group, end_row * group.tokens_per_row) // group.tokens_per_row
    return range(max(first_row, tail_row), end_row) if tail_row < end_row else range(0)


def dense_rows(group: LayoutGroup, tokens: TokenRange) -> range:
    """All rows of a chunk, whatever the group still needs of them: what `kept_rows` saves on."""
    return range(tokens.first // group.tokens_per_row, tokens.end // group.tokens_per_row)


def _tail_first_token(group: LayoutGroup, end: int) -> int:
    """The first token that a group needs to go on from ``end``, rounded down to a page."""
    if group.kind is GroupKind.FULL:
        return 0
    if group.is_snapshot:
        return max(0, end - group.tokens_per_page)
    needed = max(0, end - (group.window_tokens - 1))
    if group.restart_tokens:
        needed = max(needed, end - end % group.restart_tokens)
    return end if needed >= end else needed - needed % group.tokens_per_page
