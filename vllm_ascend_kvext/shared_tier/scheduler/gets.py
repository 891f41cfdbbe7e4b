# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Objects that are being brought from the shared tier into host memory, and patience with them.

Each get fills one entry of the host tier, as a store does. A get ends well when all workers have
the bytes: each worker those of its own memory, or one worker those of the memory of its host. If a
get fails, its entry is dropped. While requests wait for a get, it is *awaited*. If they wait no
longer, the object may still come, and later requests may use it. A get that hangs is *abandoned*:
its entry is not found any more, and its place in host memory is not used before the get ends.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

from vllm_ascend_kvext.connector.common.events import TierEvents
from vllm_ascend_kvext.connector.common.scheduler_view import Request
from vllm_ascend_kvext.connector.scheduler.transfer_cost import TransferCost
from vllm_ascend_kvext.shared_tier.backend import SharedObject, logger
from vllm_ascend_kvext.shared_tier.scheduler import limits
from vllm_ascend_kvext.shared_tier.scheduler.shared_parts import SharedParts
from vllm_ascend_kvext.shared_tier.search import FoundObject, Question
from vllm_ascend_kvext.store.counters import Refusal
from vllm_ascend_kvext.store.entries import Entry
from vllm_ascend_kvext.store.prefix import HashedPrefix


class _Get(NamedTuple):
    """A get under way.

    Attributes:
        began_s: When it began, in seconds of the clock.
        name: The name of its object.
    """

    began_s: float
    name: str


