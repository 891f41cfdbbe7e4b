# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Finds the entry that a key leads to.

An entry of rows can be found at each of its units. So if two prompts differ from the middle of a
chunk on, both find the rows that they share. If several entries have the rows before a boundary,
the key leads to the entry that begins first, and to the longest one if several begin there. An
entry to which no key leads is of no use. In the picture, a chunk begins at C::

    a prompt ended at B       [C ........ B)            B leads to this entry
    the next turn adds        [C ........ B)[B .. D)    D leads to the second entry
    the chunk as a whole      [C ................ E)    B, D and E lead to it: the others may go

The module knows neither places nor eviction. The time of a call grows with the keys of an entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind

_Table = dict[bytes, list[Entry]]
"""The entries of each key, mostly one. The key leads to the first of them."""


class Index:
    """Entries by kind and key."""

    def __init__(self) -> None:
        self._stored: dict[Kind, _Table] = {kind: {} for kind in Kind}
        self._storing: dict[Kind, _Table] = {kind: {} for kind in Kind}

    def stored(self, kind: Kind, key: bytes) -> Entry | None:
        """The STORED entry with the rows or tails before a boundary; None if there is none."""
        entries = self._stored[kind].get(key)
        return entries[0] if entries else None

    def all_stored(self, kind: Kind, keys: Iterable[bytes]) -> list[Entry]:
        """The STORED entries of many boundaries. Boundaries without an entry are left out."""
        table = self._stored[kind]
        return [entries[0] for key in keys if (entries := table.get(key))]

    def storing(self, kind: Kind, key: bytes) -> Entry | None:
        """The entry with the rows or tails before a boundary, if being stored; None otherwise."""
        entries = self._storing[kind].get(key)
        return entries[0] if entries else None

    def present(self, kind: Kind, key: bytes) -> Entry | None:
        """The entry that is stored or being stored; if there are both, the entry with more rows."""
        stored = self._stored[kind].get(key)
        storing = self._storing[kind].get(key)
        if not storing:
            return stored[0] if stored else None
        return min(stored[0], storing[0], key=_reach) if stored else storing[0]

    def upto_stored(self, kind: Kind, keys: Sequence[bytes]) -> int:
        """The number of keys up to the last one that leads to a STORED entry."""
        return _upto(self._stored[kind], keys)

    def upto_present(self, kind: Kind, keys: Sequence[bytes]) -> int:
        """The number of keys up to the last one with an entry that is stored or being stored."""
        num_stored = _upto(self._stored[kind], keys)
        storing = self._storing[kind]
        return max(num_stored, _upto(storing, keys)) if storing else num_stored

    def begin(self, entry: Entry) -> None:
        """Add an entry that is going to be stored."""
        table = self._storing[entry.piece.kind]
        for key in entry.keys:
            _insert(table, key, entry)

    def settle(self, entry: Entry) -> list[Entry]:
        """Make an entry STORED. It takes over the keys of entries that have fewer of the rows.

        Returns:
            The entries to which no key leads any more. The entry itself is one of them if all its
            rows are in other stored entries.
        """
        kind = entry.piece.kind
        for key in entry.keys:
            _remove(self._storing[kind], key, entry)
        entry.state = EntryState.STORED
        useless = []
        for key in entry.keys:
            known = self.stored(kind, key)
            if _insert(self._stored[kind], key, entry):
                entry.num_leading_keys += 1
                if known is not None:
                    known.num_leading_keys -= 1
                    if not known.num_leading_keys:
                        useless.append(known)
        if not entry.num_leading_keys:
            useless.append(entry)
        return useless

    def trim(self, entry: Entry, num_keys: int) -> list[bytes]:
        """Leave a STORED entry its first keys only. The caller shortens the entry's piece before.

        Returns:
            The keys that were removed, and that lead to no stored entry now. If other entries have
            the other rows, too, no key may lead to the entry any more.
        """
        table = self._stored[entry.piece.kind]
        removed = entry.keys[num_keys:]
        entry.keys = entry.keys[:num_keys]
        for key in removed:
            if _remove(table, key, entry):
                entry.num_leading_keys -= 1
                if entries := table.get(key):
                    entries[0].num_leading_keys += 1
        # The entry has become shorter, so keys may lead to another entry that begins there, too.
        for key in entry.keys:
            entries = table[key]
            if len(entries) == 1:
                continue  # This is the usual case.
            was_leading = _remove(table, key, entry)
            if not _insert(table, key, entry) and was_leading:
                entry.num_leading_keys -= 1
                entries[0].num_leading_keys += 1
        return [key for key in removed if key not in table]

    def drop(self, entry: Entry) -> list[bytes]:
        """Remove an entry, stored or not. Returns its keys that lead to no stored entry now."""
        kind = entry.piece.kind
        is_stored = entry.state is EntryState.STORED
        table = (self._stored if is_stored else self._storing)[kind]
        for key in entry.keys:
            was_leading = _remove(table, key, entry)
            successor = self.stored(kind, key)
            if is_stored and was_leading and successor is not None:
                successor.num_leading_keys += 1
        entry.num_leading_keys = 0
        return [key for key in entry.keys if self.stored(kind, key) is None]


def _reach(entry: Entry) -> tuple[int, int]:
    """The sort key of entries that have the same row. The row is read from the lesser entry."""
    return entry.piece.first_tokens, -entry.piece.end_tokens


def _upto(table: _Table, keys: Sequence[bytes]) -> int:
    if table.keys().isdisjoint(keys):
        return 0  # This is the usual case, and a quick check.
    return next(number for number in range(len(keys), 0, -1) if keys[number - 1] in table)


def _insert(table: _Table, key: bytes, entry: Entry) -> bool:
    """Add an entry to a key. Returns whether the key leads to it from now on."""
    entries = table.setdefault(key, [])
    place = 0
    while place < len(entries) and _reach(entries[place]) <= _reach(entry):
        place += 1
    entries.insert(place, entry)
    return not place


def _remove(table: _Table, key: bytes, entry: Entry) -> bool:
    """Remove an entry from a key. Returns whether the key led to it."""
    entries = table[key]
    was_leading = entries[0] is entry
    entries.remove(entry)
    if not entries:
        del table[key]
    return was_leading
