# SPDX-License-Identifier: Apache-2.0
"""Stores of requests: what is worth storing, when its pages are complete, and how a store ends.

If a step takes a request past a boundary, the rows before the boundary and the tails at the
boundary are stored after the step, before windows move on. A store holds references to its pages
until all workers have ended it. The end of an answer is known only when it is reached. Until then,
the scheduler side also holds the pages of the latest tails that would leave their windows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from vllm_ascend_kvext.connector.common.block_references import MAX_REFERENCED_SHARE
from vllm_ascend_kvext.connector.common.boundary_planner import NEVER
from vllm_ascend_kvext.connector.common.messages import StoreJob
from vllm_ascend_kvext.connector.common.scheduler_view import Block, Request
from vllm_ascend_kvext.connector.scheduler.parts import SchedulerParts
from vllm_ascend_kvext.connector.scheduler.request_state import RequestOffloadState, StoreProgress
from vllm_ascend_kvext.connector.scheduler.worker_jobs import Pages, table_parts
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk
from vllm_ascend_kvext.store.counters import Refusal, Removal
from vllm_ascend_kvext.store.entries import Entry, Piece
from vllm_ascend_kvext.store.prefix import HashedPrefix
from vllm_ascend_kvext.store.store_policy import StoreChooser, StorePolicy

if TYPE_CHECKING:
    from vllm_ascend_kvext.connector.common.events import TierEvents
    from vllm_ascend_kvext.connector.scheduler.secondary_tier import SecondaryTierScheduler
    from vllm_ascend_kvext.retention.reasons import Reason

MAX_UNASKED_SHARE = 0.25
"""Stores of tails that no request asked for begin only up to this share of the pool's blocks."""

_STORED_OR_PLANNED = (None, Refusal.ALREADY_STORED, Refusal.BEING_STORED)
"""The results of `Stores._store` after which a piece is stored, or is going to be."""


class _Stored(NamedTuple):
    """An entry whose store is under way, and the request that it is stored for."""

    entry: Entry
    prefix: HashedPrefix
    request: Request


@dataclass(slots=True)
class _Job:
    """Stores of one request in one step."""

    chunks: list[PlacedChunk] = field(default_factory=list)
    pages: Pages = field(default_factory=dict)
    stored: list[_Stored] = field(default_factory=list)