class Gets:
    """The gets of one engine."""

    def __init__(self, shared: SharedParts, cost: TransferCost, events: TierEvents) -> None:
        self._shared = shared
        self._layout = shared.core.layout
        self._tier = shared.core.tier
        self._counters = shared.core.counters
        self._clock = shared.core.clock
        self._cost = cost
        self._events = events
        self._new: list[SharedObject] = []  # The gets of the next step.
        self._under_way: dict[Entry, _Get] = {}
        self._abandoned: dict[Entry, str] = {}  # The names of the objects, by entry.
        self._awaited: dict[Entry, int] = {}  # The tokens that each get saves.
        self._busy_since_s = 0.0  # Since this time, some get has always been awaited.
        self._busy_bytes = 0.0  # The bytes that have come since then, in each host memory.
        self._last_bytes_s = 0.0  # The time at which bytes came last.
        self._num_silent = 0  # The number of workers' reports since bytes came last.
        self._overtaken_s = 0.0  # Gets that began before this time were overtaken by others.
        self._paused_until_s = -limits.PAUSE_S

    # Pauses.

    @property
    def is_paused(self) -> bool:
        """Whether the tier is left alone for a while. Nothing is asked or got then."""
        return self._clock() < self._paused_until_s

    def pause(self, why: str) -> None:
        """Leave the tier alone for a while."""
        if not self.is_paused:
            logger.warning("The shared tier is left alone for %.0f s: %s.", limits.PAUSE_S, why)
        self._paused_until_s = self._clock() + limits.PAUSE_S

    # Beginning.

    def begin(
        self,
        request: Request,
        waiting: list[Entry],
        question: Question,
        found_objects: Sequence[FoundObject],
    ) -> None:
        """Take places in host memory for objects that were found, and let the workers fill them.

        Args:
            waiting: The entries that the request waits for. The method adds to it.
            found_objects: The answer to the question, in the order in which objects are wanted.
        """
        use = self._tier.next_use()
        after_tokens = question.tokens.first_tokens
        left_bytes = self._tier.capacity_bytes * limits.MAX_GET_SHARE
        left_bytes -= sum(each.num_bytes for each in (*self._under_way, *self._abandoned))
        is_paused = self.is_paused
        if is_paused:
            found_objects = ()
        for found in found_objects:
            piece = found.piece
            end_tokens = found.end_tokens
            prefix = found.prefix
            name = self._shared.full_name(found.name)
            if name in self._abandoned.values():
                break  # The object hangs. Without it, later objects are of less use.
            contents, num_bytes = self._contents(found)
            if num_bytes > left_bytes:
                break
            shared_piece = piece._replace(end_tokens=end_tokens)
            entry = self._tier.begin_store(prefix, shared_piece, num_bytes, use)
            if isinstance(entry, Refusal):
                index = self._tier.lookup(prefix).index
                self.join(waiting, index.storing(piece.kind, prefix.key_at(end_tokens)))
                if entry in (Refusal.ALREADY_STORED, Refusal.BEING_STORED):
                    continue
                break  # There is no place. Without this object, later objects are of less use.
            left_bytes -= entry.num_bytes
            if not self._awaited:
                self._begin_busy_time()
            # Tails save all tokens before them, because rows are of no use without their tails.
            self._awaited[entry] = end_tokens - piece.first_tokens or end_tokens - after_tokens
            self._under_way[entry] = _Get(self._clock(), name)
            self.join(waiting, entry)
            if found.wanted is None:
                assert isinstance(prefix, HashedPrefix), prefix
                found = found._replace(prefix=self._events.fixed(prefix))
            number = self._shared.jobs.begin(partial(self._end, entry, contents, found, request))
            self._new.append(SharedObject(number, name, entry.offset_bytes, num_bytes))
        if waiting:
            self._counters.shared_requests["found"] += 1
        elif is_paused:
            self._counters.shared_requests["paused"] += 1
        else:
            self._counters.shared_requests["absent"] += 1

    def _begin_busy_time(self) -> None:
        self._busy_since_s = self._clock()
        self._last_bytes_s = self._busy_since_s
        self._busy_bytes = 0.0
        self._num_silent = 0

    def _contents(self, found: FoundObject) -> tuple[Any, int]:
        """The contents of the entry that an object fills, and the bytes of the object."""
        if found.wanted is not None:
            return found.wanted.contents, found.wanted.num_bytes
        piece = found.piece
        row_map = self._layout.row_map(piece)
        if found.end_tokens < piece.end_tokens:  # The rows behind belong to another prompt.
            row_map = self._layout.rows_within(row_map, piece.first_tokens, found.end_tokens)
        return row_map, self._layout.num_bytes(piece)

    def take_new(self) -> tuple[SharedObject, ...]:
        """The gets that the workers begin with this step."""
        new = tuple(self._new)
        self._new.clear()
        return new

    @property
    def has_new(self) -> bool:
        """Whether there are gets that the workers have not been told of."""
        return bool(self._new)

    # Waiting.

    def await_nothing(self) -> None:
        """Let no request wait for the gets under way: no lookup will find their entries."""
        self._awaited.clear()

    def join(self, waiting: list[Entry], entry: Entry | None) -> None:
        """Let a request wait for an entry, too, if the entry is being got.

        Args:
            waiting: The entries that the request waits for. The method adds to it.
        """
        if entry in self._under_way:
            waiting.append(entry)

    def are_awaited(self, entries: Collection[Entry]) -> bool:
        """Whether an entry that a request waits for may still come in time."""
        return not self._awaited.keys().isdisjoint(entries)

    def note_bytes(self, num_bytes: float) -> None:
        """Take note of the bytes that have come into each host memory."""
        self._busy_bytes += num_bytes
        self._last_bytes_s = self._clock()
        self._num_silent = 0
        self._shared.jobs.note_change()

    def _end(
        self, entry: Entry, contents: Any, found: FoundObject, request: Request, has_failed: bool
    ) -> None:
        get = self._under_way.pop(entry, None)  # None if it was abandoned.
        if get is not None:
            self._overtaken_s = max(self._overtaken_s, get.began_s)
        self._abandoned.pop(entry, None)
        self._awaited.pop(entry, None)
        if has_failed:
            self._tier.fail_store(entry, is_own=False)
        elif self._tier.finish_store(entry, contents):
            entry.is_shared = True
            self._counters.shared_tokens += entry.piece.end_tokens - entry.piece.first_tokens
            if found.wanted is not None:
                found.wanted.on_got()
            else:
                assert isinstance(found.prefix, HashedPrefix), found.prefix
                self._events.stored(entry, found.prefix, request)

    # Patience.

    def check_patience(self) -> None:
        """End the wait for gets that do not come, or that come more slowly than computing."""
        if not self._awaited:
            return
        now_s = self._clock()
        busy_s = now_s - self._busy_since_s
        left_s = sum(each.num_bytes for each in self._awaited) * busy_s / max(1, self._busy_bytes)
        compute_s = self._cost.compute_s(sum(self._awaited.values()), limits.MAX_UNKNOWN_S)
        self._num_silent += 1  # A single step may take longer than `limits.MAX_STALL_S`, too.
        is_silent = self._num_silent > limits.MAX_SILENT_REPORTS
        has_stalled = is_silent and now_s - self._last_bytes_s > limits.MAX_STALL_S
        is_slow = busy_s > limits.MAX_STALL_S and left_s > compute_s + limits.MAX_STALL_S
        if has_stalled or (is_slow and self._busy_bytes and not self._cost.is_ignored):
            self._counters.shared_requests["given_up"] += 1
            self._awaited.clear()
            self.pause("what it has does not come" if has_stalled else "computing is faster")
            return
        first = next(iter(self._awaited))
        if self._under_way[first].began_s < min(self._overtaken_s, now_s - limits.MAX_HANG_S):
            self._counters.shared_requests["given_up"] += 1
            del self._awaited[first]
            self.pause("something of what it has does not come")

    def abandon_hanging(self) -> None:
        """Abandon gets that no request waits for, if no bytes at all have come for a long time."""
        before_s = self._clock() - limits.MAX_HANG_S
        if self._last_bytes_s > before_s:
            return
        hanging = {
            entry: get.name
            for entry, get in self._under_way.items()
            if entry not in self._awaited and get.began_s < before_s
        }
        for entry in hanging:
            del self._under_way[entry]
            self._tier.abandon_store(entry)
        if hanging:
            self._abandoned |= hanging
            self._counters.shared_failures["get_hung"] += len(hanging)
            logger.warning(
                "Shared tier: %d object(s) have not come for more than %.0f s, such as %s. They "
                "are computed, and others are asked for. %d bytes of each host memory are not "
                "used before they come.",
                len(hanging),
                limits.MAX_HANG_S,
                next(iter(hanging.values())),
                sum(each.num_bytes for each in hanging),
            )

    def why_no_more(self) -> str:
        """Why no more gets may begin now; empty if they may.

        A place in host memory that a hanging get may write to is lost, so few gets may hang.
        """
        if len(self._under_way) > len(self._awaited):
            return "what it has comes slowly"
        if len(self._abandoned) >= limits.MAX_ABANDONED:
            return f"{len(self._abandoned)} objects that it has do not come"
        return ""
