# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Says which rows of a group a store keeps, and which rows a resume needs.

Rows are counted from the first token of the request: row ``r`` covers the tokens from
``r * tokens_per_row`` on. An example with a window of 6 tokens and 4 tokens per page: a request
that resumes at token 10 reads the tokens 5 to 9. The request needs the tokens 4 to 9, because the
page of token 5 begins at token 4.
"""

from __future__ import annotations

from vllm_ascend_kvext.errors import TokenRangeError
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import LayoutGroup, StatePolicy
from vllm_ascend_kvext.token_range import TokenRange


def needed_rows(
    group: LayoutGroup, tokens: TokenRange, states: StatePolicy = StatePolicy.EXACT
) -> range:
    """The rows of a token range that a resume at its end needs; an empty range if it needs none.

    A window group needs all pages that the token behind the end still reads. The group needs these
    pages as a whole, because vLLM caches whole pages. A later hit on such a page reads the tokens
    before the window, too. The last row may reach past the end. If tokens do not fill an entry of a
    compressed group yet, the states of its compressor hold them. These states are a group of their
    own.

    Raises:
        TokenRangeError: If the range is empty or begins before the request.
    """
    _require_tokens(tokens)
    if group.holds_states and states is StatePolicy.SKIP:
        return range(0)
    end = tokens.end_tokens - tokens.end_tokens % group.compress_ratio
    first = max(tokens.first_tokens, _first_needed_token(group, end))
    if first >= end:
        return range(0)
    return range(first // group.tokens_per_row, -(-end // group.tokens_per_row))


def kept_rows(
    group: LayoutGroup, tokens: TokenRange, states: StatePolicy = StatePolicy.EXACT
) -> range:
    """The rows that a store of a token range keeps; an empty range if it keeps none.

    A row that the range does not fill is not kept. So the kept rows are the rows that a resume
    needs at the end of the last whole row of the range. A state is kept wherever the range ends.
    The state after the last token lies in the page of that token.
    """
    _require_tokens(tokens)
    if group.holds_states and states is StatePolicy.SKIP:
        return range(0)
    if group.is_snapshot:
        return needed_rows(group, tokens, states)
    end_row = tokens.end_tokens // group.tokens_per_row
    first_needed = _first_needed_token(group, end_row * group.tokens_per_row)
    first_row = max(tokens.first_tokens, first_needed) // group.tokens_per_row
    return range(first_row, end_row) if first_row < end_row else range(0)


def _require_tokens(tokens: TokenRange) -> None:
    if not 0 <= tokens.first_tokens < tokens.end_tokens:
        raise TokenRangeError(
            f"token range: expected 0 <= first < end, found {tokens.first_tokens} and "
            f"{tokens.end_tokens}; leave out empty ranges"
        )


def _first_needed_token(group: LayoutGroup, end: int) -> int:
    """The first token that a group needs to resume at token ``end``, rounded down to a page."""
    if group.kind is GroupKind.FULL or end == 0:
        return 0
    if group.is_snapshot:
        return (end - 1) // group.tokens_per_page * group.tokens_per_page
    needed = max(0, end - (group.window_tokens - 1))
    if group.restart_tokens:
        needed = max(needed, end - end % group.restart_tokens)
    return end if needed >= end else needed - needed % group.tokens_per_page
