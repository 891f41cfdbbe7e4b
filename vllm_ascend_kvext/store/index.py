# SPDX-License-Identifier: Apache-2.0
"""Which entry a key leads to.

Rows are found at each unit of theirs, so that a prompt that parts ways in the middle of a chunk
still finds what it shares. Where several entries have the rows before a boundary, the key leads to
the one that begins first; an entry to which no key leads any more is of no use::

    a prompt ended at B       [kC ....... B)            B leads to it
    the next turn adds        [kC ....... B)[B .. D)    D leads to the second, which begins at B
    the chunk as a whole      [kC ............... E)    B, D and E lead to it: the others may go

Knows nothing of places and of what gives way. Calls take time in proportion to an entry's keys.
"""

from __future__ import annotations

from collections import defaultdict

from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind


class Index:
    """Entries by kind and key."""

    __slots__ = ("_stored", "_storing")

    def __init__(self) -> None:
        self._stored: dict[Kind, dict[bytes, Entry]] = {kind: {} for kind in Kind}
        # Mostly one; two where a chunk is stored as a whole while a piece of it still is.
        self._storing: dict[Kind, defaultdict[bytes, list[Entry]]] = {
            kind: defaultdict(list) for kind in Kind
        }

    def stored(self, kind: Kind, key: bytes) -> Entry | None:
        """The STORED entry with what lies before a boundary."""
        return self._stored[kind].get(key)

    def storing(self, kind: Kind, key: bytes) -> Entry | None:
        """The same for entries that are being stored."""
        entries = self._storing[kind].get(key)
        return min(entries, key=_first_tokens) if entries else None

    def present(self, kind: Kind, key: bytes) -> Entry | None:
        """Stored or being stored, whichever begins first."""
        stored, storing = self.stored(kind, key), self.storing(kind, key)
        if stored is None or storing is None:
            return stored or storing
        return min(stored, storing, key=_first_tokens)

    def begin(self, entry: Entry) -> None:
        """An entry is going to be stored."""
        table = self._storing[entry.piece.kind]
        for key in entry.keys:
            table[key].append(entry)

    def settle(self, entry: Entry) -> list[Entry]:
        """An entry is stored, and takes over the keys of shorter ones.

        Returns:
            The entries to which no key leads any more; the entry itself is among them if others
            have been stored that begin no later.
        """
        self._end_storing(entry)
        entry.state = EntryState.STORED
        table = self._stored[entry.piece.kind]
        useless = []
        for key in entry.keys:
            known = table.get(key)
            if known is not None:
                if _first_tokens(known) <= _first_tokens(entry):
                    continue
                known.num_leading_keys -= 1
                if not known.num_leading_keys:
                    useless.append(known)
            table[key] = entry
            entry.num_leading_keys += 1
        if not entry.num_leading_keys:
            useless.append(entry)
        return useless

    def drop(self, entry: Entry) -> list[bytes]:
        """An entry leaves, stored or not.

        Returns:
            The keys that led to it, or would have.
        """
        if entry.state is EntryState.STORING:
            self._end_storing(entry)
            return list(entry.keys)
        table = self._stored[entry.piece.kind]
        dropped = [key for key in entry.keys if table.get(key) is entry]
        for key in dropped:
            del table[key]
        entry.num_leading_keys = 0
        return dropped

    def _end_storing(self, entry: Entry) -> None:
        table = self._storing[entry.piece.kind]
        for key in entry.keys:
            entries = table[key]
            entries.remove(entry)
            if not entries:
                del table[key]


def _first_tokens(entry: Entry) -> int:
    return entry.piece.first_tokens
