# SPDX-License-Identifier: Apache-2.0
"""One thing that is stored, and what can be the matter with it.

An entry's life; a transfer is its own store, or a load that has pinned it::

    STORING ── store finished ──> STORED ── evicted, replaced, cleared ──> GONE
       │                            │
       │ cleared                    │ the same while a load has it pinned
       └────────> LEAVING <─────────┘
                     └── its last transfer ends ──> GONE

Only a STORED entry is a hit. A LEAVING one is known to nobody but its transfers, and holds its
place until they end.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Worth = tuple[int, int, int, int, int]
"""What gives way first compares as least: see ``eviction``. Begins with a rank."""

ORPHAN, NEVER_HIT, HIT = range(3)
"""Ranks: tails whose rows are gone, what was never loaded, what was."""


class Kind(enum.IntEnum):
    """What an entry holds. Of one boundary the lower kind gives way first."""

    TAILS = 0
    """Window tails and states at a boundary."""

    ROWS = 1
    """Full-attention rows of a stretch of tokens."""


class EntryState(enum.Enum):
    """See the module's drawing."""

    STORING = "storing"
    STORED = "stored"
    LEAVING = "leaving"
    GONE = "gone"


class Piece(NamedTuple):
    """What can be stored of a prefix.

    Attributes:
        kind: Rows or tails.
        first_tokens: Where its rows begin; for tails the boundary.
        end_tokens: Where its rows end; for tails the boundary.
    """

    kind: Kind
    first_tokens: int
    end_tokens: int

    @classmethod
    def rows(cls, first_tokens: int, end_tokens: int) -> Piece:
        return cls(Kind.ROWS, first_tokens, end_tokens)

    @classmethod
    def tails(cls, boundary_tokens: int) -> Piece:
        return cls(Kind.TAILS, boundary_tokens, boundary_tokens)


@dataclass(slots=True, eq=False)
class Entry:
    """Belongs to the tier; callers read it.

    Attributes:
        number: Counts up; no two entries of a tier have the same.
        piece: What it holds.
        keys: Of the boundaries at which it can be found, ascending: each unit of its rows.
        offset_bytes: Where its place in the host buffer begins.
        num_bytes: What the place takes.
        use: The latest use; see ``HostTier.next_use``.
        state: See `EntryState`.
        is_being_written: Whether its store has not ended, wanted or not.
        num_pins: Loads in progress.
        is_hit: Whether it has been loaded, and not lost that rank since.
        was_loaded: Whether it has been loaded since it was stored.
        was_hit: Whether the latest load was one that gives that rank.
        saved_tokens: That need not be computed while it is there; see the module of that name.
        chunk_key: By which its chunk is known to ``reuse``.
        row_map: What the store reported: opaque here.
        num_leading_keys: How many of the keys lead to it, and not to a longer entry.
        num_spared: How often it was the turn of this entry to give way, and others did.
        queued: Under which worth the eviction order has it; None if it has not.
    """

    number: int
    piece: Piece
    keys: tuple[bytes, ...]
    offset_bytes: int
    num_bytes: int
    use: int
    state: EntryState = EntryState.STORING
    is_being_written: bool = True
    num_pins: int = 0
    is_hit: bool = False
    was_loaded: bool = False
    was_hit: bool = False
    saved_tokens: int = 0
    chunk_key: bytes = b""
    row_map: Any = None
    num_leading_keys: int = 0
    num_spared: int = 0
    queued: Worth | None = field(default=None, repr=False)

    @property
    def key(self) -> bytes:
        """The chained hash at its end."""
        return self.keys[-1]

    @property
    def is_evictable(self) -> bool:
        return self.state is EntryState.STORED and not self.num_pins
