# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Entries of host memory that are being put into the shared tier."""

from __future__ import annotations

from functools import partial

from vllm_ascend_kvext.shared_tier import names
from vllm_ascend_kvext.shared_tier.backend import SharedObject
from vllm_ascend_kvext.shared_tier.scheduler import limits
from vllm_ascend_kvext.shared_tier.scheduler.shared_parts import SharedParts
from vllm_ascend_kvext.store.entries import Entry, Kind, Load


class Puts:
    """The puts of one engine.

    Args:
        spare_bytes: The bytes that each entry in host memory has behind its content.

    Attributes:
        is_off: Whether nothing is put any more.
    """

    def __init__(self, shared: SharedParts, spare_bytes: int) -> None:
        self._shared = shared
        self._tier = shared.core.tier
        self._counters = shared.core.counters
        self._clock = shared.core.clock
        self._spare_bytes = spare_bytes
        self._new: list[SharedObject] = []  # The puts of the next step.
        self._num_bytes = 0  # The bytes of entries that are being put.
        self._paused_until_s = -limits.PAUSE_S
        self.is_off = False

    @property
    def is_paused(self) -> bool:
        """Whether nothing is put or touched for a while."""
        return self._clock() < self._paused_until_s

    def pause(self) -> None:
        """Put and touch nothing for a while, because a put or a touch has failed."""
        self._paused_until_s = self._clock() + limits.PAUSE_S

    def turn_off(self) -> None:
        """Put nothing any more. Puts that the workers have been told of are still made."""
        self.is_off = True

    def put(self, entry: Entry) -> None:
        """Let the workers put an entry, unless this was done, or too many bytes are being put."""
        if entry.is_shared or self.is_off:
            return
        max_bytes = max(entry.num_bytes, self._tier.capacity_bytes * limits.MAX_PUT_SHARE)
        is_busy = self._num_bytes + entry.num_bytes > max_bytes
        if is_busy or self.is_paused:
            self._counters.shared_failures["put_busy"] += 1
            return
        load = self._tier.pin(entry)
        if load is None:
            return
        has_notes = entry.piece.kind is Kind.ROWS and not entry.key_space
        notes = tuple(map(names.note_name, entry.keys)) if has_notes else ()
        number = self._shared.jobs.begin(partial(self._end, entry, load))
        name = names.object_name(entry.piece, entry.key, entry.key_space)
        name = self._shared.full_name(name)
        num_bytes = entry.num_bytes - self._spare_bytes  # Contents are multiples of 64 bytes.
        self._new.append(SharedObject(number, name, entry.offset_bytes, num_bytes, notes))
        self._num_bytes += entry.num_bytes
        entry.is_shared = True

    def drop_new(self) -> None:
        """Drop the puts that the workers have not been told of."""
        for what in self.take_new():
            self._shared.jobs.drop(what.number)

    def _end(self, entry: Entry, load: Load, has_failed: bool) -> None:
        self._num_bytes -= entry.num_bytes
        if has_failed:
            entry.is_shared = False
            self.pause()
        self._tier.end_load(load)

    def take_new(self) -> tuple[SharedObject, ...]:
        """The puts that the workers begin with this step."""
        new = tuple(self._new)
        self._new.clear()
        return new

    @property
    def has_new(self) -> bool:
        """Whether there are puts that the workers have not been told of."""
        return bool(self._new)