class Stores:
    """The stores of one engine.

    Attributes:
        reasons: Why tails were stored, by the number of the entry.
        num_planned: Jobs of this step.
    """

    def __init__(
        self,
        parts: SchedulerParts,
        policy: StorePolicy,
        events: TierEvents,
        secondary: SecondaryTierScheduler,
    ) -> None:
        self._view = parts.view
        self._tier = parts.tier
        self._layout = layout = parts.layout
        self._references = parts.references
        self._events = events
        self._under_way = parts.jobs
        self._secondary = secondary
        self.planner = parts.view.make_boundary_planner(layout.groups, layout.unit_tokens)
        self.chooser = StoreChooser(policy)
        self._is_off = policy is StorePolicy.NEVER
        self._jobs: dict[str, _Job] = {}  # The jobs of this step, by request.
        self.reasons: dict[int, Reason] = {}

    @property
    def num_planned(self) -> int:
        return len(self._jobs)

    # What happens to a request.

    def note_step(
        self, request: Request, state: RequestOffloadState, num_scheduled_tokens: int
    ) -> None:
        """A request computes in the step that is being planned."""
        # Behind the known tokens are drafts, which may be rejected.
        computed_tokens = request.num_computed_tokens + num_scheduled_tokens
        progress = state.progress
        if progress is None or request.num_computed_tokens < progress.done_tokens:
            if self._is_off:
                return
            progress = self._admit(request, state)
        if computed_tokens >= progress.next_event_tokens:
            self._advance(request, progress, min(computed_tokens, request.num_tokens))

    def next_stop_tokens(
        self, request: Request, state: RequestOffloadState, computed_tokens: int
    ) -> int:
        """Where a prefill step from ``computed_tokens`` on has to end to leave a state to store.

        The request may not have been admitted yet.

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
        return self.planner.next_stop_after(boundaries, computed_tokens)

    def finish(self, request: Request, state: RequestOffloadState, is_end_of_turn: bool) -> None:
        """A request has ended; its block table is still there.

        Args:
            is_end_of_turn: Whether its next turn may resume where it ended, and its pages hold
                what it has computed.
        """
        progress, state.progress = state.progress, None
        if progress is None:
            return
        if is_end_of_turn and not self._is_off:
            progress.use = self._tier.next_use()
            progress.rows_tokens = 0  # Some rows may have been evicted since.
            boundary = self._last_boundary(request)
            prompt_tokens = min(request.num_prompt_tokens, boundary)
            self._tier.note_ended(self._view.prefix(request), prompt_tokens, boundary)
            if boundary > 0:
                self._store_end(request, progress, boundary)
        self.release_held(progress)

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

    def swap_out(
        self, request: Request, state: RequestOffloadState
    ) -> tuple[StoreJob | None, bool]:
        """A request is about to be preempted: store what it would have to compute again.

        The step needs its pages at once, so the job holds none of them. Workers carry the job out
        before the step overwrites the pages.

        Returns:
            The job, None if there is nothing to store; and whether the request can resume where it
            stands after the job.
        """
        progress = state.progress
        boundary = self._last_boundary(request)
        if progress is None or boundary <= 0 or self._is_off:
            return None, False
        progress.use = self._tier.next_use()  # This store is read before stores of other requests.
        is_whole = self._store_end(request, progress, boundary, max_share=math.inf)
        job = self._jobs.pop(request.request_id, None)
        if job is None:
            return None, is_whole
        self._references.release(list(job.pages.values()))
        return self._begin(job, []), is_whole

    def swap_bytes(self, request: Request) -> int:
        """Host bytes of what `swap_out` would store."""
        prefix = self._view.prefix(request)
        boundary = self._last_boundary(request)
        pieces = self._tier.lookup(prefix).missing_pieces(0, boundary) if boundary else []
        if boundary and self._layout.geometry.needs_tails:
            pieces.append(Piece.tails(boundary))
        return sum(self._layout.num_bytes(piece) for piece in pieces)

    def abandon(self) -> None:
        """Drop the stores of this step, and release their pages."""
        for planned in self._jobs.values():
            self._references.release(list(planned.pages.values()))
            self._end(planned.stored, has_failed=True)
        self._jobs.clear()

    # Jobs.

    def take_jobs(self) -> tuple[StoreJob, ...]:
        """The jobs for the workers that have been planned since the last call."""
        jobs = [self._begin(job, list(job.pages.values())) for job in self._jobs.values()]
        self._jobs.clear()
        return tuple(jobs)

    def note_hit(self, entry: Entry) -> None:
        """A request resumes from tails."""
        reason = self.reasons.get(entry.number)
        if reason is not None:
            self.planner.note_hit(reason)

    def note_removed(self, entry: Entry, removal: Removal) -> None:
        """An entry was removed."""
        self.reasons.pop(entry.number, None)
        self._events.removed(entry)

    # Internals.

    def _begin(self, job: _Job, blocks: list[Block]) -> StoreJob:
        number = self._under_way.begin_store(blocks, partial(self._end, job.stored))
        parts = table_parts(job.pages, len(self._view.managers))
        return StoreJob(number, tuple(job.chunks), parts)

    def _end(self, stored: Sequence[_Stored], has_failed: bool) -> None:
        for entry, prefix, request in stored:
            if has_failed:
                self._tier.fail_store(entry)
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
            boundaries = self.planner.plan(request, computed_tokens, shared_tokens)
            state.planned = computed_tokens, boundaries
        return state.planned[1]

    def _admit(self, request: Request, state: RequestOffloadState) -> StoreProgress:
        """A request begins, or begins again after its blocks were taken."""
        self.release_held(state.progress)
        self.planner.report_hints(request)
        computed_tokens = request.num_computed_tokens
        self._secondary.on_request_begun(request, computed_tokens)
        shared_tokens = self._shared_tokens(request)
        boundaries = self._plan(request, state, computed_tokens, shared_tokens)
        state.planned = None
        state.progress = StoreProgress(
            self._tier.next_use(),
            boundaries,
            done_tokens=computed_tokens,
            rows_tokens=shared_tokens,
        )
        return state.progress

    def _shared_tokens(self, request: Request) -> int:
        """The boundary up to which the rows of a prompt are stored, or being stored."""
        prefix = self._view.prefix(request)
        return self._tier.present_tokens(prefix, request.num_prompt_tokens)

    def _advance(self, request: Request, progress: StoreProgress, computed_tokens: int) -> None:
        """A step takes a request past an event."""
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
            boundary = self._layout.geometry.floor(computed_tokens)
            self._hold_tails(request, progress, boundary)
            next_tokens = min(next_tokens, boundary + self._layout.unit_tokens)
        progress.done_tokens = computed_tokens
        progress.next_event_tokens = next_tokens

    def _store_boundaries(
        self, request: Request, progress: StoreProgress, computed_tokens: int
    ) -> None:
        """Store the boundaries that a step passes."""
        crossed = self.planner.crossed(progress.boundaries, progress.done_tokens, computed_tokens)
        known_tokens = self._view.prefix(request).num_tokens
        crossed = [(tokens, reason) for tokens, reason in crossed if tokens <= known_tokens]
        if not crossed:
            return
        # The rows of all boundaries are stored at once, in fewer pieces. Tails that were asked for
        # come before other tails.
        has_rows = self._store_rows(request, progress, crossed[-1][0])
        for tokens, reason in sorted(crossed, key=lambda each: self.planner.is_unasked(each[1])):
            tails = Piece.tails(tokens)
            if (
                not has_rows
                or self._store(request, progress, tails, reason) not in _STORED_OR_PLANNED
            ):
                self.planner.note_tried(reason)

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
            self._store_rows(request, progress, wanted_tokens)

    def _store_end(
        self,
        request: Request,
        progress: StoreProgress,
        boundary_tokens: int,
        max_share: float = MAX_REFERENCED_SHARE,
    ) -> bool:
        """Store what a request needs to resume where it stands now.

        Returns:
            Whether all of it is stored, or going to be.
        """
        # Tails without the rows before them are of no use.
        if not self._store_rows(request, progress, boundary_tokens, max_share):
            return False
        if not self._layout.geometry.needs_tails:
            return True
        tails = Piece.tails(boundary_tokens)
        reason = self.planner.end_of_turn
        return self._store(request, progress, tails, reason, max_share) in _STORED_OR_PLANNED

    def _store_rows(
        self,
        request: Request,
        progress: StoreProgress,
        upto_tokens: int,
        max_share: float = MAX_REFERENCED_SHARE,
    ) -> bool:
        """Store all rows before a boundary that are not stored yet.

        Returns:
            Whether all of them are stored, or going to be.
        """
        if not self._layout.geometry.needs_rows:
            return True
        lookup = self._tier.lookup(self._view.prefix(request))
        for piece in lookup.missing_pieces(progress.rows_tokens, upto_tokens):
            if self._store(request, progress, piece, None, max_share) not in _STORED_OR_PLANNED:
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
        max_share: float = MAX_REFERENCED_SHARE,
    ) -> Refusal | None:
        """Plan the store of one piece.

        Args:
            max_share: The share of the pool's blocks that all stores may hold, this one included.

        Returns:
            None if the store is going to be made; else why it is not.
        """
        blocks = self._blocks(request.request_id, progress, self._layout.pages(piece))
        pages: Pages = {key: block for key, block in blocks.items() if block is not None}
        if len(pages) < len(blocks):
            self._tier.counters.refused_stores[Refusal.PAGES_GONE] += 1
            return Refusal.PAGES_GONE
        is_unasked = reason is not None and self.planner.is_unasked(reason)
        max_share = MAX_UNASKED_SHARE if is_unasked else max_share
        if self._references.num_references + len(pages) > max_share * self._view.num_blocks:
            self._tier.counters.refused_stores[Refusal.BUSY] += 1
            return Refusal.BUSY
        prefix = self._view.prefix(request)
        num_bytes = self._layout.num_bytes(piece)
        # Tails that no request asked for give way first, until a request resumes from them.
        use = 0 if is_unasked else progress.use
        entry = self._tier.begin_store(prefix, piece, num_bytes, use)
        if isinstance(entry, Refusal):
            return entry
        if reason is not None:
            self.reasons[entry.number] = reason
            self.planner.note_tried(reason)
        job = self._jobs.setdefault(request.request_id, _Job())
        new = [block for key, block in pages.items() if key not in job.pages]
        self._references.take(new)
        job.pages.update(pages)
        job.chunks.append(self._layout.chunk(piece, entry.offset_bytes))
        job.stored.append(_Stored(entry, prefix, request))
        return None

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
        """The last boundary whose tokens are known, and are computed once steps in flight end."""
        known_tokens = min(request.num_computed_tokens, request.num_tokens)
        known_tokens = min(known_tokens, self._view.prefix(request).num_tokens)
        return self._layout.geometry.floor(known_tokens)

    def _hold_tails(self, request: Request, progress: StoreProgress, boundary_tokens: int) -> None:
        """Hold pages of the tails at the latest boundary.

        These pages leave their windows before the next boundary is reached.
        """
        if boundary_tokens <= progress.held_tokens or boundary_tokens <= 0:
            return
        # Rejected drafts and steps in flight count as computed for a while. So one unit is added.
        upto_tokens = boundary_tokens + 2 * self._layout.unit_tokens
        leaving = self._layout.pages_that_leave(boundary_tokens, upto_tokens)
        blocks = self._blocks(request.request_id, progress, leaving)
        held: Pages = {key: block for key, block in blocks.items() if block is not None}
        self._references.take(list(held.values()))
        self.release_held(progress)
        progress.held = held
        progress.held_tokens = boundary_tokens
