# SPDX-License-Identifier: Apache-2.0
"""How much of the tier is for entries that were loaded: learned from what was evicted too early.

Entries that were never loaded have the rest, as a queue: what is not asked for before it has come
to the end is lost. Which share is best depends on the requests. Where most prompts are sent once, a
large one keeps them from pushing out what is of use. Where other documents become popular, it keeps
those that nobody asks for any more, and new ones leave before their second use.

So the tier remembers what it has evicted last. An entry that is stored again would not have been
evicted if its part of the tier had been a little larger::

    evicted, never loaded, stored again      less for what was loaded
    evicted, loaded before, stored again     more for it

What was last loaded behind a hole belongs to neither part, and says nothing.

Both memories are small, and of one size: they measure what a little more room would bring to either
part (A. Cidon, A. Eisenman, M. Alizadeh and S. Katti, "Cliffhanger: Scaling Performance Cliffs in
Web Memory Caches", NSDI 2016). With memories as large as the tier, as in ARC, requests for what no
share could have kept decide: on the traces of ``benchmarks/holes`` that computes more tokens than a
fixed share.
"""

from __future__ import annotations

from collections import OrderedDict

from vllm_ascend_kvext.store.entries import Entry, Kind

REMEMBERED_SHARE = 1 / 32
"""Of the tier: what each memory would take if it held bytes. On the traces of ``benchmarks/holes``,
larger ones forget what was of use, smaller ones do not notice what is."""


class ProtectedShare:
    """The share of one tier.

    Args:
        capacity_bytes: Of the tier.
        share: Of it, to begin with. From 0 to 1.
        remembered_share: Of it, that the entries would take that each memory remembers.

    Attributes:
        num_bytes: What entries that were loaded may take together.
    """

    __slots__ = (
        "_capacity_bytes",
        "_first_bytes",
        "_largest_bytes",
        "_loaded",
        "_never_loaded",
        "_remembered_bytes",
        "num_bytes",
    )

    def __init__(
        self, capacity_bytes: int, share: float, remembered_share: float = REMEMBERED_SHARE
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._first_bytes = self.num_bytes = int(share * capacity_bytes)
        self._remembered_bytes = int(remembered_share * capacity_bytes)
        self._largest_bytes = 0
        self._never_loaded = _Evicted(self._remembered_bytes)
        self._loaded = _Evicted(self._remembered_bytes)

    def note_evicted(self, entry: Entry) -> None:
        """An entry has given way."""
        if entry.was_hit:
            self._loaded.put(entry)
        elif not entry.was_loaded:
            self._never_loaded.put(entry)

    def note_wanted(self, entry: Entry) -> None:
        """An entry is going to be stored, perhaps again."""
        if self._never_loaded.take(entry):
            self.num_bytes = max(0, self.num_bytes - entry.num_bytes)
        if self._loaded.take(entry):
            self.num_bytes += entry.num_bytes
        # New entries keep some room. Without any, all stores would be refused, nothing would be
        # evicted, and nothing be learned.
        self._largest_bytes = max(self._largest_bytes, entry.num_bytes)
        room_bytes = max(self._remembered_bytes, self._largest_bytes)
        most_bytes = max(self._first_bytes, self._capacity_bytes - room_bytes)
        self.num_bytes = min(self.num_bytes, most_bytes)

    def clear(self) -> None:
        """The tier is emptied: begin anew."""
        self._never_loaded.clear()
        self._loaded.clear()
        self.num_bytes = self._first_bytes


class _Evicted:
    """The keys of the entries that gave way last, as many as have so many bytes.

    Calls take constant time, amortised.
    """

    __slots__ = ("_most_bytes", "_num_bytes", "_sizes_bytes")

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._sizes_bytes: OrderedDict[tuple[Kind, bytes], int] = OrderedDict()

    def put(self, entry: Entry) -> None:
        self.take(entry)
        self._sizes_bytes[entry.piece.kind, entry.key] = entry.num_bytes
        self._num_bytes += entry.num_bytes
        while self._num_bytes > self._most_bytes:
            self._num_bytes -= self._sizes_bytes.popitem(last=False)[1]

    def take(self, entry: Entry) -> bool:
        """Whether it was there; it is not any more."""
        num_bytes = self._sizes_bytes.pop((entry.piece.kind, entry.key), None)
        self._num_bytes -= num_bytes or 0
        return num_bytes is not None

    def clear(self) -> None:
        self._sizes_bytes.clear()
        self._num_bytes = 0
