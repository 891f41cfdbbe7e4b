# SPDX-License-Identifier: Apache-2.0
"""The scheduler's part of a shared tier: what is asked, got into host memory, and put.

    a request arrives     has_to_wait ── asked ── found ── entries are got ──> as if stored here
    it computes           note_begun ── what it uses a second time is put
    a step                take_jobs ──> the workers ──> note_results

What is got becomes entries of the host tier, as stores do: all workers have the bytes, or there is
no entry. Loads know nothing of it. A request for which nothing comes in time goes on without.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from vllm_ascend_kvext.blending.segment_store import SegmentPrefix, StoredTokens
from vllm_ascend_kvext.connector.common.messages import WorkerOutput
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.connector.common.scheduler_view import Request
from vllm_ascend_kvext.connector.scheduler.request_state import RequestOffloadState
from vllm_ascend_kvext.connector.scheduler.transfer_cost import TransferCost
from vllm_ascend_kvext.connector.segments.no_segments import NoSegments, SchedulerParts
from vllm_ascend_kvext.layout.row_map import RowMap
from vllm_ascend_kvext.shared_tier import names
from vllm_ascend_kvext.shared_tier.open import open_tier
from vllm_ascend_kvext.shared_tier.protocol import SharedObject
from vllm_ascend_kvext.shared_tier.search import FoundObject, Question, existing, search
from vllm_ascend_kvext.shared_tier.thread import TierThread
from vllm_ascend_kvext.store.counters import Refusal
from vllm_ascend_kvext.store.entries import Entry, Kind, Load, Piece
from vllm_ascend_kvext.store.prefix import HashedPrefix, Prefix
from vllm_ascend_kvext.store.store_policy import StorePolicy
from vllm_ascend_kvext.token_range import TokenRange

if TYPE_CHECKING:
    from vllm_ascend_kvext.connector.common.events import TierEvents

logger = logging.getLogger("vllm.ascend_kvext.shared_tier")

MAX_LOOKUP_S = 0.05  # A request goes on without an answer that takes longer,
MAX_QUEUED_S = 1.0  # or has stood behind others for so long,
MAX_STALL_S = 0.2  # when nothing has come for so long of what it waits for,
MAX_UNKNOWN_S = 2.0  # and after so long where nobody knows what computing costs.
PAUSE_S = 5.0  # For so long a tier that is slow, or has failed, is left alone.
MAX_ASKED = 16  # In one step: so many who come behind them are asked in a later one,
MAX_BEHIND = 128  # and whoever comes behind these may begin: a step looks at all who wait.
MAX_PUT_SHARE = 1 / 8  # Of host memory: what may be pinned because it is being put,
MAX_GET_SHARE = 1 / 2  # and what places may be taken for what is being got.
MAX_QUIET_S = 5.0  # What has not moved for so long hangs: no step is made for it.
_MAX_SILENT_REPORTS = 3
_IDLE_WAIT_S = 0.001  # So long a step that computes nothing waits for an answer.


@dataclass(slots=True, eq=False)
class _Asked:
    """A question, also for segments, and what it found once it ``is_answered``."""

    question: Question | None
    segments: Sequence[FoundObject]
    asked_s: float
    is_dropped: bool = False  # Nobody waits for the answer any more.
    began_s: float | None = None
    seconds: float = 0.0
    found: Sequence[FoundObject] = ()
    is_answered: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class SharedRequest:
    """What was asked for one request, and the numbers of the gets that it waits for."""

    asked: _Asked | None = None
    awaited: set[int] = field(default_factory=set)


class _Get(NamedTuple):
    """What an object that is waited for takes, and what it saves."""

    num_bytes: int
    num_tokens: int


class SharedSide:
    """The shared tier of one engine, as its scheduler uses it.

    Raises:
        SettingsError: If the tier of the options cannot be used.
    """

    def __init__(
        self,
        parts: SchedulerParts,
        options: ConnectorOptions,
        identity: names.Identity,
        cost: TransferCost,
        events: TierEvents,
        clock: Callable[[], float],
        segments: NoSegments,
    ) -> None:
        assert options.shared_tier is not None
        self._parts = parts
        self._segments = segments
        segments.put = self.put
        self._tier = parts.tier
        self._geometry = parts.tier.geometry
        self._counters = parts.counters
        self._cost = cost
        self._events = events
        self._clock = clock
        self._puts_all = options.store_policy is StorePolicy.ALL
        self._namespace = names.namespace_of(identity)
        self._shared = open_tier(options.shared_tier, options.shared_tier_bytes, rank=0)
        self._introduce(options.shared_tier, identity)
        self._thread = TierThread("kvext-shared-lookups")
        self._running: _Asked | None = None  # Written by the thread.
        self._last_asked: _Asked | None = None
        self._num_asked = self._num_behind = 0  # In this step.
        self._gets: list[SharedObject] = []
        self._puts: list[SharedObject] = []
        self._awaited: dict[int, _Get] = {}  # By number.
        self._overdue: set[int] = set()  # Nobody waits for them any more.
        self._get_bytes = 0
        self._number_of: dict[Entry, int] = {}  # Of entries that are being got.
        # Since when something is awaited without a break, and what has come since.
        self._busy_since_s = self._last_bytes_s = 0.0
        self._busy_bytes = 0.0
        self._num_silent = 0  # Steps since that brought nothing.
        self._paused_until_s = self._puts_paused_until_s = -PAUSE_S
        self._put_bytes = 0
        self._num_under_way = 0
        self._last_change_s = 0.0  # Of those under way.
        self._is_put: set[int] = set()  # Entries that are there, or on their way, by number.
        self._is_off = False

    def _introduce(self, url: str, identity: names.Identity) -> None:
        """Say with whom the engine shares; to others, too."""
        engines = self._shared.engines()
        self._shared.introduce(self._namespace, identity)
        logger.info("Shared tier %s: the name space is %s.", url, self._namespace)
        if engines and self._namespace not in engines:
            apart = min((names.differences(identity, each) for each in engines.values()), key=len)
            logger.warning(
                "Shared tier %s: nothing in it was put by engines like this one. The most similar "
                "of %d differs in: %s. `python -m vllm_ascend_kvext status --shared-tier %s` "
                "lists them.",
                *(url, len(engines), "; ".join(apart), url),
            )

    # Asking.

    def has_to_wait(
        self, request: Request, state: RequestOffloadState, num_computed_tokens: int
    ) -> bool:
        """Whether to look at a request later: something is asked, or got, for its prompt."""
        if self._is_off or request.lora_request or request.skip_reading_prefix_cache:
            return False  # vLLM knows an adapter by its name only.
        known = state.shared
        if known is None:  # It is asked once.
            if self._num_asked >= MAX_ASKED:
                self._num_behind += 1
                return self._num_behind <= MAX_BEHIND
            known = state.shared = SharedRequest()
            self._ask(request, known, num_computed_tokens)
        if known.asked is not None:
            if known.asked.is_answered.is_set():
                self._counters.shared_lookup_seconds += known.asked.seconds
                self._begin_gets(request, known, known.asked)
            elif self._is_late():
                self._counters.shared_requests["late"] += 1
                self._pause("an answer takes too long")
            elif self._clock() - known.asked.asked_s > MAX_QUEUED_S:
                self._counters.shared_requests["late"] += 1
                known.asked.is_dropped = True
            else:
                return True
            known.asked = None
        return not known.awaited.isdisjoint(self._awaited)

    def _ask(self, request: Request, known: SharedRequest, num_computed_tokens: int) -> None:
        question = self._question(request, known, num_computed_tokens)
        segments = [
            FoundObject(
                names.segment_name(piece, prefix.key_at(piece.end_tokens)),
                *(piece, piece.end_tokens, prefix),
            )
            for prefix, piece in self._segments.lacking(request.request_id)
        ]
        if question is None and not segments:
            return
        # While something hangs, its place is lost: there are to be no more of these.
        if self._clock() < self._paused_until_s or self._is_late() or self._overdue:
            self._counters.shared_requests["paused"] += 1
            return
        known.asked = self._last_asked = _Asked(question, segments, self._clock())
        self._num_asked += 1
        self._thread.submit(partial(self._answer, known.asked))

    def _question(self, request: Request, known: SharedRequest, after: int) -> Question | None:
        """What to ask; None if there is nothing to get. Notes gets of others that are of use."""
        geometry, prefix = self._geometry, self._parts.view.prefix(request)
        limit = geometry.floor(min(request.num_tokens - 1, prefix.num_tokens))
        if limit <= after:
            return None
        index = self._tier.lookup(prefix).index
        chunk_tokens, unit_tokens = geometry.chunk_tokens, geometry.unit_tokens
        missing: list[TokenRange] = []
        tails_tokens = limit
        if geometry.needs_rows:
            for end in range(geometry.chunk_end(after), limit + chunk_tokens, chunk_tokens):
                chunk = TokenRange(max(after, end - chunk_tokens), min(end, limit))
                entry = index.present(Kind.ROWS, prefix.key_at(chunk.end_tokens))
                self._await(known, entry)
                missing += [] if entry else [chunk]
        if geometry.needs_tails:
            boundaries = range(geometry.floor(after) + unit_tokens, limit + 1, unit_tokens)
            num_before = index.upto_present(Kind.TAILS, prefix.keys_at(boundaries))
            tails_tokens = boundaries[num_before - 1] if num_before else 0
            if num_before:
                self._await(known, index.present(Kind.TAILS, prefix.key_at(tails_tokens)))
        if not missing and tails_tokens == limit:
            return None
        # Hashes that nobody changes while the thread reads them.
        hashes = tuple(prefix.hashes[: limit // prefix.tokens_per_hash])
        prefix = HashedPrefix(hashes, prefix.tokens_per_hash)
        goes_on = self._parts.computes_holes
        tokens = TokenRange(after, limit)
        return Question(prefix, geometry, tokens, tuple(missing), tails_tokens, goes_on)

    def _await(self, known: SharedRequest, entry: Entry | None) -> None:
        """Have a request wait for an entry, if it is being got."""
        if entry is not None and entry in self._number_of:
            known.awaited.add(self._number_of[entry])

    def _answer(self, asked: _Asked) -> None:
        """On the thread. How long it takes counts from here: many at once are not a slow tier."""
        if asked.is_dropped:
            asked.is_answered.set()
            return
        asked.began_s = began_s = self._clock()
        self._running = asked
        try:
            found = [] if asked.question is None else search(asked.question, self._exist)
            asked.found = [*found, *existing(asked.segments, self._exist)]
        finally:
            asked.seconds = self._clock() - began_s
            self._running = None
            asked.is_answered.set()

    def _exist(self, asked: Sequence[str]) -> list[str]:
        return self._shared.exist([f"{self._namespace}/{name}" for name in asked])

    def _is_late(self) -> bool:
        """Whether the thread is at a question for too long: all behind it would wait, too."""
        running = self._running
        began_s = None if running is None else running.began_s
        return began_s is not None and self._clock() - began_s > MAX_LOOKUP_S

    def _pause(self, why: str) -> None:
        now_s = self._clock()
        if now_s >= self._paused_until_s:
            logger.warning("The shared tier is left alone for %.0f s: %s.", PAUSE_S, why)
        self._paused_until_s = now_s + PAUSE_S

    # Getting.

    def _begin_gets(self, request: Request, known: SharedRequest, asked: _Asked) -> None:
        """Take places in host memory for what was found, and have the workers fill them."""
        use = self._tier.next_use()
        after_tokens = 0 if asked.question is None else asked.question.tokens.first_tokens
        is_paused = self._clock() < self._paused_until_s
        for name, piece, end_tokens, prefix in () if is_paused else asked.found:
            num_bytes, contents = self._contents(prefix, piece, end_tokens)
            if self._get_bytes + num_bytes > self._tier.capacity_bytes * MAX_GET_SHARE:
                break
            shared_piece = piece._replace(end_tokens=end_tokens)
            entry = self._tier.begin_store(prefix, shared_piece, num_bytes, use)
            if isinstance(entry, Refusal):
                index = self._tier.lookup(prefix).index
                self._await(known, index.storing(piece.kind, prefix.key_at(end_tokens)))
                if entry in (Refusal.ALREADY_STORED, Refusal.BEING_STORED):
                    continue
                break  # What lies behind is of less use without it.
            number = self._begin(
                partial(self._end_get, entry, num_bytes, contents, prefix, request)
            )
            what = SharedObject(number, f"{self._namespace}/{name}", entry.offset_bytes, num_bytes)
            self._gets.append(what)
            self._get_bytes += num_bytes
            if not self._awaited:
                self._busy_since_s = self._last_bytes_s = self._clock()
                self._busy_bytes = self._num_silent = 0
            # Without its tails, rows are of no use.
            num_tokens = end_tokens - piece.first_tokens or end_tokens - after_tokens
            self._awaited[number] = _Get(num_bytes, num_tokens)
            self._number_of[entry] = number
            known.awaited.add(number)
        result = "found" if known.awaited else "paused" if is_paused else "absent"
        self._counters.shared_requests[result] += 1

    def _contents(
        self, prefix: Prefix, piece: Piece, end_tokens: int
    ) -> tuple[int, RowMap | StoredTokens]:
        """The bytes of an object, and what its entry holds of a prefix."""
        if isinstance(prefix, SegmentPrefix):
            assert self._segments.store is not None
            stored = self._segments.store.contents(prefix, piece)
            return self._segments.store.num_bytes(stored), stored
        layout = self._parts.layout
        row_map = layout.row_map(piece)
        if end_tokens < piece.end_tokens:  # Rows behind are of another prompt.
            row_map = layout.rows_within(row_map, piece.first_tokens, end_tokens)
        return layout.num_bytes(piece), row_map

    def _end_get(
        self,
        entry: Entry,
        num_bytes: int,
        contents: RowMap | StoredTokens,
        prefix: Prefix,
        request: Request,
        has_failed: bool,
    ) -> None:
        number = self._number_of.pop(entry)
        self._awaited.pop(number, None)
        self._overdue.discard(number)
        self._get_bytes -= num_bytes
        if has_failed:
            self._tier.abandon_store(entry)
        elif self._tier.finish_store(entry, contents):
            self._is_put.add(entry.number)
            self._counters.shared_tokens += entry.piece.end_tokens - entry.piece.first_tokens
            if isinstance(prefix, SegmentPrefix):
                self._segments.trust_keys()
            else:
                self._events.stored(entry, prefix, request)

    @property
    def has_transfers(self) -> bool:
        """Whether gets and puts are under way that do not hang: steps are made for these only."""
        is_quiet = self._clock() - self._last_change_s > MAX_QUIET_S
        return self._num_under_way > 0 and not is_quiet

    def _begin(self, on_end: Callable[[bool], None]) -> int:
        """The number of a get or put, whose end is then told."""

        def end(has_failed: bool) -> None:
            self._num_under_way -= 1
            self._last_change_s = self._clock()
            on_end(has_failed)

        self._num_under_way += 1
        self._last_change_s = self._clock()
        return self._parts.jobs.begin((), end, is_shared=True)

    def _check_patience(self) -> None:
        """Wait no longer for what does not come, or comes slower than it can be computed."""
        left = self._awaited.values()
        if not left:
            return
        now_s = self._clock()
        busy_s = now_s - self._busy_since_s
        left_s = sum(each.num_bytes for each in left) * busy_s / max(1, self._busy_bytes)
        compute_s = self._cost.compute_s(sum(each.num_tokens for each in left))
        affordable_s = MAX_UNKNOWN_S if compute_s is None else compute_s
        if self._cost.is_ignored:
            affordable_s = math.inf
        # What a worker gets is reported one or two steps later, and steps may take longer.
        self._num_silent += 1
        is_silent = self._num_silent > _MAX_SILENT_REPORTS
        has_stalled = is_silent and now_s - self._last_bytes_s > MAX_STALL_S
        is_slow = busy_s > MAX_STALL_S and left_s > affordable_s + MAX_STALL_S
        if has_stalled or (self._busy_bytes and is_slow):
            self._counters.shared_requests["given_up"] += 1
            self._overdue.update(self._awaited)
            self._awaited.clear()  # What comes all the same is for later requests.
            self._pause("what it has does not come" if has_stalled else "computing is faster")

    # Putting.

    def note_begun(self, request: Request, computed_tokens: int) -> None:
        """A request goes on behind tokens that others have computed: what has them is put."""
        prefix = self._parts.view.prefix(request)
        boundary = self._geometry.floor(min(computed_tokens, prefix.num_tokens))
        if not boundary or request.lora_request:
            return
        lookup = self._tier.lookup(prefix)
        if self._geometry.needs_rows:
            for _, entry in lookup.walk_back(0, boundary):
                self.put(entry)
        tails = lookup.index.stored(Kind.TAILS, prefix.key_at(boundary))
        if tails is not None:
            self.put(tails)

    def note_stored(self, entry: Entry, request: Request) -> None:
        """A store of the engine's own has ended well."""
        if self._puts_all and not request.lora_request:
            self.put(entry)

    def note_removed(self, entry: Entry) -> None:
        """An entry is not in host memory any more."""
        self._is_put.discard(entry.number)

    def put(self, entry: Entry) -> None:
        """Have an entry put, unless it was, or too much is on its way."""
        if self._is_off or entry.number in self._is_put:
            return
        stored = entry.row_map
        notes: tuple[str, ...] = ()
        if isinstance(stored, StoredTokens):
            assert self._segments.store is not None
            num_bytes = self._segments.store.num_bytes(stored)
            name = names.segment_name(entry.piece, entry.key)
        else:
            num_bytes = self._parts.layout.num_bytes(entry.piece)
            name = names.object_name(entry.piece, entry.key)
            if entry.piece.kind is Kind.ROWS:
                notes = tuple(map(names.note_name, entry.keys))
        max_bytes = max(num_bytes, self._tier.capacity_bytes * MAX_PUT_SHARE)
        is_busy = self._put_bytes + num_bytes > max_bytes
        if is_busy or self._clock() < self._puts_paused_until_s:
            self._counters.shared_failures["put_busy"] += 1
            return
        load = self._tier.pin(entry)
        if load is None:
            return
        number = self._begin(partial(self._end_put, entry, load, num_bytes))
        name = f"{self._namespace}/{name}"
        self._puts.append(SharedObject(number, name, entry.offset_bytes, num_bytes, notes))
        self._put_bytes += num_bytes
        self._is_put.add(entry.number)

    def _end_put(self, entry: Entry, load: Load, num_bytes: int, has_failed: bool) -> None:
        self._put_bytes -= num_bytes
        if has_failed:
            self._is_put.discard(entry.number)
            self._puts_paused_until_s = self._clock() + PAUSE_S
        self._tier.end_load(load)

    # Steps.

    def take_jobs(self, may_wait: bool) -> tuple[tuple[SharedObject, ...], ...]:
        """What the workers get, and put, from this step on; it ``may_wait`` if it is idle."""
        if may_wait:
            self._check_patience()
            if self._last_asked is not None:
                self._last_asked.is_answered.wait(_IDLE_WAIT_S)
        self._num_asked = self._num_behind = 0
        jobs = tuple(self._gets), tuple(self._puts)
        self._gets, self._puts = [], []
        return jobs

    def note_results(self, results: WorkerOutput) -> None:
        """What the workers report of a step; ends of gets and puts are noted with stores."""
        if results.got_bytes:
            self._busy_bytes += results.got_bytes / self._parts.jobs.num_workers
            self._last_bytes_s = self._last_change_s = self._clock()
            self._num_silent = 0
        for name, number in results.shared_failures.items():
            self._counters.shared_failures[name] += number
            if name == "get_unreachable":
                self._pause("something could not be read")
        self._check_patience()

    def turn_off(self) -> None:
        """Host memory is reset: perhaps the weights are others, and no file says so."""
        self._is_off = True
        logger.warning(
            "The shared tier is not used by this engine any more: its connector was reset, as is "
            "done when weights are replaced in memory. Start the engine again to use it."
        )

    def shutdown(self) -> None:
        """Ask nothing any more. A tier that hangs is not closed."""
        self._thread.close()
        if self._last_asked is None or self._last_asked.is_answered.is_set():
            self._shared.close()
