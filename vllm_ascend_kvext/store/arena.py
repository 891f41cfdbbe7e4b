# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Allocates places in the host buffer. It uses best fit, and joins neighbouring gaps.

The arena takes the smallest gap that is large enough; if there are several, the lowest one. Sizes
are rounded up to multiples of 64 bytes. With n gaps, a call takes O(log n) comparisons, and moves
up to n pointers of a sorted list.

Best fit can waste much memory (J. M. Robson, "Worst case fragmentation of first fit and best fit
storage allocation strategies", The Computer Journal 20, 1977), but wastes little with most programs
(M. S. Johnstone and P. R. Wilson, "The memory fragmentation problem: solved?", 1998). A cache can
also free what it holds: `Arena.window_around` names neighbours whose release makes one gap.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import NamedTuple

from vllm_ascend_kvext.errors import TierError

ALIGNMENT_BYTES = 64
"""The alignment of places, a multiple of what the transfer op needs (``HOST_ALIGNMENT_BYTES``)."""


class _Part(NamedTuple):
    """A place that is in use, or a gap."""

    offset_bytes: int
    num_bytes: int
    is_used: bool


class Arena:
    """Allocates places at multiples of 64 bytes.

    Args:
        capacity_bytes: The size of the buffer. It is rounded down to a multiple of 64.
        spare_bytes: Additional bytes at the end of every place.

    Raises:
        TierError: If the capacity is less than 64.
    """

    def __init__(self, capacity_bytes: int, spare_bytes: int = 0) -> None:
        if capacity_bytes < ALIGNMENT_BYTES:
            raise TierError(
                f"host arena: expected a capacity of at least {ALIGNMENT_BYTES} bytes, found "
                f"{capacity_bytes}; give it more host memory or leave the tier out"
            )
        self.capacity_bytes = capacity_bytes - capacity_bytes % ALIGNMENT_BYTES
        self._spare_bytes = spare_bytes
        self.used_bytes = 0
        self._places: dict[int, int] = {}
        self._gaps: dict[int, int] = {}
        # Maps the end of each place or gap to its beginning. This finds the neighbour before an
        # offset.
        self._begins: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self._add_gap(0, self.capacity_bytes)

    @property
    def largest_gap_bytes(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    def place_bytes(self, num_bytes: int) -> int:
        """The size of a place for a number of bytes. The other methods take sizes of places."""
        assert num_bytes > 0
        num_bytes += self._spare_bytes
        return num_bytes + -num_bytes % ALIGNMENT_BYTES

    def allocate(self, size_bytes: int) -> int | None:
        """Allocate a place. Returns its offset, a multiple of 64, or None if no gap fits."""
        assert size_bytes > 0 and size_bytes % ALIGNMENT_BYTES == 0
        index = bisect_left(self._by_size, (size_bytes, 0))
        if index == len(self._by_size):
            return None
        gap_bytes, offset_bytes = self._by_size[index]
        self._remove_gap(offset_bytes)
        if gap_bytes > size_bytes:
            self._add_gap(offset_bytes + size_bytes, gap_bytes - size_bytes)
        self._places[offset_bytes] = size_bytes
        self._begins[offset_bytes + size_bytes] = offset_bytes
        self.used_bytes += size_bytes
        return offset_bytes

    def free(self, offset_bytes: int) -> None:
        """Free a place; raises KeyError if no place begins at the offset."""
        size_bytes = self._places.pop(offset_bytes)
        self.used_bytes -= size_bytes
        begin, end = offset_bytes, offset_bytes + size_bytes
        del self._begins[end]
        before = self._begins.get(begin, -1)
        if before in self._gaps:
            self._remove_gap(before)
            begin = before
        if end in self._gaps:
            end += self._remove_gap(end)
        self._add_gap(begin, end - begin)

    def shrink(self, offset_bytes: int, size_bytes: int) -> None:
        """Free the end of a place, which keeps its first ``size_bytes`` bytes.

        Raises:
            KeyError: No place begins at the offset.
        """
        before_bytes = self._places[offset_bytes]
        assert 0 < size_bytes <= before_bytes and size_bytes % ALIGNMENT_BYTES == 0
        if size_bytes == before_bytes:
            return
        begin, end = offset_bytes + size_bytes, offset_bytes + before_bytes
        self._places[offset_bytes] = size_bytes
        self.used_bytes -= before_bytes - size_bytes
        del self._begins[end]
        self._begins[begin] = offset_bytes
        if end in self._gaps:
            end += self._remove_gap(end)
        self._add_gap(begin, end - begin)

    def num_parts(self, part_bytes: int, max_parts: int) -> int:
        """How many consecutive parts of a size fit into the gaps, at most ``max_parts``.

        Parts that follow each other in one gap share the additional bytes of one place.
        """
        num_parts = 0
        for gap_bytes, _ in reversed(self._by_size):
            of_gap = (gap_bytes - self._spare_bytes) // part_bytes
            if of_gap <= 0 or num_parts >= max_parts:
                break
            num_parts += of_gap
        return min(num_parts, max_parts)

    def window_around(
        self, offset_bytes: int, size_bytes: int, may_free: Callable[[int], bool]
    ) -> list[int] | None:
        """Find places around one place whose release makes a gap of some size.

        The method chooses the window that frees the fewest bytes; if several windows do, the lowest
        one. Its time grows with the square of the number of parts in a window. A window has few
        parts unless sizes differ by orders of magnitude.

        Args:
            offset_bytes: A place that is freed in any case.
            size_bytes: The size of the gap.
            may_free: Whether the place at another offset may be freed, too.

        Returns:
            The offsets of the places to free, ascending, ``offset_bytes`` included; None if places
            that must stay are in the way.
        """
        center = _Part(offset_bytes, self._places[offset_bytes], True)
        if center.num_bytes >= size_bytes:
            return [offset_bytes]
        lacking_bytes = size_bytes - center.num_bytes
        before = self._parts_beside(center, lacking_bytes, may_free, self._part_before)
        behind = self._parts_beside(center, lacking_bytes, may_free, self._part_behind)
        return _cheapest_window([*reversed(before), center, *behind], len(before), size_bytes)

    def _parts_beside(
        self,
        center: _Part,
        lacking_bytes: int,
        may_free: Callable[[int], bool],
        next_of: Callable[[_Part], _Part | None],
    ) -> list[_Part]:
        """Parts on one side, nearest first, until they have enough bytes or a place must stay."""
        parts: list[_Part] = []
        part = center
        while lacking_bytes > 0:
            next_part = next_of(part)
            if next_part is None or (next_part.is_used and not may_free(next_part.offset_bytes)):
                break
            part = next_part
            parts.append(part)
            lacking_bytes -= part.num_bytes
        return parts

    def _part_before(self, part: _Part) -> _Part | None:
        offset_bytes = self._begins.get(part.offset_bytes)
        return None if offset_bytes is None else self._part_at(offset_bytes)

    def _part_behind(self, part: _Part) -> _Part | None:
        end_bytes = part.offset_bytes + part.num_bytes
        return None if end_bytes == self.capacity_bytes else self._part_at(end_bytes)

    def _part_at(self, offset_bytes: int) -> _Part:
        size_bytes = self._places.get(offset_bytes)
        if size_bytes is None:
            return _Part(offset_bytes, self._gaps[offset_bytes], False)
        return _Part(offset_bytes, size_bytes, True)

    def _add_gap(self, offset_bytes: int, num_bytes: int) -> None:
        self._gaps[offset_bytes] = num_bytes
        self._begins[offset_bytes + num_bytes] = offset_bytes
        insort(self._by_size, (num_bytes, offset_bytes))

    def _remove_gap(self, offset_bytes: int) -> int:
        num_bytes = self._gaps.pop(offset_bytes)
        del self._begins[offset_bytes + num_bytes]
        del self._by_size[bisect_left(self._by_size, (num_bytes, offset_bytes))]
        return num_bytes


def _cheapest_window(parts: list[_Part], center: int, size_bytes: int) -> list[int] | None:
    """The consecutive parts around ``center`` that are large enough and free the fewest bytes."""
    best: tuple[int, int, int] | None = None
    for first in range(center + 1):
        total_bytes = 0
        freed_bytes = 0
        for end, part in enumerate(parts[first:], first + 1):
            total_bytes += part.num_bytes
            if part.is_used:
                freed_bytes += part.num_bytes
            if total_bytes >= size_bytes and end > center:
                best = min(best or (freed_bytes, first, end), (freed_bytes, first, end))
                break
    if best is None:
        return None
    _, first, end = best
    return [part.offset_bytes for part in parts[first:end] if part.is_used]
