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

Tails may *continue* tails at an earlier boundary of the same prefix: they have only the rows of
windows between the two boundaries, and are read together with those that they continue::

    tokens                   ......................A...........B
    window at A, whole           [================]
    window at B, whole                 [======================]
    window at B, continued                         [==========]

An entry that others continue is STORED. It is not evicted. If it is removed nevertheless, because
it cannot be read, all that continue it are removed as well.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
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
    """A part of a prefix that can be stored.

    Tails end at their boundary. They begin there, too, or at the boundary of the tails that they
    continue.
    """

    kind: Kind
    first_tokens: int
    end_tokens: int

    @classmethod
    def rows(cls, first_tokens: int, end_tokens: int) -> Piece:
        return cls(Kind.ROWS, first_tokens, end_tokens)

    @classmethod
    def tails(cls, boundary_tokens: int) -> Piece:
        """All that a resume at a boundary needs besides rows."""
        return cls(Kind.TAILS, boundary_tokens, boundary_tokens)

    @classmethod
    def continued_tails(cls, base_tokens: int, boundary_tokens: int) -> Piece:
        """What the tails at a boundary have beyond those at an earlier boundary."""
        return cls(Kind.TAILS, base_tokens, boundary_tokens)

    @property
    def continues(self) -> bool:
        """Whether these are tails that continue others."""
        return self.kind is Kind.TAILS and self.first_tokens < self.end_tokens


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
        base: The tails that these tails continue; None if they are whole, or rows.
        continued_by: The tails that continue these, STORING or STORED; None if none ever has.
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
    base: Entry | None = field(default=None, repr=False)
    continued_by: dict[Entry, None] | None = field(default=None, repr=False)

    @property
    def chain(self) -> tuple[Entry, ...]:
        """All that has to be read together: the entry, and before it those that it continues."""
        return (self,) if self.base is None else (*self.base.chain, self)

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
        return self.state is EntryState.STORED and not self.num_pins and not self.continued_by


@dataclass(slots=True, eq=False)
class Load:
    """Entries that are pinned until the load ends."""

    entries: tuple[Entry, ...]
    has_ended: bool = False
