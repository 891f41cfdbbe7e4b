# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Entries that requests use a second time are put into the shared tier, or touched if it has them.

The tier is told of each use, so that unused objects give way first. An object that the tier has
lost is put again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from vllm_ascend_kvext.connector.common.scheduler_view import Request
from vllm_ascend_kvext.shared_tier import names
from vllm_ascend_kvext.shared_tier.backend import UsedObjects
from vllm_ascend_kvext.shared_tier.scheduler import limits
from vllm_ascend_kvext.shared_tier.scheduler.puts import Puts
from vllm_ascend_kvext.shared_tier.scheduler.shared_parts import SharedParts
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind, Piece
from vllm_ascend_kvext.store.prefix import Prefix
from vllm_ascend_kvext.store.remembered_keys import RememberedKeys


@dataclass(slots=True, eq=False)
class _Touch:
    """One job that tells the tier of used objects.

    Attributes:
        entries: The entries in host memory, by name of the object; None if host memory lacks an
            entry.
        began_s: When the job began, by the clock of the scheduler side.
        number: The number of the job.
        absent: The indices of objects that the tier does not have.
    """

    entries: dict[str, Entry | None]
    began_s: float
    number: int = -1
    absent: set[int] = field(default_factory=set)


class Uses:
    """The touches of one engine, and the puts of used entries."""

    def __init__(self, shared: SharedParts, puts: Puts) -> None:
        self._shared = shared
        self._layout = shared.core.layout
        self._view = shared.core.view
        self._tier = shared.core.tier
        self._clock = shared.core.clock
        self._puts = puts
        # Used objects that wait to be touched, by name, with the entry if host memory has it.
        self._new: dict[str, Entry | None] = {}
        self._touches: dict[int, _Touch] = {}  # By number of the job, without hanging touches.
        self._num_touched = 0  # The number of objects in `_touches`.
        self._num_hung = 0  # The number of touches that hang.
        self._touched_s: RememberedKeys[float] = RememberedKeys(limits.REMEMBERED_TOUCHES)

    # What is used.

    def note_begun(self, request: Request, computed_tokens: int) -> None:
        """A request goes on behind tokens that other requests have computed. Note their use."""
        prefix = self._view.prefix(request)
        geometry = self._tier.geometry
        boundary = geometry.floor(min(computed_tokens, prefix.num_tokens))
        if not boundary or request.lora_request:
            return
        lookup = self._tier.lookup(prefix)
        if geometry.needs_rows:
            begin_tokens = boundary
            for end_tokens, entry in lookup.walk_back(0, boundary):
                self._note_used_on_device(prefix, end_tokens, begin_tokens)
                self._note_used(entry, prefix.key_at(end_tokens))
                begin_tokens = entry.piece.first_tokens
            self._note_used_on_device(prefix, 0, begin_tokens)
        if geometry.needs_tails:
            key = prefix.key_at(boundary)
            name = names.object_name(Piece.tails(boundary), key)
            self._note_used(lookup.index.stored(Kind.TAILS, key), key, name)

    def note_used_entry(self, entry: Entry) -> None:
        """A request uses an extension's entry. The entry has another key space than prompts."""
        name = names.object_name(entry.piece, entry.key, entry.key_space)
        self._note_used(entry, entry.key, name)

    def _note_used_on_device(self, prefix: Prefix, first_tokens: int, end_tokens: int) -> None:
        """A request uses rows that host memory lacks. Note each chunk, and the rows at the end."""
        if first_tokens < end_tokens:
            geometry = self._tier.geometry
            chunk_ends = range(geometry.chunk_end(first_tokens), end_tokens, geometry.chunk_tokens)
            for boundary in (*chunk_ends, end_tokens):
                self._note_used(None, prefix.key_at(boundary))

    def _note_used(self, entry: Entry | None, key: bytes, name: str = "") -> None:
        """Put a used entry into the tier. If the tier has it already, touch it from time to time.

        Args:
            name: The name in the tier. By default, a note with the key leads to the object.
        """
        if entry is not None and not entry.is_shared:
            self._puts.put(entry)
            return
        now_s = self._clock()
        mark = name.encode() or key
        is_due = now_s - self._touched_s.get(mark, -limits.TOUCH_EVERY_S) >= limits.TOUCH_EVERY_S
        if not is_due or len(self._new) >= limits.REMEMBERED_TOUCHES or self._touches_nothing:
            return
        self._touched_s.put(mark, now_s)
        self._new[self._shared.full_name(name or names.note_name(key))] = entry

    # Touches.

    @property
    def _touches_nothing(self) -> bool:
        has_hung = self._num_hung >= limits.MAX_ABANDONED
        return self._puts.is_off or self._puts.is_paused or has_hung

    @property
    def has_new(self) -> bool:
        """Whether the workers can be given a new touch."""
        return bool(self._new) and self._num_touched < limits.MAX_TOUCHED

    def take_new(self) -> tuple[UsedObjects, ...]:
        """The touches that the workers begin with this step."""
        self._leave_hanging_behind()
        if self._touches_nothing:
            self._new.clear()
        begun = list(islice(self._new, max(0, limits.MAX_TOUCHED - self._num_touched)))
        if not begun:
            return ()
        touch = _Touch({name: self._new.pop(name) for name in begun}, self._clock())
        self._num_touched += len(begun)
        touch.number = self._shared.jobs.begin(partial(self._end, touch))
        self._touches[touch.number] = touch
        return (UsedObjects(touch.number, tuple(touch.entries)),)

    def _leave_hanging_behind(self) -> None:
        """Count hanging touches separately, so that other touches do not wait for them."""
        before_s = self._clock() - limits.MAX_HANG_S
        hung = [number for number, touch in self._touches.items() if touch.began_s < before_s]
        for number in hung:
            self._num_touched -= len(self._touches.pop(number).entries)
            self._num_hung += 1

    def note_absent(self, number: int, absent: set[int]) -> None:
        """Workers have not found some objects of a touch."""
        touch = self._touches.get(number)
        if touch is not None:
            touch.absent |= absent

    def _end(self, touch: _Touch, has_failed: bool) -> None:
        """A touch has ended. If host memory has objects that the tier has lost, put them again."""
        if self._touches.pop(touch.number, None) is None:
            self._num_hung -= 1
        else:
            self._num_touched -= len(touch.entries)
        if has_failed:
            self._puts.pause()
            return
        entries = list(touch.entries.values())
        for number in sorted(touch.absent):
            entry = entries[number]
            if entry is not None and entry.state is EntryState.STORED and self._is_uncut(entry):
                entry.is_shared = False
                self._puts.put(entry)

    def _is_uncut(self, entry: Entry) -> bool:
        """Whether an entry has all rows that its name says. If it was got in part, it has fewer."""
        return bool(entry.key_space) or entry.row_map == self._layout.row_map(entry.piece)
