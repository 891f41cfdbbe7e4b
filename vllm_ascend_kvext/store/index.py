# SPDX-License-Identifier: Apache-2.0
"""Which entry a key leads to.

Rows are found at each unit of theirs, so that a prompt that parts ways in the middle of a chunk
still finds what it shares. Where several entries have the rows before a boundary, the key leads to
the one that begins first, the longest of several. An entry to which no key leads is of no use::

    a prompt ended at B       [kC ....... B)            B leads to it
    the next turn adds        [kC ....... B)[B .. D)    D leads to the second, which begins at B
    the chunk as a whole      [kC ............... E)    B, D and E lead to it: the others may go

Knows nothing of places and of what gives way. Calls take time in proportion to an entry's keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind

_Table = dict[bytes, list[Entry]]
"""Mostly one entry per key; where there are more, the one to which the key leads is the first."""


class Index:
    """Entries by kind and key."""

    def __init__(self) -> None:
        self._stored: dict[Kind, _Table] = {kind: {} for kind in Kind}
        self._storing: dict[Kind, _Table] = {kind: {} for kind in Kind}

    def stored(self, kind: Kind, key: bytes) -> Entry | None:
        """The STORED entry with what lies before a boundary."""
        entries = self._stored[kind].get(key)
        return entries[0] if entries else None

    def all_stored(self, kind: Kind, keys: Iterable[bytes]) -> list[Entry]:
        """The same for many boundaries; those without an entry are left out."""
        table = self._stored[kind]
        return [entries[0] for key in keys if (entries := table.get(key))]

    def storing(self, kind: Kind, key: bytes) -> Entry | None:
        """The same for entries that are being stored."""
        entries = self._storing[kind].get(key)
        return entries[0] if entries else None

    def present(self, kind: Kind, key: bytes) -> Entry | None:
        """Stored or being stored, whichever has more of the rows."""
        stored = self._stored[kind].get(key)
        storing = self._storing[kind].get(key)
        if not storing:
            return stored[0] if stored else None
        return min(stored[0], storing[0], key=_reach) if stored else storing[0]

    def upto_stored(self, kind: Kind, keys: Sequence[bytes]) -> int:
        """How many of some keys there are up to the last that leads to a STORED entry."""
        return _upto(self._stored[kind], keys)

    def upto_present(self, kind: Kind, keys: Sequence[bytes]) -> int:
        """The same for entries that are stored or being stored."""
        num_stored = _upto(self._stored[kind], keys)
        storing = self._storing[kind]
        return max(num_stored, _upto(storing, keys)) if storing else num_stored

    def begin(self, entry: Entry) -> None:
        """An entry is going to be stored."""
        table = self._storing[entry.piece.kind]
        for key in entry.keys:
            _insert(table, key, entry)

    def settle(self, entry: Entry) -> list[Entry]:
        """An entry is stored, and takes over the keys of entries that have fewer of the rows.

        Returns:
            The entries to which no key leads any more; the entry itself is among them if others
            have been stored that have all its rows.
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

    def drop(self, entry: Entry) -> list[bytes]:
        """An entry leaves, stored or not; returns its keys that lead to no stored entry now."""
        kind = entry.piece.kind
        is_stored = entry.state is EntryState.STORED
        table = (self._stored if is_stored else self._storing)[kind]
        for key in entry.keys:
            was_leading = _remove(table, key, entry)
            heir = self.stored(kind, key)
            if is_stored and was_leading and heir is not None:
                heir.num_leading_keys += 1
        entry.num_leading_keys = 0
        return [key for key in entry.keys if self.stored(kind, key) is None]


def _reach(entry: Entry) -> tuple[int, int]:
    """Of two entries with the same row, the lesser is the better one to read it from."""
    return entry.piece.first_tokens, -entry.piece.end_tokens


def _upto(table: _Table, keys: Sequence[bytes]) -> int:
    if table.keys().isdisjoint(keys):
        return 0  # Mostly so, and quick.
    return next(number for number in range(len(keys), 0, -1) if keys[number - 1] in table)


def _insert(table: _Table, key: bytes, entry: Entry) -> bool:
    """Whether the key leads to the entry from now on."""
    entries = table.setdefault(key, [])
    place = 0
    while place < len(entries) and _reach(entries[place]) <= _reach(entry):
        place += 1
    entries.insert(place, entry)
    return not place


def _remove(table: _Table, key: bytes, entry: Entry) -> bool:
    """Whether the key led to the entry."""
    entries = table[key]
    was_leading = entries[0] is entry
    entries.remove(entry)
    if not entries:
        del table[key]
    return was_leading
