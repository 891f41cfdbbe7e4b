# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The entries of the host tier, their states, and their loads.

The states of an entry. A transfer is the store of the entry, or a load that pins the entry::

    STORING ── store finished ──> STORED ── evicted, replaced, cleared ──> GONE
       │                            │
       │ cleared, abandoned         │ evicted, replaced or cleared while a load pins it
       └────────> LEAVING <─────────┘
                     └── its last transfer ends ──> GONE

Only a STORED entry is a hit. A LEAVING entry cannot be found any more. It keeps its place until its
transfers end.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm_ascend_kvext.store.prefix import Prefix


class Kind(enum.IntEnum):
    """What an entry holds. At the same boundary, the lower kind is evicted first."""

    TAILS = 0
    """The window tails and states at one boundary."""

    ROWS = 1
    """The full-attention rows of a range of tokens."""


class EntryState(enum.Enum):
    """The states of an entry, see the drawing of the module."""

    STORING = "storing"
    STORED = "stored"
    LEAVING = "leaving"
    GONE = "gone"


class Piece(NamedTuple):
    """A part of a prefix that can be stored. Tails begin and end at their boundary."""

    kind: Kind
    first_tokens: int
    end_tokens: int

    @classmethod
    def rows(cls, first_tokens: int, end_tokens: int) -> Piece:
        return cls(Kind.ROWS, first_tokens, end_tokens)

    @classmethod
    def tails(cls, boundary_tokens: int) -> Piece:
        return cls(Kind.TAILS, boundary_tokens, boundary_tokens)


class WantedPiece(NamedTuple):
    """A piece that a request may use, of a prefix that belongs to no prompt (a segment).

    Attributes:
        contents: The rows of the entry of the piece; see ``HostTier.finish_store``.
        num_bytes: The size of the piece's object in a shared tier.
        on_got: Called when all workers have got the object.
    """

    prefix: Prefix
    piece: Piece
    contents: Any
    num_bytes: int
    on_got: Callable[[], object]


@dataclass(slots=True, eq=False)
class Entry:
    """One stored piece of a prefix. The tier writes it, and callers read it.

    Attributes:
        number: A number that counts up. No two entries of a tier have the same number.
        piece: What the entry has. Rows may lose their end while they are stored.
        keys: The keys by which the entry can be found, ascending: one for each unit of its rows.
        use: The latest use of its end; see ``HostTier.next_use``.
        head_uses: Later uses of its beginning: pairs of the token up to which rows were used, and
            the use. The tokens ascend, and the uses descend.
        chance: The probability that its tokens are part of a later prompt at all. Below 1 for
            answers, until one of them has come back.
        cut_key: The key of the first unit of the entry's first cut. ``reuse`` recognises the cut by
            it, even if only a part of the cut is stored.
        key_before: The key of the rows before the entry, if the entry is useless without them; else
            None.
        is_being_written: True until its store ends, even if nothing wants the entry any more.
        num_pins: The number of loads in progress that pin the entry.
        key_space: The key space of its prefix; see ``store.prefix``.
        num_leading_keys: The number of ``keys`` that lead to this entry, and not to a longer entry.
        is_shared: Whether a shared tier has the entry, too, or is just getting it. Callers write
            this attribute.
    """

    number: int
    piece: Piece
    keys: tuple[bytes, ...]
    offset_bytes: int
    num_bytes: int
    use: int
    cut_key: bytes
    key_before: bytes | None
    state: EntryState = EntryState.STORING
    is_being_written: bool = True
    num_pins: int = 0
    row_map: Any = None
    num_leading_keys: int = 0
    is_shared: bool = False
    key_space: str = ""
    head_uses: tuple[tuple[int, int], ...] = ()
    chance: float = 1.0

    @property
    def key(self) -> bytes:
        """The chained hash at the end of the entry."""
        return self.keys[-1]

    def use_at(self, end_tokens: int) -> int:
        """The latest use of the rows before a token."""
        for head_tokens, use in self.head_uses:
            if end_tokens <= head_tokens:
                return use
        return self.use

    def renew(self, end_tokens: int, use: int) -> None:
        """Note a use of the rows up to a token."""
        if self.use_at(end_tokens) >= use:
            return
        newer = tuple(head for head in self.head_uses if head[1] > use)
        if end_tokens >= self.piece.end_tokens:
            self.use = use
            self.head_uses = newer
        else:
            longer = tuple(head for head in self.head_uses if head[0] > end_tokens)
            self.head_uses = (*newer, (end_tokens, use), *longer)

    @property
    def can_be_trimmed(self) -> bool:
        """Whether the entry may lose its end. Tails and segments are removed as a whole."""
        return self.piece.kind is Kind.ROWS and not self.key_space

    @property
    def is_evictable(self) -> bool:
        return self.state is EntryState.STORED and not self.num_pins


@dataclass(slots=True, eq=False)
class Load:
    """Entries that are pinned until the load ends."""

    entries: tuple[Entry, ...]
    has_ended: bool = False
