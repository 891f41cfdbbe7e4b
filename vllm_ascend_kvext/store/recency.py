# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Knows what a plain LRU of the tier's size would have, and learns whether that would be enough.

If nearly all that comes back fits into the tier, a plain LRU finds it. The order by expected hits
can only lose then, because it judges by what was learned before. If much comes back that a plain
LRU would have lost, that order finds more. So the tier follows the LRU while the LRU finds nearly
all that comes back. It also follows the LRU when it has lost some times as much as the LRU itself.

The LRU stores everything that requests compute. It has keys but no places: a cut takes the same
bytes wherever it lies, and the tails at the end of a request take theirs as long as the LRU has the
cut in which they end. A request uses its cuts from the last one to the first one. So the LRU loses
a prefix from its end on, and what it has of a prefix is found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import repeat

ENOUGH_SHARE = 0.97
"""A plain LRU that finds this share of what an endless tier would find is followed. To follow it
evicts what expected hits have kept beside it, so it costs most where this changes often."""

_ASSUMED_SHARE = 0.1
"""The LRU is assumed to have lost as much as this share of the tier before anything was seen. What
it loses shows only when that comes back. So it first has to show that it finds enough."""

TIMES_LOST = 2
"""The LRU is also followed if the tier has lost this many times as much."""

_LOST_BY_CHANCE_SHARE = 0.003
"""What the tier may lose beyond that, as a share of its size."""

_EARLIER_SHARE = 0.5
"""Until this share of the tier was asked for, the tier lacks what it lost before it followed the
LRU. What it lacks later counts as lost by the LRU, too."""

_LOST_SHARE = 64
"""The LRU loses this part of its cuts at once, as what a dict holds first is not found in constant
time. So it is smaller than the tier by up to this part."""


class Recency:
    """Follows what a plain LRU would find, beside what an endless tier would find.

    What was found counts by half when as much has been asked for since as the tier holds. A call
    takes a few machine instructions for each cut, and some steps for each request.

    Args:
        capacity_bytes: The size of the tier.
        cut_bytes: The bytes of a cut of rows, more than 0.
        tails_bytes: The bytes of the tails that a request leaves at its end; 0 if it leaves none.

    Attributes:
        is_followed: Whether the tier follows the LRU.
        lost_use: The latest use of what the LRU lost last. It has everything that was used later.
    """

    def __init__(self, capacity_bytes: int, cut_bytes: int, tails_bytes: int = 0) -> None:
        self._capacity_bytes = capacity_bytes
        self._cut_bytes = cut_bytes
        self._tails_bytes = tails_bytes
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        # The latest use of each cut, by its key. What was used longest ago comes first.
        self._used_at: dict[bytes, int] = {}
        self._ends: set[bytes] = set()  # Keys of the cuts in which requests end.
        self.lost_use = 0
        self._assumed_cuts = _ASSUMED_SHARE * self._capacity_bytes / self._cut_bytes
        # Cuts that came back, and those of them that the LRU and the tier have lost.
        self._known_cuts = 0.0
        self._lost_cuts = 0.0
        self._lost_by_tier_cuts = 0.0
        self.is_followed = False
        self._followed_cuts = 0  # Cuts that came back since the LRU is followed.

    @property
    def num_bytes(self) -> int:
        """The bytes that the LRU has, at most the size of the tier."""
        return len(self._used_at) * self._cut_bytes + len(self._ends) * self._tails_bytes

    def has(self, key: bytes, use: int) -> bool:
        """Whether the LRU would have a cut.

        Args:
            key: The key of the cut.
            use: The latest use of its entry. What a running request uses is not noted yet.
        """
        return key in self._used_at or use > self.lost_use

    def num_found(self, keys: Sequence[bytes]) -> int:
        """How many cuts of a prefix the LRU has, from its first one on."""
        used_at = self._used_at
        return bisect_left(keys, True, key=lambda key: key not in used_at)

    def note_used(self, keys: Sequence[bytes], use: int) -> None:
        """Note that a request, which ends or stops, has used cuts of a prefix or computed them.

        Args:
            keys: The keys of all its cuts, in order.
            use: The use. Uses do not descend from call to call.
        """
        if not keys:
            return
        used_at = self._used_at
        # With a default, because an error here would end the engine.
        deque(map(used_at.pop, keys[: self.num_found(keys)], repeat(None)), maxlen=0)
        used_at.update(dict.fromkeys(reversed(keys), use))
        if self._tails_bytes:
            self._ends.add(keys[-1])
        if self.num_bytes > self._capacity_bytes:
            self._lose(self._capacity_bytes // self._cut_bytes // _LOST_SHARE)

    def _lose(self, num_spare: int) -> None:
        """Lose what was used longest ago, until some cuts would fit beside the rest."""
        limit_bytes = self._capacity_bytes - num_spare * self._cut_bytes
        excess_bytes = self.num_bytes - limit_bytes
        lost = []
        for key in self._used_at:
            if excess_bytes <= 0:
                break
            lost.append(key)
            excess_bytes -= self._cut_bytes + self._tails_bytes * (key in self._ends)
        if lost:
            self.lost_use = self._used_at[lost[-1]]
            deque(map(self._used_at.pop, lost), maxlen=0)
            self._ends.difference_update(lost)

    def note_prompt(self, known_cuts: int, found_cuts: int, tier_cuts: int) -> None:
        """Note what the LRU and the tier have of a prompt.

        Args:
            known_cuts: The cuts that earlier requests had. An endless tier would find them.
            found_cuts: How many of them a plain LRU would find.
            tier_cuts: How many cuts the tier finds. If they are more than the known ones, the
                others do not count.
        """
        if not self.is_followed:
            self._followed_cuts = 0
        else:
            self._followed_cuts += known_cuts
            # The tier may store more than the LRU is thought to store, and lose what the LRU has.
            if self._followed_cuts * self._cut_bytes > _EARLIER_SHARE * self._capacity_bytes:
                found_cuts = min(found_cuts, tier_cuts)
        kept_share = 0.5 ** (known_cuts * self._cut_bytes / self._capacity_bytes)
        self._assumed_cuts *= kept_share
        self._known_cuts = self._known_cuts * kept_share + known_cuts
        self._lost_cuts = self._lost_cuts * kept_share + known_cuts - found_cuts
        lost_by_tier_cuts = max(0, known_cuts - tier_cuts)
        self._lost_by_tier_cuts = self._lost_by_tier_cuts * kept_share + lost_by_tier_cuts
        self.is_followed = self._is_better() or self._is_enough()

    def _is_better(self) -> bool:
        by_chance_cuts = _LOST_BY_CHANCE_SHARE * self._capacity_bytes / self._cut_bytes
        return self._lost_by_tier_cuts >= TIMES_LOST * self._lost_cuts + by_chance_cuts

    def _is_enough(self) -> bool:
        found_cuts = self._known_cuts - self._lost_cuts
        return found_cuts >= ENOUGH_SHARE * (self._known_cuts + self._assumed_cuts)
