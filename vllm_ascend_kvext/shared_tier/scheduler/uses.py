# SPDX-License-Identifier: Apache-2.0
"""What requests use a second time: it is put into the shared tier, or touched if it is there.

The tier is told of use so that others give way before it. What it has lost it is given again.
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
    """What the tier is told of use.

    Attributes:
        entries: By name of what is used; None where host memory has none.
        began_s: By the clock of the scheduler side.
        number: Of the job.
        absent: Indices of those that are not there.
    """

    entries: dict[str, Entry | None]
    began_s: float
    number: int = -1
    absent: set[int] = field(default_factory=set)


class Uses:
    """The touches of one engine, and puts of what is used."""

    def __init__(self, shared: SharedParts, puts: Puts) -> None:
        self._shared = shared
        self._layout = shared.core.layout
        self._view = shared.core.view
        self._tier = shared.core.tier
        self._clock = shared.core.clock
        self._puts = puts
        # What is used, and waits to be touched, by name; and its entry, if host memory has it.
        self._new: dict[str, Entry | None] = {}
        self._touches: dict[int, _Touch] = {}  # By number of the job; without those that hang.
        self._num_touched = 0  # The names of all these.
        self._num_hung = 0  # Touches that hang.
        self._touched_s: RememberedKeys[float] = RememberedKeys(limits.REMEMBERED_TOUCHES)

    # What is used.

    def note_begun(self, request: Request, computed_tokens: int) -> None:
        """A request goes on behind tokens that others have computed: what has them is used."""
        prefix, geometry = self._view.prefix(request), self._tier.geometry
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
        """An entry of a key space that is no prompt's is used."""
        name = names.object_name(entry.piece, entry.key, entry.key_space)
        self._note_used(entry, entry.key, name)

    def _note_used_on_device(self, prefix: Prefix, first_tokens: int, end_tokens: int) -> None:
        """Rows are used that host memory lacks: of each chunk, and those before the last token."""
        if first_tokens < end_tokens:
            geometry = self._tier.geometry
            chunk_ends = range(geometry.chunk_end(first_tokens), end_tokens, geometry.chunk_tokens)
            for boundary in (*chunk_ends, end_tokens):
                self._note_used(None, prefix.key_at(boundary))

    def _note_used(self, entry: Entry | None, key: bytes, name: str = "") -> None:
        """Have the tier given what is used, or told of it once in a while if it was given that.

        Args:
            name: In the tier. By default a note with the key leads to it.
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
        """Whether the workers can be told of some use."""
        return bool(self._new) and self._num_touched < limits.MAX_TOUCHED

    def take_new(self) -> tuple[UsedObjects, ...]:
        """What the workers are to touch from this step on."""
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
        """Count touches that hang no longer among those that others wait for."""
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
        """What was used and is not there any more is put again, if host memory has it."""
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
        """Whether it is what its name says, and not got from an object with more rows."""
        return bool(entry.key_space) or entry.row_map == self._layout.row_map(entry.piece)
