# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Stores of requests: what is worth storing, when its pages are complete, and how a store ends.

If a step takes a request past a boundary, the rows before the boundary and the tails at the
boundary are stored after the step, before windows move on. A store holds references to its pages
until all workers have ended it, or until it gives way (``StoreQueue``).

The state at the end of a step stays in its page only if it is the state at the end of that page.
Otherwise the next step of the request overwrites it. Such a state is *fleeting*: its store does not
wait in the queue, and workers carry it out before the next step computes anything.

The end of an answer is known only when it is reached. Until then, the scheduler side also holds the
pages of the latest tails that would leave their windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from vllm_ascend_kvext.connector.common.block_references import MAX_REFERENCED_SHARE
from vllm_ascend_kvext.connector.common.boundary_planner import NEVER
from vllm_ascend_kvext.connector.common.messages import StoreJob
from vllm_ascend_kvext.connector.common.scheduler_view import Block, Request
from vllm_ascend_kvext.connector.scheduler.parts import SchedulerParts
from vllm_ascend_kvext.connector.scheduler.request_state import RequestOffloadState, StoreProgress
from vllm_ascend_kvext.connector.scheduler.step_budget import StepBudget
from vllm_ascend_kvext.connector.scheduler.store_queue import (
    PlannedStore,
    StoredEntry,
    StoreQueue,
)
from vllm_ascend_kvext.connector.scheduler.transfer_cost import TransferCost
from vllm_ascend_kvext.connector.scheduler.worker_jobs import Pages, table_parts
from vllm_ascend_kvext.store.answers import Answers
from vllm_ascend_kvext.store.counters import Refusal, Removal
from vllm_ascend_kvext.store.entries import Entry, Kind, Piece
from vllm_ascend_kvext.store.eviction import MIN_RECENT_CHANCE
from vllm_ascend_kvext.store.prefix import HashedPrefix
from vllm_ascend_kvext.store.resumes import TailOrigin
from vllm_ascend_kvext.store.store_policy import StoreChooser, StorePolicy

if TYPE_CHECKING:
    from vllm_ascend_kvext.connector.common.events import TierEvents
    from vllm_ascend_kvext.connector.scheduler.secondary_tier import SecondaryTierScheduler
    from vllm_ascend_kvext.retention.reasons import Reason

MAX_UNASKED_SHARE = 0.25
"""Stores of tails that no request asked for begin only up to this share of the pool's blocks."""

SURE_CHANCE = 0.9
"""If answers come back with this probability, prompt and answer are stored in the same entries."""

MIN_CHANCE = 1 / 16
"""If answers come back with a lower probability, they are not stored."""

_STORED_OR_PLANNED = (None, Refusal.ALREADY_STORED, Refusal.BEING_STORED)
"""The results of `Stores._store` after which a piece is stored, or is going to be."""


