# SPDX-License-Identifier: Apache-2.0
"""Finds what is known of the prefixes of a prompt.

A prefix is known by its chained hash and its length. Knows no blocks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

MOST_PROBES = 256
"""Lengths that one search tries."""


class PrefixTable(Generic[T]):
    """Maps prefixes to values and finds the longest one that a prompt begins with.

    Args:
        capacity: The oldest entries give way beyond it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[bytes, tuple[int, T]] = OrderedDict()
        self._num_entries: Counter[int] = Counter()
        self._lengths: list[int] = []

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: bytes, length_tokens: int, value: T) -> None:
        self.pop(key)
        self._entries[key] = (length_tokens, value)
        self._num_entries[length_tokens] += 1
        if self._num_entries[length_tokens] == 1:
            insort(self._lengths, length_tokens)
        if len(self._entries) > self._capacity:
            self.pop(next(iter(self._entries)))

    def get(self, key: bytes) -> T | None:
        entry = self._entries.get(key)
        return None if entry is None else entry[1]

    def pop(self, key: bytes) -> T | None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        length_tokens, value = entry
        self._num_entries[length_tokens] -= 1
        if not self._num_entries[length_tokens]:
            del self._num_entries[length_tokens]
            del self._lengths[bisect_left(self._lengths, length_tokens)]
        return value

    def longest(
        self, prefix_key: Callable[[int], bytes], after_tokens: int, upto_tokens: int
    ) -> int | None:
        """The length in tokens of the longest entry that a prompt begins with.

        Tries the lengths that are in the table, longest first and at most `MOST_PROBES` of them,
        however many entries there are.

        Args:
            prefix_key: The prompt's key per length in tokens.
            after_tokens: Lengths up to this are left out.
            upto_tokens: The longest length to consider.
        """
        lengths = self._lengths
        start = bisect_right(lengths, after_tokens)
        stop = bisect_right(lengths, upto_tokens, start)
        for index in range(stop - 1, max(start, stop - MOST_PROBES) - 1, -1):
            if prefix_key(lengths[index]) in self._entries:
                return lengths[index]
        return None

    def clear(self) -> None:
        self._entries.clear()
        self._num_entries.clear()
        self._lengths.clear()
