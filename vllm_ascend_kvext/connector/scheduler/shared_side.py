# SPDX-License-Identifier: Apache-2.0
"""The scheduler's part of a shared tier: what is asked, got into host memory, and put.

    a request arrives     has_to_wait ── asked ── found ── entries are got ──> as if stored here
    it computes           note_begun ── what it uses a second time is put, or touched if it was
    a step                take_jobs ──> the workers ──> note_results ── what was lost is put again

What is got becomes entries of the host tier, as stores do: all workers have the bytes, or there is
no entry. Loads know nothing of it. A request for which nothing comes in time goes on without. What
hangs is abandoned: nobody finds its entry, and nobody gets its place before it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from vllm_ascend_kvext.connector.common.events import TierEvents
from vllm_ascend_kvext.connector.common.messages import WorkerOutput
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.connector.common.scheduler_view import Request
from vllm_ascend_kvext.connector.scheduler.parts import SchedulerParts
from vllm_ascend_kvext.connector.scheduler.request_state import RequestOffloadState
from vllm_ascend_kvext.connector.scheduler.transfer_cost import TransferCost
from vllm_ascend_kvext.shared_tier import names, open_tier
from vllm_ascend_kvext.shared_tier.backend import (
    MAX_HANG_S,
    SharedObject,
    TierThread,
    UsedObjects,
    logger,
)
from vllm_ascend_kvext.shared_tier.search import FoundObject, Question, search
from vllm_ascend_kvext.store.counters import Refusal
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind, Load, Piece, WantedPiece
from vllm_ascend_kvext.store.prefix import Prefix
from vllm_ascend_kvext.store.remembered_keys import RememberedKeys
from vllm_ascend_kvext.store.store_policy import StorePolicy
from vllm_ascend_kvext.token_range import TokenRange

SharedJobs = tuple[tuple[SharedObject, ...], tuple[SharedObject, ...], tuple[UsedObjects, ...]]
"""Gets, puts and touches of one step."""

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
MAX_ABANDONED = 8  # With so many objects that hang at once, nothing more is asked for.
TOUCH_EVERY_S = 1.0  # So often the tier is told at most that an object is used,
MAX_TOUCHED = 256  # and of so many at once; others wait for these.
_REMEMBERED_TOUCHES = 1 << 14  # Of so many it is known when; so many wait at most.
_MAX_SILENT_REPORTS = 3
_IDLE_WAIT_S = 0.001  # So long a step that computes nothing waits for an answer.


@dataclass(slots=True, eq=False)
class SharedRequest:
    """What was asked for one request, and what it waits for.

    Attributes:
        question: None if it waits for no answer, or not any more.
        found: The answer, once it ``is_answered``; the thread writes it.
        gets: What is got for it, as long as it is awaited.
    """

    question: Question | None = None
    asked_s: float = 0.0
    found: Sequence[FoundObject] = ()
    is_answered: threading.Event = field(default_factory=threading.Event)
    gets: list[Entry] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Touch:
    """What the tier is told of use.

    Attributes:
        entries: By name of what is used; None where host memory has none.
        began_s: By the clock of the scheduler side.
        number: Of the job.
        absent: Which of them are not there.
    """

    entries: dict[str, Entry | None]
    began_s: float
    number: int = -1
    absent: set[int] = field(default_factory=set)


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
    ) -> None:
        assert options.shared_tier is not None
        self._parts = parts
        self._tier = parts.tier
        self._counters = parts.counters
        self._cost = cost
        self._events = events
        self._clock = parts.clock
        self._puts_all = options.store_policy is StorePolicy.ALL
        self._namespace = names.namespace_of(identity)
        self._spare_bytes = options.spare_bytes
        self._shared = open_tier(options.shared_tier, options.shared_tier_bytes, rank=0)
        self._introduce(options.shared_tier, identity)
        self._thread = TierThread("kvext-shared-lookups")
        self._last_asked: SharedRequest | None = None
        self._num_asked = 0  # In this step, and how many came behind them.
        self._num_jobs = 0  # Gets, puts and touches under way.
        self._last_change_s = 0.0  # Of these.
        self._new_gets: list[SharedObject] = []  # Of the next step.
        self._new_puts: list[SharedObject] = []
        # What is used, and waits to be touched, by name; and its entry, if host memory has it.
        self._new_touches: dict[str, Entry | None] = {}
        self._touches: dict[int, _Touch] = {}  # By number of the job,
        self._num_touched = 0  # and the names of all; without those
        self._num_hung_touches = 0  # of so many jobs that hang.
        self._touched_s: RememberedKeys[float] = RememberedKeys(_REMEMBERED_TOUCHES)
        # The entries that gets fill: since when, and the object;
        self._gets: dict[Entry, tuple[float, str]] = {}
        self._abandoned: dict[Entry, str] = {}  # those whose get hangs, and the object;
        self._awaited: dict[Entry, int] = {}  # and those that requests wait for: tokens they save.
        # Since when something is awaited without a break, and what has come since.
        self._busy_since_s = self._last_bytes_s = 0.0
        self._busy_bytes = 0.0
        self._overtaken_s = 0.0  # Gets that began before are slower than others that have ended.
        self._num_silent = 0  # Steps since that brought nothing.
        self._paused_until_s = self._puts_paused_until_s = -PAUSE_S
        self._put_bytes = 0
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
        self,
        request: Request,
        state: RequestOffloadState,
        num_computed_tokens: int,
        further_pieces: Callable[[], Sequence[WantedPiece]] = tuple,
    ) -> bool:
        """Whether to look at a request later: something is asked, or got, for its prompt.

        Args:
            further_pieces: What host memory lacks of other prefixes that the request may use.
        """
        if self._is_off or request.lora_request or request.skip_reading_prefix_cache:
            return False  # vLLM knows an adapter by its name only.
        known = state.shared
        if known is None:  # It is asked once.
            if self._num_asked >= MAX_ASKED:
                self._num_asked += 1
                return self._num_asked <= MAX_ASKED + MAX_BEHIND
            known = state.shared = SharedRequest()
            question = self._question(request, known, num_computed_tokens, further_pieces())
            if question:
                self._ask(known, question)
        if known.question is not None:
            if known.is_answered.is_set():
                self._begin_gets(request, known, known.question)
            elif (is_late := self._is_late()) or self._clock() - known.asked_s > MAX_QUEUED_S:
                self._counters.shared_requests["late"] += 1
                if is_late:
                    self._pause("an answer takes too long")
            else:
                return True
            known.question, known.found = None, ()
        return not self._awaited.keys().isdisjoint(known.gets)

    def got_tokens(self, state: RequestOffloadState) -> int:
        """Tokens whose rows were got for a request, and are in host memory."""
        known = state.shared
        got = (
            entry.piece.end_tokens - entry.piece.first_tokens
            for entry in (known.gets if known is not None else ())
            if entry.state is EntryState.STORED
        )
        return sum(got)

    def _ask(self, known: SharedRequest, question: Question) -> None:
        is_paused = self._clock() < self._paused_until_s
        if not is_paused and (why := self._why_hanging()):
            self._pause(why)
            is_paused = True
        if is_paused:
            self._counters.shared_requests["paused"] += 1
        else:
            known.question = question
            known.asked_s = self._clock()
            self._last_asked = known
            self._num_asked += 1
            self._thread.submit(partial(self._answer, known))

    def _question(
        self,
        request: Request,
        known: SharedRequest,
        after: int,
        further: Sequence[WantedPiece],
    ) -> Question:
        """What to ask. Notes gets of others that are of use."""
        geometry, prefix = self._tier.geometry, self._parts.view.prefix(request)
        limit = max(after, geometry.floor(min(request.num_tokens - 1, prefix.num_tokens)))
        index = self._tier.lookup(prefix).index
        missing: list[TokenRange] = []
        tails_tokens = limit
        if geometry.needs_rows and limit > after:
            between = range(geometry.chunk_end(after), limit, geometry.chunk_tokens)
            for chunk in map(TokenRange, (after, *between), (*between, limit)):
                entry = index.present(Kind.ROWS, prefix.key_at(chunk.end_tokens))
                self._await(known, entry)
                missing += [] if entry else [chunk]
        if geometry.needs_tails and limit > after:
            unit_tokens = geometry.unit_tokens
            boundaries = range(geometry.floor(after) + unit_tokens, limit + 1, unit_tokens)
            num_before = index.upto_present(Kind.TAILS, prefix.keys_at(boundaries))
            tails_tokens = boundaries[num_before - 1] if num_before else 0
            if num_before:
                self._await(known, index.present(Kind.TAILS, prefix.key_at(tails_tokens)))
        # Hashes that nobody changes while the thread reads them.
        prefix = replace(prefix, hashes=tuple(prefix.hashes[: limit // prefix.tokens_per_hash]))
        wanted = TokenRange(after, limit)
        holes = self._parts.computes_holes
        return Question(prefix, geometry, wanted, tuple(missing), tails_tokens, holes, further)

    def _await(self, known: SharedRequest, entry: Entry | None) -> None:
        """Have a request wait for an entry, if it is being got."""
        if entry in self._gets:
            known.gets.append(entry)

    def _answer(self, known: SharedRequest) -> None:
        """On the thread. How long it takes counts from here: many at once are not a slow tier."""
        began_s = self._clock()
        try:
            if (question := known.question) is not None:  # Somebody waits for it still.
                known.found = search(question, self._exist)
        finally:
            self._counters.shared_lookup_seconds += self._clock() - began_s
            known.is_answered.set()

    def _exist(self, asked: Sequence[str]) -> list[str]:
        return self._shared.exist([f"{self._namespace}/{name}" for name in asked])

    def _is_late(self) -> bool:
        """Whether the thread is at a question for too long: all behind it would wait, too."""
        return self._thread.busy_s() > MAX_LOOKUP_S

    def _pause(self, why: str) -> None:
        now_s = self._clock()
        if now_s >= self._paused_until_s:
            logger.warning("The shared tier is left alone for %.0f s: %s.", PAUSE_S, why)
        self._paused_until_s = now_s + PAUSE_S

    def _why_hanging(self) -> str:
        """Why nothing is asked just now, although the tier was left alone; empty if it may be.

        A place that something hanging may write to is lost: there are to be few of these.
        """
        self._thread.leave_behind()
        if len(self._gets) > len(self._awaited):
            self._abandon_hanging()
        if self._is_late():
            return "an answer takes too long"
        if len(self._gets) > len(self._awaited):
            return "what it has comes slowly"
        if len(self._abandoned) >= MAX_ABANDONED:
            return f"{len(self._abandoned)} objects that it has do not come"
        return ""

    def _abandon_hanging(self) -> None:
        """Give up for good what nobody waits for and of which nothing has come for long."""
        before_s = self._clock() - MAX_HANG_S
        if self._last_bytes_s > before_s:
            return
        hanging = {
            entry: name
            for entry, (began_s, name) in self._gets.items()
            if entry not in self._awaited and began_s < before_s
        }
        for entry in hanging:
            del self._gets[entry]
            self._tier.abandon_store(entry)
        if hanging:
            self._abandoned |= hanging
            self._counters.shared_failures["get_hung"] += len(hanging)
            logger.warning(
                "Shared tier: %d object(s) have not come for more than %.0f s, such as %s. They "
                "are computed, and others are asked for. Of host memory, %d bytes on each worker "
                "are not used before they come.",
                *(len(hanging), MAX_HANG_S, next(iter(hanging.values()))),
                sum(each.num_bytes for each in hanging),
            )

    # Getting.

    def _begin_gets(self, request: Request, known: SharedRequest, question: Question) -> None:
        """Take places in host memory for what was found, and have the workers fill them."""
        use = self._tier.next_use()
        after_tokens = question.tokens.first_tokens
        left_bytes = self._tier.capacity_bytes * MAX_GET_SHARE
        left_bytes -= sum(each.num_bytes for each in (*self._gets, *self._abandoned))
        is_paused = self._clock() < self._paused_until_s
        wanted_objects = () if is_paused else known.found
        for found in wanted_objects:
            piece, end_tokens, prefix = found.piece, found.end_tokens, found.prefix
            name = f"{self._namespace}/{found.name}"
            if name in self._abandoned.values():
                break  # It hangs. What lies behind is of less use without it.
            contents, num_bytes = self._contents(found)
            if num_bytes > left_bytes:
                break
            shared_piece = piece._replace(end_tokens=end_tokens)
            entry = self._tier.begin_store(prefix, shared_piece, num_bytes, use)
            if isinstance(entry, Refusal):
                index = self._tier.lookup(prefix).index
                self._await(known, index.storing(piece.kind, prefix.key_at(end_tokens)))
                if entry in (Refusal.ALREADY_STORED, Refusal.BEING_STORED):
                    continue
                break  # As above.
            left_bytes -= entry.num_bytes
            if not self._awaited:
                self._busy_since_s = self._last_bytes_s = self._clock()
                self._busy_bytes = self._num_silent = 0
            # Without its tails, rows are of no use.
            self._awaited[entry] = end_tokens - piece.first_tokens or end_tokens - after_tokens
            self._gets[entry] = self._clock(), name
            self._await(known, entry)
            on_end = partial(self._end_get, entry, contents, found, request)
            number = self._begin_job(on_end)
            self._new_gets.append(SharedObject(number, name, entry.offset_bytes, num_bytes))
        result = "found" if known.gets else "paused" if is_paused else "absent"
        self._counters.shared_requests[result] += 1

    def _contents(self, found: FoundObject) -> tuple[Any, int]:
        """What the entry of an object holds of a prefix, and the bytes of the object."""
        if found.wanted is not None:
            return found.wanted.contents, found.wanted.num_bytes
        layout, piece = self._parts.layout, found.piece
        row_map = layout.row_map(piece)
        if found.end_tokens < piece.end_tokens:  # Rows behind are of another prompt.
            row_map = layout.rows_within(row_map, piece.first_tokens, found.end_tokens)
        return row_map, layout.num_bytes(piece)

    def _begin_job(self, on_end: Callable[[bool], None]) -> int:
        """Hand a get, a put or a touch to the workers; its number."""
        self._num_jobs += 1
        return self._parts.jobs.begin(partial(self._end_job, on_end))

    def _end_job(self, on_end: Callable[[bool], None], has_failed: bool) -> None:
        self._num_jobs -= 1
        self._last_change_s = self._clock()
        on_end(has_failed)

    def _end_get(
        self, entry: Entry, contents: Any, found: FoundObject, request: Request, has_failed: bool
    ) -> None:
        began_s, _ = self._gets.pop(entry, (0.0, ""))
        self._overtaken_s = max(self._overtaken_s, began_s)
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
                self._events.stored(entry, found.prefix, request)

    @property
    def has_transfers(self) -> bool:
        """Whether gets and puts are under way that do not hang: steps are made for these only."""
        is_quiet = self._clock() - self._last_change_s > MAX_QUIET_S
        has_touches = self._new_touches and self._num_touched < MAX_TOUCHED
        are_new = self._new_gets or self._new_puts or has_touches
        return bool(are_new or (self._num_jobs and not is_quiet))

    def check_patience(self) -> None:
        """Wait no longer for what does not come, or comes slower than it can be computed."""
        if not self._awaited:
            return
        now_s = self._clock()
        busy_s = now_s - self._busy_since_s
        left_s = sum(each.num_bytes for each in self._awaited) * busy_s / max(1, self._busy_bytes)
        compute_s = self._cost.compute_s(sum(self._awaited.values()), MAX_UNKNOWN_S)
        # What a worker gets is reported one or two steps later, and steps may take longer.
        self._num_silent += 1
        is_silent = self._num_silent > _MAX_SILENT_REPORTS
        has_stalled = is_silent and now_s - self._last_bytes_s > MAX_STALL_S
        is_slow = busy_s > MAX_STALL_S and left_s > compute_s + MAX_STALL_S
        if has_stalled or (is_slow and self._busy_bytes and not self._cost.is_ignored):
            self._counters.shared_requests["given_up"] += 1
            self._awaited.clear()  # What comes all the same is for later requests.
            self._pause("what it has does not come" if has_stalled else "computing is faster")
            return
        first = next(iter(self._awaited))
        if self._gets[first][0] < min(self._overtaken_s, now_s - MAX_HANG_S):
            self._counters.shared_requests["given_up"] += 1
            del self._awaited[first]
            self._pause("something of what it has does not come")

    # Putting.

    def note_begun(self, request: Request, computed_tokens: int) -> None:
        """A request goes on behind tokens that others have computed: what has them is used."""
        prefix, geometry = self._parts.view.prefix(request), self._tier.geometry
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
            self.put(entry)
            return
        now_s = self._clock()
        mark = name.encode() or key
        is_due = now_s - self._touched_s.get(mark, -TOUCH_EVERY_S) >= TOUCH_EVERY_S
        if not is_due or len(self._new_touches) >= _REMEMBERED_TOUCHES or self._touches_nothing:
            return
        self._touched_s.put(mark, now_s)
        name = f"{self._namespace}/{name or names.note_name(key)}"
        self._new_touches[name] = entry

    @property
    def _touches_nothing(self) -> bool:
        is_paused = self._clock() < self._puts_paused_until_s
        return self._is_off or is_paused or self._num_hung_touches >= MAX_ABANDONED

    def _begin_touch(self) -> tuple[UsedObjects, ...]:
        now_s = self._clock()
        for touch in [*self._touches.values()]:  # One or two.
            if now_s - touch.began_s > MAX_HANG_S:
                del self._touches[touch.number]
                self._num_touched -= len(touch.entries)
                self._num_hung_touches += 1
        if self._touches_nothing:
            self._new_touches.clear()
        begun = list(islice(self._new_touches, max(0, MAX_TOUCHED - self._num_touched)))
        if not begun:
            return ()
        touch = _Touch({name: self._new_touches.pop(name) for name in begun}, now_s)
        self._num_touched += len(begun)
        touch.number = self._begin_job(partial(self._end_touch, touch))
        self._touches[touch.number] = touch
        return (UsedObjects(touch.number, tuple(touch.entries)),)

    def _end_touch(self, touch: _Touch, has_failed: bool) -> None:
        """What was used and is not there any more is put again, if host memory has it."""
        if self._touches.pop(touch.number, None) is None:
            self._num_hung_touches -= 1
        else:
            self._num_touched -= len(touch.entries)
        if has_failed:
            self._puts_paused_until_s = self._clock() + PAUSE_S
            return
        entries = [*touch.entries.values()]
        for number in sorted(touch.absent):
            entry = entries[number]
            if entry is not None and entry.state is EntryState.STORED and self._is_uncut(entry):
                entry.is_shared = False
                self.put(entry)

    def _is_uncut(self, entry: Entry) -> bool:
        """Whether it is what its name says, and not got from an object with more rows."""
        whole = self._parts.layout.row_map
        return bool(entry.key_space) or entry.row_map == whole(entry.piece)

    def note_stored(self, entry: Entry, request: Request) -> None:
        """A store of the engine's own has ended well."""
        if self._puts_all and not request.lora_request:
            self.put(entry)

    def put(self, entry: Entry | None) -> None:
        """Have an entry put, if there is one, unless it was, or too much is on its way."""
        if entry is None or entry.is_shared or self._is_off:
            return
        max_bytes = max(entry.num_bytes, self._tier.capacity_bytes * MAX_PUT_SHARE)
        is_busy = self._put_bytes + entry.num_bytes > max_bytes
        if is_busy or self._clock() < self._puts_paused_until_s:
            self._counters.shared_failures["put_busy"] += 1
            return
        if (load := self._tier.pin(entry)) is None:
            return
        has_notes = entry.piece.kind is Kind.ROWS and not entry.key_space
        notes = tuple(map(names.note_name, entry.keys)) if has_notes else ()
        number = self._begin_job(partial(self._end_put, entry, load))
        name = f"{self._namespace}/{names.object_name(entry.piece, entry.key, entry.key_space)}"
        num_bytes = entry.num_bytes - self._spare_bytes  # Contents are multiples of 64 bytes.
        self._new_puts.append(SharedObject(number, name, entry.offset_bytes, num_bytes, notes))
        self._put_bytes += entry.num_bytes
        entry.is_shared = True

    def _end_put(self, entry: Entry, load: Load, has_failed: bool) -> None:
        self._put_bytes -= entry.num_bytes
        if has_failed:
            entry.is_shared = False
            self._puts_paused_until_s = self._clock() + PAUSE_S
        self._tier.end_load(load)

    # Steps.

    def take_jobs(self, may_wait: bool) -> SharedJobs:
        """What the workers get, put and touch from this step on; it ``may_wait`` if it is idle."""
        if may_wait:
            self.check_patience()
            if self._last_asked is not None:
                self._last_asked.is_answered.wait(_IDLE_WAIT_S)
        self._num_asked = 0
        jobs = tuple(self._new_gets), tuple(self._new_puts), self._begin_touch()
        self._new_gets.clear()
        self._new_puts.clear()
        if any(jobs):
            self._last_change_s = self._clock()
        return jobs

    def note_results(self, results: WorkerOutput) -> None:
        """What the workers report of a step. Called before the jobs of the same report end."""
        for number, absent in results.absent_objects.items():
            if number in self._touches:
                self._touches[number].absent |= absent
        if results.got_bytes:
            self._busy_bytes += results.got_bytes / self._parts.jobs.num_workers
            self._last_bytes_s = self._last_change_s = self._clock()
            self._num_silent = 0
        for name, number in results.shared_failures.items():
            self._counters.shared_failures[name] += number
            if name == "get_unreachable":
                self._pause("something could not be read")

    def turn_off(self, why: str) -> None:
        """Perhaps the weights are others, and no file says so."""
        self._is_off = True
        logger.warning(
            "The shared tier is not used by this engine any more: %s. Start the engine again to "
            "use it.",
            why,
        )

    def shutdown(self) -> None:
        """Ask nothing any more. A tier that hangs is not closed."""
        self._thread.close()
        is_answered = self._last_asked is None or self._last_asked.is_answered.is_set()
        if is_answered and not self._thread.has_left_behind:
            self._shared.close()