class Stores:
    """The stores of one engine.

    Attributes:
        reasons: Why tails were stored, by the number of the entry.
        queue: The stores that are planned.
        fleeting: Stores of states that the next step overwrites.
        are_compared: Whether workers report digests of what they store.
    """

    def __init__(
        self,
        parts: SchedulerParts,
        policy: StorePolicy,
        events: TierEvents,
        secondary: SecondaryTierScheduler,
        cost: TransferCost,
    ) -> None:
        self._view = parts.view
        self._tier = parts.tier
        self._layout = layout = parts.layout
        self._references = parts.references
        self._events = events
        self._under_way = parts.jobs
        self._secondary = secondary
        self._max_continued_tokens = layout.max_continued_tokens
        if secondary.needs_whole_tails:
            self._max_continued_tokens = 0
        self.planner = parts.view.make_boundary_planner(layout.groups, layout.unit_tokens)
        self.chooser = StoreChooser(policy)
        self._is_off = policy is StorePolicy.NEVER
        self._counters = parts.counters
        self._answers = Answers(layout.unit_tokens)
        self.queue = StoreQueue(
            parts.references,
            cost,
            parts.view.num_blocks,
            parts.view.num_running,
            parts.view.on_waiting_stores,
            parts.clock,
        )
        self.fleeting: list[PlannedStore] = []
        self.are_compared = False
        self.reasons: dict[int, Reason] = {}

    # What happens to a request.

    def note_step(
        self, request: Request, state: RequestOffloadState, num_scheduled_tokens: int
    ) -> None:
        """A request computes in the step that is being planned."""
        computed_tokens = request.num_computed_tokens + num_scheduled_tokens
        progress = state.progress
        if progress is None or request.num_computed_tokens < progress.done_tokens:
            if self._is_off:
                return
            progress = self._admit(request, state)
        if computed_tokens >= progress.next_event_tokens:
            # Behind the known tokens are drafts, which may be rejected.
            known_tokens = min(computed_tokens, request.num_tokens)
            self._advance(request, progress, known_tokens, computed_tokens > known_tokens)

    def next_stop_tokens(
        self,
        request: Request,
        state: RequestOffloadState,
        computed_tokens: int,
        budget: StepBudget,
    ) -> int:
        """Where a prefill step from ``computed_tokens`` on has to end to leave a state to store.

        The request may not have been admitted yet. The budget says which steps may end early.

        Returns:
            A boundary past the beginning; a very large number if there is none.
        """
        is_prefill = computed_tokens < request.num_prompt_tokens
        if self._is_off or not self._layout.has_states or not is_prefill:
            return NEVER
        progress = state.progress
        if progress is None or computed_tokens < progress.done_tokens:
            boundaries = self._plan(request, state, computed_tokens)
        else:
            boundaries = progress.boundaries
        return self.planner.next_stop_after(
            boundaries, computed_tokens, budget.may_stop, budget.may_try
        )

    def finish(self, request: Request, state: RequestOffloadState, is_end_of_turn: bool) -> None:
        """A request has ended; its block table is still there.

        Args:
            is_end_of_turn: Whether its next turn may resume where it ended, and its pages hold
                what it has computed.
        """
        progress, state.progress = state.progress, None
        if progress is None:
            return
        if not is_end_of_turn:
            computed_tokens = max(request.num_computed_tokens, progress.done_tokens)
            self._note_stopped(request, progress, computed_tokens)
        elif not self._is_off:
            progress.use = self._tier.next_use()
            progress.rows_tokens = 0  # Some rows may have been evicted since.
            boundary = self._last_boundary(request)
            if boundary > 0:
                self._store_turn(request, progress, boundary)
        self.release_held(progress)

    def _store_turn(self, request: Request, progress: StoreProgress, boundary_tokens: int) -> None:
        """Store what a request that has ended leaves: its prompt, and its answer if that pays."""
        prefix = self._view.prefix(request)
        prompt_tokens = min(request.num_prompt_tokens, boundary_tokens)
        chance = self._answers.note_ended(
            prefix, prompt_tokens, boundary_tokens, progress.answers, _salt_of(request)
        )
        is_kept = chance >= MIN_RECENT_CHANCE
        self._tier.note_ended(prefix, prompt_tokens, boundary_tokens, is_kept)
        prompt_boundary = self._layout.geometry.floor(prompt_tokens)
        if not 0 < prompt_boundary < boundary_tokens:
            chance = 1.0
        if chance < MIN_CHANCE:
            self._store_rows(request, progress, prompt_boundary)
        elif self._store_turn_rows(request, progress, boundary_tokens, chance):
            self._store_end(request, progress, boundary_tokens, chance=chance)

    def _note_stopped(
        self, request: Request, progress: StoreProgress, computed_tokens: int
    ) -> None:
        """A request has stopped before its end; it may begin again."""
        prefix = self._view.prefix(request)
        end_tokens = min(computed_tokens, prefix.num_tokens)
        if self._answers.chance(progress.answers, _salt_of(request)) < MIN_RECENT_CHANCE:
            end_tokens = min(end_tokens, request.num_prompt_tokens)
        self._tier.note_stopped(prefix, end_tokens)

    def release_held(self, progress: StoreProgress | None) -> None:
        """Release the blocks that are held for a request."""
        if progress is not None:
            self._references.release(list(progress.held.values()))
            progress.held = {}
            progress.held_tokens = 0

    def leave_free(self, num_blocks: int, states: Sequence[RequestOffloadState]) -> None:
        """Release blocks that are held for running requests, until ``num_blocks`` blocks are free.

        vLLM preempts the latest request first, and its held blocks then go to host memory. So the
        latest request keeps its held blocks if other requests compute, too, and if its blocks are
        too few to prevent a preemption.
        """
        for state in states:
            num_lacking = num_blocks - self._references.num_free
            if num_lacking <= 0:
                return
            num_held = len(state.progress.held) if state.progress is not None else 0
            if state is not states[-1] or len(states) == 1 or num_lacking <= num_held:
                self.release_held(state.progress)

    def swap_out(self, request: Request, state: RequestOffloadState) -> tuple[list[StoreJob], bool]:
        """A request is about to be preempted: store what it would have to compute again.

        The step needs the request's pages at once, so the jobs hold none of them. Workers carry the
        jobs out before the step overwrites the pages. The request's stores that have not begun are
        carried out with them. Otherwise they would give way in this step, as only they hold blocks.

        Returns:
            The jobs, and whether the request can resume where it stands after them.
        """
        progress = state.progress
        boundary = self._last_boundary(request)
        if progress is None or boundary <= 0 or self._is_off:
            return [], False
        progress.use = self._tier.next_use()  # Other requests read their stores later.
        is_whole = self._store_end(request, progress, boundary, holds_pages=False)
        jobs = []
        for store in self.queue.withdraw(progress):
            number = self._under_way.begin_store([], partial(self._end, store))
            jobs.append(self._job(number, store))
        return jobs, is_whole

    def swap_bytes(self, request: Request, state: RequestOffloadState) -> int:
        """Host bytes of what `swap_out` would store."""
        prefix = self._view.prefix(request)
        boundary = self._last_boundary(request)
        pieces = self._tier.lookup(prefix).missing_pieces(0, boundary) if boundary else []
        if boundary and self._layout.geometry.needs_tails:
            pieces.append(Piece.tails(boundary))
        planned_bytes = 0 if state.progress is None else self.queue.num_bytes_of(state.progress)
        return planned_bytes + sum(self._layout.num_bytes(piece) for piece in pieces)

    def abandon(self) -> None:
        """Drop the stores that have not begun, and release their pages."""
        fleeting = self.fleeting
        self.fleeting = []
        for store in fleeting:
            self._references.release(list(store.pages.values()))
        for store in [*self.queue.withdraw_all(), *fleeting]:
            self._end(store, has_failed=True)

    def give_way(self, to_running: bool = False) -> bool:
        """Let one store give way to a request that lacks blocks; see `StoreQueue.give_way`.

        Returns:
            Whether blocks have become free.
        """
        stores = self.queue.give_way(to_running)
        for entry, _, _, progress in [each for store in stores for each in store.stored]:
            self.reasons.pop(entry.number, None)
            self._tier.counters.refused_stores[Refusal.BUSY] += 1
            self._tier.fail_store(entry, is_own=False)
            # The request may store the same rows later.
            progress.rows_tokens = min(progress.rows_tokens, entry.piece.first_tokens)
        return bool(stores)

    # Jobs.

    def take_jobs(self) -> tuple[StoreJob, ...]:
        """The jobs that the workers begin with this step."""
        return tuple(self._begin(store) for store in self.queue.begin())

    def take_fleeting_jobs(self) -> tuple[StoreJob, ...]:
        """The jobs that workers carry out before the step that is being planned overwrites pages.

        Call it before the stores of that step are planned.
        """
        jobs = []
        for store in self.fleeting:
            blocks = list(store.pages.values())
            number = self._under_way.begin_store(blocks, partial(self._end, store))
            jobs.append(self._job(number, store))
        self.fleeting = []
        return tuple(jobs)

    def note_hit(self, entry: Entry) -> None:
        """A request resumes from tails."""
        reason = self.reasons.get(entry.number)
        if reason is not None:
            self.planner.note_hit(reason)

    def note_removed(self, entry: Entry, removal: Removal) -> None:
        """An entry was removed."""
        self.reasons.pop(entry.number, None)

    def reset(self) -> None:
        """Forget what was learned of prompts and answers."""
        self.chooser.clear()
        self._answers.clear()

    # Internals.

    def _begin(self, store: PlannedStore) -> StoreJob:
        blocks = list(store.pages.values())
        number = self._under_way.begin_store(blocks, partial(self._end_begun, store))
        return self._job(number, store)

    def _job(self, number: int, store: PlannedStore) -> StoreJob:
        parts = table_parts(store.pages, len(self._view.managers))
        return StoreJob(number, tuple(store.chunks), parts, is_compared=self.are_compared)

    def _end_begun(self, store: PlannedStore, has_failed: bool) -> None:
        self.queue.note_ended(store)
        self._end(store, has_failed)

    def _end(self, store: PlannedStore, has_failed: bool) -> None:
        for entry, prefix, request, progress in store.stored:
            if has_failed:
                self._tier.fail_store(entry)
                if entry.piece.end_tokens == progress.tails_tokens:
                    progress.tails_tokens = 0  # The end of the turn needs tails of its own.
            elif self._tier.finish_store(entry, self._layout.row_map(entry.piece)):
                self._events.stored(entry, prefix, request)
                self._secondary.on_stored(entry, request)
                continue
            self.reasons.pop(entry.number, None)

    def _plan(
        self,
        request: Request,
        state: RequestOffloadState,
        computed_tokens: int,
        shared_tokens: int | None = None,
    ) -> dict[int, Reason]:
        """The boundaries of a request that is to begin at ``computed_tokens``.

        `_admit` uses the same boundaries, even if other requests have stored something meanwhile.
        So steps end where the request will store.
        """
        if state.planned is None or state.planned[0] != computed_tokens:
            if shared_tokens is None:
                shared_tokens = self._shared_tokens(request)
            prefix = self._view.prefix(request)
            known_tokens = self._tier.known_tokens(prefix, request.num_prompt_tokens)
            boundaries = self.planner.plan(
                request, computed_tokens, max(shared_tokens, known_tokens)
            )
            state.planned = computed_tokens, boundaries
        return state.planned[1]

    def _admit(self, request: Request, state: RequestOffloadState) -> StoreProgress:
        """A request begins, or begins again after its blocks were taken."""
        before = state.progress
        self.release_held(before)
        self.planner.report_hints(request)
        computed_tokens = request.num_computed_tokens
        self._secondary.on_request_begun(request, computed_tokens)
        shared_tokens = self._shared_tokens(request)
        boundaries = self._plan(request, state, computed_tokens, shared_tokens)
        state.planned = None
        prefix = self._view.prefix(request)
        if before is not None:
            self._note_stopped(request, before, before.done_tokens)
        state.progress = StoreProgress(
            self._tier.note_admitted(
                prefix,
                request.num_prompt_tokens,
                before is not None,
                shared_tokens,
                computed_tokens,
            ),
            boundaries,
            done_tokens=computed_tokens,
            rows_tokens=shared_tokens,
        )
        self._note_prompt(request, state.progress)
        if before is not None and not state.progress.answers.num_all:
            # The answers before its prompt were counted when it began for the first time.
            state.progress.answers = before.answers
        return state.progress

    def _note_prompt(self, request: Request, progress: StoreProgress) -> None:
        """Learn whether earlier answers have come back with a prompt."""
        prefix = self._view.prefix(request)
        prompt_tokens = min(request.num_prompt_tokens, prefix.num_tokens)
        progress.answers, first_tokens = self._answers.note_prompt(
            prefix, prompt_tokens, _salt_of(request)
        )
        if first_tokens:
            self._tier.note_came_back(prefix, first_tokens, prompt_tokens)

    def _shared_tokens(self, request: Request) -> int:
        """The boundary up to which the rows of a prompt are stored, or being stored."""
        prefix = self._view.prefix(request)
        return self._tier.present_tokens(prefix, request.num_prompt_tokens)

    def _advance(
        self, request: Request, progress: StoreProgress, known_tokens: int, has_drafts: bool
    ) -> None:
        """A step takes a request past an event.

        A step with drafts leaves states in blocks of drafts. The state at the end of the known
        tokens is copied to its own block when the drafts are verified, and vLLM-Ascend does so
        after the connector's part of the step has ended. So what ends there is stored one step
        later, and held until then.
        """
        computed_tokens = known_tokens
        if has_drafts and self._layout.has_states:
            computed_tokens -= 1
        geometry = self._layout.geometry
        self._store_chunks(request, progress, computed_tokens)
        next_tokens = NEVER
        if geometry.needs_rows:
            chunk_tokens = geometry.chunk_tokens
            next_tokens = computed_tokens - computed_tokens % chunk_tokens + chunk_tokens
        # Without tails, a request can resume at every unit of what is stored.
        if geometry.needs_tails:
            self._store_boundaries(request, progress, computed_tokens)
            next_tokens = min(
                next_tokens, self.planner.next_after(progress.boundaries, computed_tokens)
            )
            lasting_tokens = self._layout.lasting_unit_tokens
            boundary = known_tokens - known_tokens % lasting_tokens
            self._hold_tails(request, progress, boundary)
            next_tokens = min(next_tokens, boundary + lasting_tokens)
        progress.done_tokens = computed_tokens
        progress.next_event_tokens = next_tokens

    def _store_boundaries(
        self, request: Request, progress: StoreProgress, computed_tokens: int
    ) -> None:
        """Store the boundaries that a step passes."""
        crossed = self.planner.crossed(progress.boundaries, progress.done_tokens, computed_tokens)
        known_tokens = self._view.prefix(request).num_tokens
        crossed = [
            (tokens, reason)
            for tokens, reason in crossed
            if tokens <= known_tokens
            and (
                self._is_lasting(tokens)
                or self._is_fleeting(request, reason, tokens, computed_tokens)
            )
        ]
        prompt_tokens = request.num_prompt_tokens
        chance = 1.0
        if crossed and crossed[-1][0] > prompt_tokens:
            chance = self._answers.chance(progress.answers, _salt_of(request))
            if chance < MIN_CHANCE:
                crossed = [each for each in crossed if each[0] <= prompt_tokens]
        if not crossed:
            return
        if self._layout.has_states and computed_tokens < request.num_prompt_tokens:
            last_tokens, reason = crossed[-1]
            if last_tokens == computed_tokens and self.planner.ends_steps(reason):
                self._counters.state_steps += 1
        # The rows of all boundaries are stored at once, in fewer pieces. Tails that were asked for
        # come before other tails.
        has_rows = self._store_turn_rows(request, progress, crossed[-1][0], chance)
        for tokens, reason in sorted(crossed, key=lambda each: self.planner.is_unasked(each[1])):
            tails = self._tails(request, tokens)
            if (
                not has_rows
                or self._store(request, progress, tails, reason) not in _STORED_OR_PLANNED
            ):
                self.planner.note_tried(reason)

    def _is_lasting(self, boundary_tokens: int) -> bool:
        """Whether the tails at a boundary stay in their pages when later tokens are computed."""
        return boundary_tokens % self._layout.lasting_unit_tokens == 0

    def _is_fleeting(
        self, request: Request, reason: Reason, boundary_tokens: int, computed_tokens: int
    ) -> bool:
        """Whether the state at a boundary within its page is there between two steps.

        It is there if a step of the prompt ends at the boundary. Steps behind the prompt may end
        with drafts, which count as computed until they are rejected. States that no request asked
        for are not worth the time for which the next step waits, unless a step was ended for them.
        """
        return (
            boundary_tokens == computed_tokens < request.num_prompt_tokens
            and self.planner.ends_steps(reason)
        )

    def _store_chunks(
        self, request: Request, progress: StoreProgress, computed_tokens: int
    ) -> None:
        """Store whole chunks that another request has computed before, or all chunks by policy."""
        geometry = self._layout.geometry
        if not geometry.needs_rows:
            return
        prefix = self._view.prefix(request)
        chunk_tokens = geometry.chunk_tokens
        first_end = progress.done_tokens - progress.done_tokens % chunk_tokens + chunk_tokens
        last_end = min(computed_tokens, prefix.num_tokens)
        wanted_tokens = 0
        for chunk_end in range(first_end, last_end + 1, chunk_tokens):
            if self.chooser.is_wanted(prefix.key_at(chunk_end), request.request_id):
                wanted_tokens = chunk_end
        if wanted_tokens > progress.rows_tokens:
            # The device has these rows until the request ends, and then they are stored in any
            # case. So nothing gives way for them yet.
            may_evict = self.chooser.policy is StorePolicy.ALL
            self._store_rows(request, progress, wanted_tokens, may_evict=may_evict)

    def _store_end(
        self,
        request: Request,
        progress: StoreProgress,
        boundary_tokens: int,
        holds_pages: bool = True,
        chance: float = 1.0,
    ) -> bool:
        """Store what a request needs to resume where it stands now.

        Args:
            chance: See `Entry`.

        Returns:
            Whether all of it is stored, or going to be.
        """
        # Tails without the rows before them are of no use.
        if not self._store_rows(request, progress, boundary_tokens, holds_pages, chance=chance):
            return False
        if not self._layout.geometry.needs_tails:
            return True
        if holds_pages and boundary_tokens <= progress.tails_tokens:
            return True  # Whatever comes back has the prompt, and resumes at the later tails.
        # A preempted request needs its tails for a short time only.
        tails = Piece.tails(boundary_tokens)
        if holds_pages:
            tails = self._tails(request, boundary_tokens)
        reason = self.planner.end_of_turn
        refusal = self._store(request, progress, tails, reason, holds_pages)
        return refusal in _STORED_OR_PLANNED

    def _tails(self, request: Request, boundary_tokens: int) -> Piece:
        """The tails to store at a boundary: whole, or what they have beyond other tails."""
        prefix = self._view.prefix(request)
        return self._tier.tails_to_store(prefix, boundary_tokens, self._max_continued_tokens)

    def _store_turn_rows(
        self, request: Request, progress: StoreProgress, upto_tokens: int, chance: float
    ) -> bool:
        """Store all rows before a boundary, which may be behind the prompt.

        Args:
            chance: The probability that the answer comes back.

        Returns:
            Whether all of them are stored, or going to be.
        """
        prompt_boundary = self._layout.geometry.floor(request.num_prompt_tokens)
        is_split = chance < SURE_CHANCE and 0 < prompt_boundary < upto_tokens
        # The prompt has entries of its own, which stay when those of the answer give way.
        if is_split and not self._store_rows(request, progress, prompt_boundary):
            return False
        return self._store_rows(request, progress, upto_tokens, chance=chance if is_split else 1.0)

    def _store_rows(
        self,
        request: Request,
        progress: StoreProgress,
        upto_tokens: int,
        holds_pages: bool = True,
        may_evict: bool = True,
        chance: float = 1.0,
    ) -> bool:
        """Store all rows before a boundary that are not stored yet.

        Returns:
            Whether all of them are stored, or going to be.
        """
        if not self._layout.geometry.needs_rows:
            return True
        lookup = self._tier.lookup(self._view.prefix(request))
        for piece in lookup.missing_pieces(progress.rows_tokens, upto_tokens):
            refusal = self._store(request, progress, piece, None, holds_pages, may_evict, chance)
            if refusal not in _STORED_OR_PLANNED:
                return False
            progress.rows_tokens = max(progress.rows_tokens, piece.end_tokens)
        progress.rows_tokens = max(progress.rows_tokens, self._layout.geometry.floor(upto_tokens))
        return True

    def _store(
        self,
        request: Request,
        progress: StoreProgress,
        piece: Piece,
        reason: Reason | None = None,
        holds_pages: bool = True,
        may_evict: bool = True,
        chance: float = 1.0,
    ) -> Refusal | None:
        """Plan the store of one piece.

        Args:
            holds_pages: Whether the store holds its pages until it ends. A swap does not.
            may_evict: See `HostTier.begin_rows`.
            chance: See `Entry`.

        Returns:
            None if the store is going to be made; else why it is not.
        """
        blocks = self._blocks(request.request_id, progress, self._layout.pages(piece))
        pages: Pages = {key: block for key, block in blocks.items() if block is not None}
        if len(pages) < len(blocks):
            self._tier.counters.refused_stores[Refusal.PAGES_GONE] += 1
            return Refusal.PAGES_GONE
        is_unasked = reason is not None and self.planner.is_unasked(reason)
        num_bytes = self._layout.num_bytes(piece)
        # Rows bring hits only with tails, so tails count like a chunk of rows.
        num_tokens = self._layout.geometry.chunk_tokens
        if piece.kind is Kind.ROWS:
            num_tokens = piece.end_tokens - piece.first_tokens
        if holds_pages and not self._may_hold(len(pages), num_bytes, num_tokens, is_unasked):
            self._tier.counters.refused_stores[Refusal.BUSY] += 1
            return Refusal.BUSY
        prefix = self._view.prefix(request)
        # Among tails that are expected to be as useful, those that no request asked for give way
        # first, until a request resumes from them.
        use = 0 if is_unasked else progress.use
        entries = self._begin_store(progress, prefix, piece, use, may_evict, chance, reason)
        if isinstance(entries, Refusal):
            return entries
        prefix = self._events.fixed(prefix)
        if piece.kind is Kind.TAILS and not self._is_lasting(piece.end_tokens):
            assert reason is not None
            self._note_tails(entries[0], reason)
            progress.tails_tokens = piece.end_tokens
            self._add_fleeting(
                pages, entries[0], StoredEntry(entries[0], prefix, request, progress)
            )
            return None
        is_whole = entries[-1].piece.end_tokens == piece.end_tokens
        if not is_whole:
            stored = Piece.rows(piece.first_tokens, entries[-1].piece.end_tokens)
            ranges = self._layout.pages(stored)
            kept = {(group, page) for group, *each in ranges for page in range(*each)}
            pages = {key: block for key, block in pages.items() if key in kept}
        for entry in entries:
            if reason is not None:
                self._note_tails(entry, reason)
            else:
                num_tokens = entry.piece.end_tokens - entry.piece.first_tokens
            self.queue.add(
                pages,
                self._layout.chunk(entry.piece, entry.offset_bytes),
                StoredEntry(entry, prefix, request, progress),
                self._layout.num_bytes(entry.piece),
                num_tokens,
            )
        return None if is_whole else Refusal.WORTH_LESS

    def _note_tails(self, entry: Entry, reason: Reason) -> None:
        self.reasons[entry.number] = reason
        self.planner.note_tried(reason)

    def _add_fleeting(self, pages: Pages, entry: Entry, stored: StoredEntry) -> None:
        """Plan the store of tails that the next step overwrites."""
        self._references.take(list(pages.values()))
        chunk = self._layout.chunk(entry.piece, entry.offset_bytes)
        self.fleeting.append(PlannedStore([chunk], pages, [stored]))

    def _begin_store(
        self,
        progress: StoreProgress,
        prefix: HashedPrefix,
        piece: Piece,
        use: int,
        may_evict: bool,
        chance: float,
        reason: Reason | None,
    ) -> Sequence[Entry] | Refusal:
        """Take places for a piece. Rows may become several entries; see `HostTier.begin_rows`."""
        if reason is None:
            return self._tier.begin_rows(prefix, piece, use, may_evict, chance)
        num_bytes = self._layout.num_bytes(piece)
        origin = self._tail_origin(progress, reason)
        entry = self._tier.begin_store(prefix, piece, num_bytes, use, origin=origin)
        return entry if isinstance(entry, Refusal) else (entry,)

    def _tail_origin(self, progress: StoreProgress, reason: Reason) -> TailOrigin:
        if self.planner.is_unasked(reason):
            return TailOrigin.UNASKED
        is_later = progress.answers.num_all > 0  # The prompt continues an earlier prompt.
        if reason == self.planner.end_of_turn:
            return TailOrigin.END_OF_LATER_TURN if is_later else TailOrigin.END_OF_TURN
        if reason == self.planner.end_of_prompt:
            return TailOrigin.END_OF_LATER_PROMPT if is_later else TailOrigin.END_OF_PROMPT
        return TailOrigin.ASKED

    def _may_hold(self, num_blocks: int, num_bytes: int, num_tokens: int, is_unasked: bool) -> bool:
        """Whether a further store may hold blocks until it ends."""
        max_share = MAX_UNASKED_SHARE if is_unasked else MAX_REFERENCED_SHARE
        num_references = self._references.num_references + num_blocks
        return num_references <= max_share * self._view.num_blocks and self.queue.may_plan(
            num_blocks, num_bytes, num_tokens
        )

    def _blocks(
        self, request_id: str, progress: StoreProgress, page_ranges: Iterable[tuple[int, int, int]]
    ) -> dict[tuple[int, int], Block | None]:
        """The blocks of ranges of pages; None for a page that is neither in the table nor held."""
        blocks: dict[tuple[int, int], Block | None] = {}
        for group, first_page, end_page in page_ranges:
            found = self._view.blocks(request_id, group, first_page, end_page)
            for page in range(first_page, end_page):
                block = found[page - first_page] if page - first_page < len(found) else None
                if block is None or block.is_null:
                    block = progress.held.get((group, page))
                blocks[group, page] = block
        return blocks

    def _last_boundary(self, request: Request) -> int:
        """The last boundary whose tokens are known, and are computed once steps in flight end.

        The tails at the boundary last, see `_is_lasting`.
        """
        known_tokens = min(request.num_computed_tokens, request.num_tokens)
        known_tokens = min(known_tokens, self._view.prefix(request).num_tokens)
        return known_tokens - known_tokens % self._layout.lasting_unit_tokens

    def _hold_tails(self, request: Request, progress: StoreProgress, boundary_tokens: int) -> None:
        """Hold pages of the tails at the latest boundary.

        These pages leave their windows before the next boundary is reached.
        """
        if boundary_tokens <= progress.held_tokens or boundary_tokens <= 0:
            return
        # Rejected drafts and steps in flight count as computed for a while. So one unit is added.
        upto_tokens = boundary_tokens + 2 * self._layout.lasting_unit_tokens
        leaving = self._layout.pages_that_leave(boundary_tokens, upto_tokens)
        blocks = self._blocks(request.request_id, progress, leaving)
        held: Pages = {key: block for key, block in blocks.items() if block is not None}
        self._references.take(list(held.values()))
        self.release_held(progress)
        progress.held = held
        progress.held_tokens = boundary_tokens


def _salt_of(request: Request) -> str:
    return request.cache_salt or ""
