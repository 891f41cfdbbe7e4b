# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A tier with a few places. Each action of a request takes one line."""

from __future__ import annotations

from typing import Any

from unit.store.tier_model import TextPrefix

from vllm_ascend_kvext.holes.load_plan import LoadPlan
from vllm_ascend_kvext.store.counters import Refusal, Removal
from vllm_ascend_kvext.store.entries import Entry, Load, Piece
from vllm_ascend_kvext.store.lookup import Hit
from vllm_ascend_kvext.store.prefix import TierGeometry
from vllm_ascend_kvext.store.tier import HostTier

UNIT_TOKENS = 2
CHUNK_TOKENS = 12
PLACE_BYTES = 64


class SmallTier(HostTier):
    """A tier with chunks of 12 tokens and units of 2. By default, an entry takes one place.

    Attributes:
        removed: Entries that the tier has reported as removed.
    """

    def __init__(self, num_places: int = 100, needs_tails: bool = False, **options: Any) -> None:
        self.removed: list[tuple[Entry, Removal]] = []
        super().__init__(
            num_places * PLACE_BYTES,
            TierGeometry(CHUNK_TOKENS, UNIT_TOKENS, needs_tails=needs_tails),
            on_removed=lambda entry, removal: self.removed.append((entry, removal)),
            **options,
        )

    def begin(
        self, text: str, piece: Piece, num_places: int = 1, use: int | None = None
    ) -> Entry | Refusal:
        use = self.next_use() if use is None else use
        return self.begin_store(TextPrefix(text), piece, num_places * PLACE_BYTES, use)

    def store(self, text: str, piece: Piece, num_places: int = 1, use: int | None = None) -> Entry:
        """Store a piece. Without ``use``, the piece belongs to a new request."""
        entry = self.begin(text, piece, num_places, use)
        assert isinstance(entry, Entry), entry
        self.finish_store(entry)
        return entry

    def store_prefix(self, text: str) -> None:
        """Store all rows of a text."""
        use = self.next_use()
        for piece in self.lookup(TextPrefix(text)).missing_pieces(0, len(text)):
            self.store(text, piece, use=use)

    def find(self, text: str) -> Hit:
        return self.look_up(TextPrefix(text), len(text))

    def evicted(self) -> list[Entry]:
        return [entry for entry, removal in self.removed if removal is Removal.EVICTED]


def pin(tier: HostTier, plan: LoadPlan, use: int) -> Load | None:
    """Begin the load of a plan."""
    return tier.begin_load(plan.prefix, plan.boundary_tokens, plan.entries, use)
