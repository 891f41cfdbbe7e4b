# SPDX-License-Identifier: Apache-2.0
"""The scheduler's part of a shared tier: what is asked, got into host memory, and put.

    a request arrives     has_to_wait ── asked ── found ── entries are got ──> as if stored here
    it computes           note_begun ── what it uses a second time is put
    a step                take_jobs ──> the workers ──> note_results

What is got becomes entries of the host tier, whose stores all workers make: all of them, or there
is no entry. Loads know nothing of it. A request that finds nothing in time goes on without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from vllm_ascend_kvext.connector.common.counters import SharedEvent, SharedFailure
from vllm_ascend_kvext.connector.common.messages import SharedJobs, SharedOutput
from vllm_ascend_kvext.connector.common.scheduler_view import Request
from vllm_ascend_kvext.connector.common.store_jobs import StoreJobs
from vllm_ascend_kvext.connector.scheduler.request_state import RequestOffloadState
from vllm_ascend_kvext.connector.scheduler.shared_lookups import Asked, SharedLookups
from vllm_ascend_kvext.connector.segments.no_segments import SchedulerParts
from vllm_ascend_kvext.layout.row_map import RowMap
from vllm_ascend_kvext.shared_tier.names import key_name, note_name, object_name
from vllm_ascend_kvext.shared_tier.protocol import Answer, SharedObject, SharedTier
from vllm_ascend_kvext.shared_tier.search import FoundObject, Question, Span
from vllm_ascend_kvext.store.counters import Refusal
from vllm_ascend_kvext.store.entries import Entry, Kind, Load, Piece
from vllm_ascend_kvext.store.prefix import HashedPrefix

if TYPE_CHECKING:
    from vllm_ascend_kvext.connector.common.events import TierEvents
    from vllm_ascend_kvext.connector.scheduler.transfer_cost import TransferCost

logger = logging.getLogger("vllm.ascend_kvext.shared_tier")

MAX_STALL_S = 0.2
"""When so long nothing has come of what requests wait for, they go on without."""

MAX_UNKNOWN_S = 2.0
"""So long requests wait for what comes while nobody knows what computing costs."""

PAUSE_S = 5.0
"""For so long a tier that is slow, or has failed, is left alone."""

MAX_LATE_IN_A_ROW = 3

MAX_PUT_SHARE = 1 / 8
"""Of host memory: what may be pinned because it is being put."""


@dataclass(slots=True)
class SharedRequest:
    """What is asked and got for one request.

    Attributes:
        awaited: Numbers of the jobs that it waits for.
    """

    asked: Asked | None = None
    awaited: set[int] = field(default_factory=set)


class _Got(NamedTuple):
    """An object that workers get: what it takes, and what waits for it is worth."""

    num_bytes: int
    num_tokens: int


class SharedSide:
    """The shared tier of one engine, as its scheduler uses it.

    Args:
        tier: As rank 0 has it; asked on a thread.
        puts_all: Whether everything that is stored is put, without waiting for a second use.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        parts: SchedulerParts,
        tier: SharedTier,
        namespace: str,
        num_workers: int,
        cost: TransferCost,
        events: TierEvents,
        puts_all: bool,
        clock: Callable[[], float],
    ) -> None:
        self._tier = parts.tier
        self._layout = parts.layout
        self._view = parts.view
        self._computes_holes = parts.computes_holes
        self._counters = parts.counters.shared
        self._namespace = namespace
        self._num_workers = num_workers
        self._cost = cost
        self._events = events
        self._puts_all = puts_all
        self._clock = clock
        self._lookups = SharedLookups(tier, clock)
        self._jobs = StoreJobs(parts.references, num_workers)
        self._gets: list[tuple[int, SharedObject]] = []
        self._puts: list[tuple[int, SharedObject]] = []
        # By number; those that nobody waits for any more are not among them.
        self._awaited: dict[int, _Got] = {}
        self._number_of: dict[Entry | None, int] = {}  # None is never a key.
        self._get_numbers: set[int] = set()
        self._num_late = 0
        self._paused_until_s = self._puts_paused_until_s = 0.0
        self._is_off = False
        # Since when something is awaited without a break, and what has come since.
        self._busy_since_s = self._last_bytes_s = 0.0
        self._busy_bytes = 0
        self._s_per_byte: float | None = None
        self._put_bytes = 0
        self._max_put_bytes = int(parts.tier.capacity_bytes * MAX_PUT_SHARE)
        self._is_put: set[int] = set()  # Numbers of entries that are there, or on their way.

    @property
    def has_work(self) -> bool:
        """Whether steps are needed to hand out jobs, or to note their ends."""
        return bool(self._jobs)

    # Asking.

    def has_to_wait(
        self, request: Request, state: RequestOffloadState, num_computed_tokens: int
    ) -> bool:
        """Whether to look at a request later. It is asked for once."""
        if state.shared is None:
            state.shared = SharedRequest()
            if not (self._is_off or request.lora_request or request.skip_reading_prefix_cache):
                self._ask(request, state.shared, num_computed_tokens)
        known = state.shared
        if known.asked is not None:
            if self._lookups.is_late(known.asked):
                known.asked = None
                self._note_late()
            elif known.asked.found is None:
                return True
            else:
                asked, known.asked = known.asked, None
                self._num_late = 0
                self._counters.lookup_seconds += asked.seconds
                self._begin_gets(request, known, asked)
        return not known.awaited.isdisjoint(self._awaited)

    def _ask(self, request: Request, known: SharedRequest, after_tokens: int) -> None:
        question = self._question(request, known, after_tokens)
        if question is None:
            return
        if self._clock() < self._paused_until_s or self._lookups.is_late():
            self._counters.requests[SharedEvent.PAUSED] += 1
            return
        known.asked = self._lookups.ask(question)

    def _question(
        self, request: Request, known: SharedRequest, after_tokens: int
    ) -> Question | None:
        """What to ask; None if host memory and the device have all. Notes what is on its way."""
        prefix = self._view.prefix(request)
        geometry = self._tier.geometry
        limit = geometry.floor(min(request.num_tokens - 1, prefix.num_tokens))
        if limit <= after_tokens:
            return None
        lookup = self._tier.lookup(prefix)
        spans = []
        first = after_tokens
        while first < limit:
            end = min(geometry.chunk_end(first), limit)
            entry = lookup.index.present(Kind.ROWS, prefix.key_at(end))
            known.awaited |= self._numbers_of(entry)
            spans.append(Span(first, end, entry is not None or not geometry.needs_rows))
            first = end
        tails_tokens = 0
        if geometry.needs_tails:
            unit_tokens = geometry.unit_tokens
            begin = geometry.floor(after_tokens) + unit_tokens
            boundaries = range(begin, limit + 1, unit_tokens)
            num_before = lookup.index.upto_present(Kind.TAILS, prefix.keys_at(boundaries))
            tails_tokens = boundaries[num_before - 1] if num_before else 0
            tails = lookup.index.present(Kind.TAILS, prefix.key_at(tails_tokens or begin))
            known.awaited |= self._numbers_of(tails)
        if all(span.is_in_host for span in spans) and tails_tokens == (
            limit if geometry.needs_tails else 0
        ):
            return None
        # A list that nobody changes: the thread reads it.
        num_hashes = limit // prefix.tokens_per_hash
        prefix = HashedPrefix(tuple(prefix.hashes[:num_hashes]), prefix.tokens_per_hash)
        return Question(
            prefix, geometry, tuple(spans), after_tokens, tails_tokens, self._computes_holes
        )

    def _numbers_of(self, entry: Entry | None) -> set[int]:
        """The number of the get that fills an entry, if there is one."""
        return {self._number_of[entry]} if entry in self._number_of else set()

    def _note_late(self) -> None:
        self._counters.requests[SharedEvent.LATE] += 1
        self._num_late += 1
        if self._num_late >= MAX_LATE_IN_A_ROW:
            self._pause("answers take too long")

    def _pause(self, why: str) -> None:
        now_s = self._clock()
        if now_s >= self._paused_until_s:
            logger.warning("The shared tier is left alone for %.0f s: %s.", PAUSE_S, why)
        self._paused_until_s = now_s + PAUSE_S

    # Getting.

    def _begin_gets(self, request: Request, known: SharedRequest, asked: Asked) -> None:
        """Take places in host memory for what was found, and have the workers fill them."""
        found = asked.found or []
        sizes = [self._layout.num_bytes(each.piece) for each in found]
        num_tokens = asked.question.spans[-1].end_tokens - asked.question.after_tokens
        if any(each.piece.kind is Kind.ROWS for each in found):
            num_tokens = sum(each.end_tokens - each.piece.first_tokens for each in found)
        if not found or self._clock() < self._paused_until_s:
            self._counters.requests[SharedEvent.PAUSED if found else SharedEvent.ABSENT] += 1
            return
        if self._takes_longer(sum(sizes), num_tokens):
            self._counters.requests[SharedEvent.TOO_DEAR] += 1
            return
        self._counters.requests[SharedEvent.FOUND] += 1
        use = self._tier.next_use()
        prefix = asked.question.prefix
        for each, num_bytes in zip(found, sizes, strict=True):
            end = each.end_tokens
            piece = each.piece._replace(end_tokens=end)
            entry = self._tier.begin_store(prefix, piece, num_bytes, use)
            if isinstance(entry, Refusal):
                if entry is Refusal.BEING_STORED:  # By another request's get, most likely.
                    index = self._tier.lookup(prefix).index
                    known.awaited |= self._numbers_of(index.storing(piece.kind, prefix.key_at(end)))
                if entry in (Refusal.ALREADY_STORED, Refusal.BEING_STORED):
                    continue
                break  # What lies behind is of less use without it.
            on_end = partial(self._end_get, entry, self._row_map(each), prefix, request)
            number = self._jobs.begin((), on_end)
            self._gets.append((number, SharedObject(each.name, entry.offset_bytes, num_bytes)))
            if not self._awaited:
                self._busy_since_s = self._last_bytes_s = self._clock()
                self._busy_bytes = 0
            # Without its tails, rows are of no use.
            is_rows = piece.kind is Kind.ROWS
            worth_tokens = end - piece.first_tokens if is_rows else num_tokens
            self._awaited[number] = _Got(num_bytes, worth_tokens)
            self._number_of[entry] = number
            self._get_numbers.add(number)
            known.awaited.add(number)

    def _row_map(self, found: FoundObject) -> RowMap:
        """What of an object is the request's: rows behind are of another prompt."""
        row_map = self._layout.row_map(found.piece)
        if found.end_tokens == found.piece.end_tokens:
            return row_map
        return self._layout.rows_within(row_map, found.piece.first_tokens, found.end_tokens)

    def _end_get(
        self,
        entry: Entry,
        row_map: RowMap,
        prefix: HashedPrefix,
        request: Request,
        has_failed: bool,
    ) -> None:
        number = self._number_of.pop(entry)
        self._get_numbers.discard(number)
        self._awaited.pop(number, None)
        if has_failed:
            self._tier.abandon_store(entry)
        elif self._tier.finish_store(entry, row_map):
            self._is_put.add(entry.number)
            self._counters.hit_tokens += entry.piece.end_tokens - entry.piece.first_tokens
            self._events.stored(entry, prefix, request)

    def _takes_longer(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether computing is faster than getting, behind what is on its way already."""
        s_per_token = self._cost.s_per_token
        if s_per_token is None or self._s_per_byte is None or not num_tokens:
            return False
        queued_bytes = sum(each.num_bytes for each in self._awaited.values())
        return (num_bytes + queued_bytes) * self._s_per_byte > num_tokens * s_per_token

    def _note_bytes(self, num_bytes: int) -> None:
        """So much has come, on all workers; give up where that is too slow."""
        if not self._busy_since_s:
            return
        now_s = self._clock()
        elapsed_s = now_s - self._busy_since_s
        if num_bytes:
            self._busy_bytes += num_bytes // self._num_workers
            self._last_bytes_s = now_s
        if not self._awaited:
            if self._busy_bytes:
                self._s_per_byte = elapsed_s / self._busy_bytes
            self._busy_since_s = 0.0
            return
        left = self._awaited.values()
        left_tokens = sum(each.num_tokens for each in left)
        s_per_token = self._cost.s_per_token
        affordable_s = MAX_UNKNOWN_S if s_per_token is None else left_tokens * s_per_token
        left_s = sum(each.num_bytes for each in left) * elapsed_s / max(1, self._busy_bytes)
        has_stalled = now_s - self._last_bytes_s > MAX_STALL_S
        if has_stalled or (elapsed_s > MAX_STALL_S and left_s > affordable_s + MAX_STALL_S):
            self._counters.requests[SharedEvent.GIVEN_UP] += 1
            self._awaited.clear()  # What comes all the same is for later requests.
            self._busy_since_s = 0.0
            self._pause("what it has does not come" if has_stalled else "computing is faster")

    # Putting.

    def note_begun(self, request: Request, computed_tokens: int) -> None:
        """A request goes on behind tokens that others have computed: what has them is put."""
        if self._is_off or request.lora_request or not computed_tokens:
            return
        prefix = self._view.prefix(request)
        boundary = self._tier.geometry.floor(min(computed_tokens, prefix.num_tokens))
        lookup = self._tier.lookup(prefix)
        if self._tier.geometry.needs_rows:
            for _, entry in lookup.walk_back(0, boundary):
                self._put(entry)
        if self._tier.geometry.needs_tails and boundary:
            tails = lookup.index.stored(Kind.TAILS, prefix.key_at(boundary))
            if tails is not None:
                self._put(tails)

    def note_stored(self, entry: Entry, request: Request) -> None:
        """A store of the engine's own has ended well."""
        if self._puts_all and not request.lora_request:
            self._put(entry)

    def note_removed(self, entry: Entry) -> None:
        """An entry is not in host memory any more."""
        self._is_put.discard(entry.number)

    def _put(self, entry: Entry) -> None:
        """Have an entry put, unless it was, or too much is on its way."""
        if self._is_off or entry.number in self._is_put:
            return
        num_bytes = self._layout.num_bytes(entry.piece)
        is_busy = self._put_bytes and self._put_bytes + num_bytes > self._max_put_bytes
        if is_busy or self._clock() < self._puts_paused_until_s:
            self._counters.failures[SharedFailure.PUT_BUSY] += 1
            return
        load = self._tier.pin(entry)
        if load is None:
            return
        notes: tuple[str, ...] = ()
        if entry.piece.kind is Kind.ROWS:
            notes = tuple(map(note_name, entry.keys))
        name = object_name(entry.piece, entry.key)
        number = self._jobs.begin((), partial(self._end_put, entry, load, num_bytes))
        self._puts.append((number, SharedObject(name, entry.offset_bytes, num_bytes, notes)))
        self._put_bytes += num_bytes
        self._is_put.add(entry.number)

    def _end_put(self, entry: Entry, load: Load, num_bytes: int, has_failed: bool) -> None:
        self._put_bytes -= num_bytes
        if has_failed:
            self._is_put.discard(entry.number)
            self._puts_paused_until_s = self._clock() + PAUSE_S
        self._tier.end_load(load)

    # Steps.

    def take_jobs(self, has_forward: bool, wait_s: float) -> SharedJobs | None:
        """What the workers do from this step on; None if nothing.

        Args:
            wait_s: How long a step that computes nothing may wait for answers.
        """
        if not has_forward:
            self._lookups.wait(wait_s)
        if not (self._gets or self._puts):
            return None
        jobs = SharedJobs(self._namespace, tuple(self._gets), tuple(self._puts))
        self._gets, self._puts = [], []
        return jobs

    def note_results(self, results: SharedOutput | None) -> None:
        """What the workers report of a step; None if nothing."""
        if results is not None:
            for direction, moved in results.traffic.items():
                self._counters.bytes[direction] += moved.num_bytes
                self._counters.seconds[direction] += moved.seconds
            for number, answers in results.ended.items():
                is_get = number in self._get_numbers
                self._count(answers, is_get)
                has_failed = any(each is not Answer.WHOLE for each in answers)
                self._jobs.end(number, len(answers), has_failed)
        self._note_bytes(0 if results is None else results.got_bytes)

    def _count(self, answers: list[Answer], is_get: bool) -> None:
        for answer in answers:
            failure = _GET_FAILURES.get(answer) if is_get else SharedFailure.PUT_UNREACHABLE
            if answer is not Answer.WHOLE and failure is not None:
                self._counters.failures[failure] += 1
            if is_get and answer is Answer.UNREACHABLE:
                self._pause("it could not be read")

    def turn_off(self) -> None:
        """Host memory is reset: perhaps the weights are others, and no file says so."""
        if not self._is_off:
            logger.warning(
                "The shared tier is not used by this engine any more: its connector was reset, as "
                "is done when weights are replaced in memory. Start the engine again to use it."
            )
        self._is_off = True

    def shutdown(self) -> None:
        self._lookups.shutdown()


_GET_FAILURES: Mapping[Answer, SharedFailure] = {
    Answer.ABSENT: SharedFailure.GET_ABSENT,
    Answer.BROKEN: SharedFailure.GET_BROKEN,
    Answer.UNREACHABLE: SharedFailure.GET_UNREACHABLE,
}
