# SPDX-License-Identifier: Apache-2.0
"""The facts of one KV cache group, the same for the scheduler and for a worker.

Terms: a *page* is what one block id of the group stands for; a *row* is what one entry of a page
holds: one token, or as many as a compressor joins; a *boundary* is a number of tokens at which a
request can resume.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class GroupKind(enum.Enum):
    """Which tokens before a boundary a group reads to resume there."""

    FULL = "full"
    """All of them (full attention, MLA, compressed MLA)."""

    WINDOW = "window"
    """The last ``window_tokens - 1``."""

    CHUNKED = "chunked"
    """Those since the last multiple of ``window_tokens`` (chunked-local attention)."""

    STATE = "state"
    """The one page that ends at the boundary (Mamba)."""

    OTHER = "other"
    """Not known here (cross attention)."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One KV cache group.

    Attributes:
        window_tokens: Sliding window, with the token that reads, or attention chunk; 0 where there
            is none.
        holds_states: Whether its rows are what a recurrence or a compressor carries on, instead of
            the keys and values of tokens. A compressor's states are a sliding window to the
            scheduler.
    """

    kind: GroupKind
    tokens_per_page: int
    window_tokens: int = 0
    holds_states: bool = False


def window_pages(window_tokens: int, tokens_per_page: int) -> int:
    """Pages that hold the ``window_tokens - 1`` tokens before the end of a page."""
    return -(-max(0, window_tokens - 1) // tokens_per_page)
