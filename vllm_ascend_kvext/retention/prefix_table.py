# SPDX-License-Identifier: Apache-2.0
"""Finds what is known of the prefixes of a prompt.

A prefix is known by its chained hash and its length. Knows no blocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class PrefixTable(Generic[T]):
    """Maps prefixes to values and finds those that a prompt begins with.

    Looking a prompt up costs one probe per distinct length in the table, not one per block.

    Args:
        capacity: The oldest entries give way beyond it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[bytes, tuple[int, T]] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: bytes, length_tokens: int, value: T) -> None:
        self.pop(key)
        self._entries[key] = (length_tokens, value)
        self._lengths[length_tokens] += 1
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
        self._lengths[length_tokens] -= 1
        if not self._lengths[length_tokens]:
            del self._lengths[length_tokens]
        return value

    def on_path(
        self, prefix_key: Callable[[int], bytes], after_tokens: int, upto_tokens: int, step: int
    ) -> list[tuple[int, T]]:
        """Entries whose prefix a prompt begins with, shortest first.

        Args:
            prefix_key: The prompt's key per length in tokens.
            after_tokens: Lengths up to this are left out.
            upto_tokens: The longest length to consider.
            step: Every length in the table is a multiple of it.
        """
        lengths: Iterable[int]
        if len(self._lengths) * step > upto_tokens - after_tokens:
            lengths = range(after_tokens - after_tokens % step + step, upto_tokens + 1, step)
            lengths = [tokens for tokens in lengths if tokens in self._lengths]
        else:
            lengths = sorted(n for n in self._lengths if after_tokens < n <= upto_tokens)
        entries = self._entries
        found = ((tokens, entries.get(prefix_key(tokens))) for tokens in lengths)
        return [(tokens, entry[1]) for tokens, entry in found if entry is not None]

    def values(self) -> Iterator[T]:
        return (value for _, value in self._entries.values())

    def clear(self) -> None:
        self._entries.clear()
        self._lengths.clear()
