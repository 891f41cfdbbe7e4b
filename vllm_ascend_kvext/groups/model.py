# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The facts of one KV cache group. They are the same for the scheduler and for a worker.

The terms:

page
    What one block id of the group stands for.
row
    What one entry of a page holds: one token, or as many tokens as a compressor joins.
boundary
    A number of tokens at which a request can resume.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class GroupKind(enum.Enum):
    """Which tokens before a boundary a group reads to resume there."""

    FULL = "full"
    """The group reads all tokens (full attention, MLA, compressed MLA)."""

    WINDOW = "window"
    """The group reads the last ``window_tokens - 1`` tokens."""

    CHUNKED = "chunked"
    """The group reads the tokens since the last multiple of ``window_tokens`` (chunked-local
    attention)."""

    STATE = "state"
    """The group reads the one page that ends at the boundary (Mamba)."""

    OTHER = "other"
    """This package does not know what the group reads (cross attention)."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One KV cache group.

    Attributes:
        window_tokens: The sliding window, which includes the token that reads, or the attention
            chunk; 0 for groups that have neither.
        holds_states: Whether its rows are states of a recurrence or of a compressor, and not keys
            and values of tokens. To the scheduler, the states of a compressor are a sliding window.
    """

    kind: GroupKind
    tokens_per_page: int
    window_tokens: int = 0
    holds_states: bool = False


def window_pages(window_tokens: int, tokens_per_page: int) -> int:
    """The number of pages that hold the ``window_tokens - 1`` tokens before the end of a page."""
    return -(-max(0, window_tokens - 1) // tokens_per_page)
