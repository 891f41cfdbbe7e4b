# SPDX-License-Identifier: Apache-2.0
"""A load in progress, and how it can end."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from vllm_ascend_kvext.store.entries import Entry


class LoadOutcome(enum.Enum):
    """How a load ended."""

    LOADED = "loaded"
    """The bytes are in the request's pages: a hit."""

    CANCELLED = "cancelled"
    """It was not needed, or its request is gone; nothing is known against the bytes."""

    FAILED = "failed"
    """A worker could not read some of them: these are not offered again."""


@dataclass(slots=True, eq=False)
class Load:
    """Entries that are pinned until the load ends.

    Attributes:
        entries: Rows in ascending order, then the tails.
        hits: Those of them whose load makes them give way last.
        left_out: Entries that are not loaded, and give way last, too, if the load ends well.
        has_ended: Whether ``HostTier.end_load`` was called.
    """

    entries: tuple[Entry, ...]
    hits: frozenset[Entry]
    left_out: tuple[Entry, ...] = ()
    has_ended: bool = False
