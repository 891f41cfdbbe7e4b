# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Learns whether a plain LRU would find as much as the order by expected hits.

If nearly all that comes back fits into the tier, a plain LRU finds it. The order by expected hits
can only lose then, because it judges by what was learned before. If much comes back that a plain
LRU would have lost, that order finds more. So the tier follows the one that finds more.

No second tier is needed to know what a plain LRU of the same size would have: it has what was used
at its *reach* or later. What was used since the reach takes no more than the size::

    use      1      2      3      4      5      6
    bytes    4  |   2      1      0      3      2       size 8: the reach is 2

When bytes are used again, they move to the later use. The module knows uses and bytes, but no keys.
"""

from __future__ import annotations

from collections import OrderedDict

NEVER = 1 << 62
"""A use that never comes."""


class Recency:
    """Follows what a plain LRU would find, beside what the tier finds.

    What was found counts by half when as much has been asked for since as the tier holds.

    Args:
        capacity_bytes: The size of the tier.

    Attributes:
        reach: The first use of which a plain LRU would still have everything.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.reach = 0
        # By use, the bytes that were used last at this use; from the reach on.
        self._bytes_at: OrderedDict[int, int] = OrderedDict()
        self._num_bytes = 0
        self._lost_bytes = 0.0
        self._gained_bytes = 0.0

    @property
    def is_best(self) -> bool:
        """Whether a plain LRU finds as much as the order by expected hits, or more."""
        return self._gained_bytes <= self._lost_bytes

    @property
    def kept_from(self) -> int:
        """The use from which on everything is to stay; `NEVER` if expected hits decide."""
        return self.reach if self.is_best else NEVER

    def note_used(self, use: int, num_bytes: int) -> None:
        """Note the latest use of some bytes. Uses do not descend from call to call."""
        self._bytes_at[use] = self._bytes_at.get(use, 0) + num_bytes
        self._num_bytes += num_bytes
        # The latest use always stays.
        while self._num_bytes > self._capacity_bytes and len(self._bytes_at) > 1:
            oldest, lost_bytes = self._bytes_at.popitem(last=False)
            self._num_bytes -= lost_bytes
            self.reach = oldest + 1

    def note_moved(self, use: int, num_bytes: int) -> None:
        """Note that bytes whose latest use was ``use`` are used again, or not known any more."""
        if use in self._bytes_at:
            self._bytes_at[use] -= num_bytes
            self._num_bytes -= num_bytes

    def note_found(self, known_bytes: int, within_bytes: int, found_bytes: int) -> None:
        """Compare what was found for a prompt.

        Args:
            known_bytes: What earlier requests had of the prompt. An endless tier would find it.
            within_bytes: What a plain LRU would find of it.
            found_bytes: What was found.
        """
        kept_share = 0.5 ** (known_bytes / self._capacity_bytes)
        if self.is_best:
            # The other order might have kept all of the rest.
            gained_bytes, lost_bytes = known_bytes - within_bytes, 0
        else:
            gained_bytes = max(0, min(found_bytes, known_bytes) - within_bytes)
            lost_bytes = max(0, within_bytes - found_bytes)
        self._gained_bytes = self._gained_bytes * kept_share + gained_bytes
        self._lost_bytes = self._lost_bytes * kept_share + lost_bytes
