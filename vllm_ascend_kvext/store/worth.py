# SPDX-License-Identifier: Apache-2.0
"""What an entry is worth to an eviction order, and the rule for tiers that are read up to a gap.

There, an entry is of use only together with all rows before it. `LatestUse` keeps prefixes whole:
of one use, their ends go first. The rule for tiers whose gaps are computed is `reuse.Reuse`.
"""

from __future__ import annotations

import enum
from typing import Protocol

from vllm_ascend_kvext.store.entries import HIT, NEVER_HIT, ORPHAN, Entry, Kind, Worth
from vllm_ascend_kvext.store.index import Index
from vllm_ascend_kvext.store.prefix import Prefix, TierGeometry


class EvictionRule(enum.Enum):
    """What gives way first, within a rank."""

    LATEST_USE = "latest_use"
    """What was used longest ago; of one use, the end of a prefix."""

    REUSE = "reuse"
    """What has the fewest hits to expect for its time. For tiers whose gaps are computed."""

    @property
    def leaves_holes(self) -> bool:
        """Whether beginnings of prompts may go before their ends."""
        return self is not EvictionRule.LATEST_USE


class WorthRule(Protocol):
    """A rule of eviction.

    Attributes:
        version: Counts up when what is queued may be worth less than before.
    """

    version: int

    def worth_of(self, entry: Entry) -> Worth:
        """Of an entry that is stored, or going to be; what gives way first is least."""

    def note_wanted(self, entry: Entry, prefix: Prefix) -> None:
        """A store is asked for; whether there is room for it is not known."""

    def note_ended(self, prefix: Prefix, prompt_tokens: int, end_tokens: int) -> None:
        """A request has ended: its prompt was asked for, and what lies behind is known."""

    def clear(self) -> None:
        """Forget what was stored."""


class LatestUse:
    """Keeps what was used last.

    Args:
        index: Of the tier.
        geometry: Of the tier.
    """

    __slots__ = ("_geometry", "_index", "version")

    def __init__(self, index: Index, geometry: TierGeometry) -> None:
        self._index = index
        self._geometry = geometry
        self.version = 0

    def worth_of(self, entry: Entry) -> Worth:
        rank = rank_of(self._index, self._geometry, entry)
        return rank, entry.use, -entry.piece.end_tokens, entry.piece.kind, entry.number

    def note_wanted(self, entry: Entry, prefix: Prefix) -> None:
        pass

    def note_ended(self, prefix: Prefix, prompt_tokens: int, end_tokens: int) -> None:
        pass

    def clear(self) -> None:
        pass


def rank_of(index: Index, geometry: TierGeometry, entry: Entry) -> int:
    """What all rules agree on."""
    if (
        entry.piece.kind is Kind.TAILS
        and geometry.needs_rows
        and index.present(Kind.ROWS, entry.key) is None
    ):
        return ORPHAN
    return HIT if entry.is_hit else NEVER_HIT
