# SPDX-License-Identifier: Apache-2.0
"""Stores of requests: what is worth storing, when its pages are complete, how it ends.

Where a request's computed tokens pass a boundary, the rows before it and the tails at it are stored
after that step, before windows move on::

      tokens     0 ─────────── B1 ───────────── prompt ── B2 ── end of the answer
      in a step  [───────────────────][───────────────────][][][]...
      stored     rows to B1, tails at B1  rows, tails at the last units of prompt and answer

A store holds references to its pages until all workers have ended it. The end of an answer is known
only when it is reached: until then the pages of the latest tails that would leave their windows are
held as well. Knows nothing of loads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from vllm_ascend_kvext.connector.block_references import BlockReferences
from vllm_ascend_kvext.connector.boundaries import UNASKED, BoundaryPlanner
from vllm_ascend_kvext.connector.engine import Block, Engine, Request
from vllm_ascend_kvext.connector.host_layout import HostLayout
from vllm_ascend_kvext.connector.messages import StoreJob
from vllm_ascend_kvext.connector.store_jobs import Pages, StoreJobs, table_parts
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk
from vllm_ascend_kvext.retention.reasons import Origin, Reason
from vllm_ascend_kvext.store.counters import Refusal, Removal
from vllm_ascend_kvext.store.entries import Entry, Piece
from vllm_ascend_kvext.store.prefix import HashedPrefix
from vllm_ascend_kvext.store.store_policy import StoreChooser, StorePolicy
from vllm_ascend_kvext.store.tier import HostTier

_NEVER = 1 << 60
_LATEST = Reason(Origin.LATEST)

MOST_REFERENCED_SHARE = 0.75
"""Of the pool's blocks: what stores under way hold at most."""

MOST_UNASKED_SHARE = 0.25
"""The same where a store is of tails that nobody has asked for."""

_THERE = (None, Refusal.ALREADY_STORED, Refusal.BEING_STORED)
"""What a store is answered that leaves nothing to do."""


@dataclass(slots=True)
class _Tracked:
    """A request that has computed something.

    Attributes:
        use: The moment of its admission, see ``HostTier.next_use``.
        plan: Boundaries that are known.
        done_tokens: Boundaries up to here have been looked at.
        next_event_tokens: Below it, a step changes nothing.
        rows_tokens: Up to here, rows are in the tier, or on their way there.
        held: Pages of the latest tails that leave their windows.
        held_tokens: The boundary of these tails.
    """

    use: int
    plan: dict[int, Reason]
    done_tokens: int
    next_event_tokens: int = 0
    rows_tokens: int = 0
    held: Pages = field(default_factory=dict)
    held_tokens: int = 0


class _Plan(NamedTuple):
    """What is planned of a request when it begins.

    Attributes:
        computed_tokens: Where it begins.
        boundaries: At which its tails are stored.
    """

    computed_tokens: int
    boundaries: dict[int, Reason]


class Events(Protocol):
    """Told of what can be found; see ``events.TierEvents``."""

    def stored(self, entry: Entry, prefix: HashedPrefix, request: Request) -> None: ...

    def removed(self, entry: Entry, removal: Removal) -> None: ...

    def take(self) -> list[Any]: ...


class _Stored(NamedTuple):
    """An entry whose store is under way, and whose it is."""

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

    Args:
        engine: The scheduler's parts.
        tier: The host tier's books.
        layout: Of the pages.
        planner: Where tails are stored.
        chooser: What is stored at all.
        references: To pages.
        events: Of the tier.
        jobs: The stores under way.
        can_swap: Whether `swap_out` is called: the tails of prompts that are being computed are
            then held as well.
    """

    def __init__(
        self,
        engine: Engine,
        tier: HostTier,
        layout: HostLayout,
        planner: BoundaryPlanner,
        chooser: StoreChooser,
        references: BlockReferences,
        events: Events,
        jobs: StoreJobs,
        can_swap: bool = False,
    ) -> None:
        self._engine = engine
        self._tier = tier
        self._layout = layout
        self._planner = planner
        self._chooser = chooser
        self._references = references
        self._events = events
        self._under_way = jobs
        self._can_swap = can_swap
        self._tracked: dict[str, _Tracked] = {}
        self._plans: dict[str, _Plan] = {}  # of requests that are not admitted
        self._jobs: dict[str, _Job] = {}  # of this step
        self._reasons: dict[int, Reason] = {}  # of tails, by the number of the entry

    @property
    def num_planned(self) -> int:
        """Jobs of this step."""
        return len(self._jobs)

    @property
    def is_off(self) -> bool:
        return self._chooser.policy is StorePolicy.NEVER

    # What happens to a request.

    def note_step(self, request: Request, num_scheduled_tokens: int) -> None:
        """A request computes in the step that is being planned."""
        # Beyond the tokens that are known lie drafts, which may be rejected.
        computed_tokens = request.num_computed_tokens + num_scheduled_tokens
        tracked = self._tracked.get(request.request_id)
        if tracked is None or request.num_computed_tokens < tracked.done_tokens:
            if self.is_off:
                return
            tracked = self._admit(request)
        if computed_tokens >= tracked.next_event_tokens:
            self._advance(request, tracked, min(computed_tokens, request.num_tokens))

    def next_stop_tokens(self, request: Request, computed_tokens: int) -> int:
        """Where a prefill step is to end, so that it leaves a state to store.

        Args:
            request: May not have been admitted yet.
            computed_tokens: Where the step begins.

        Returns:
            A boundary past the beginning; a very large number if there is none.
        """
        if (
            self.is_off
            or not self._layout.has_states
            or computed_tokens >= request.num_prompt_tokens
        ):
            return _NEVER
        tracked = self._tracked.get(request.request_id)
        if tracked is None or computed_tokens < tracked.done_tokens:
            plan = self._plan(request, computed_tokens)
        else:
            plan = tracked.plan
        return self._planner.next_stop_after(plan, computed_tokens)

    def finish(self, request: Request, is_end_of_turn: bool) -> None:
        """A request has ended; its block table is still there.

        Args:
            is_end_of_turn: Whether its next turn may resume where it ended, and its pages hold
                what it has computed.
        """
        self._plans.pop(request.request_id, None)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        if is_end_of_turn and not self.is_off:
            tracked.use = self._tier.next_use()
            self._note_ended(request)
            tracked.rows_tokens = 0  # Some may have been evicted since.
            boundary = self._last_boundary(request)
            if boundary > 0:
                self._store_end(request, tracked, boundary)
        self._release_held(tracked)

    def _note_ended(self, request: Request) -> None:
        prompt_tokens = min(request.num_prompt_tokens, self._last_boundary(request))
        prefix = self._engine.prefix(request)
        self._tier.note_ended(prefix, prompt_tokens, self._last_boundary(request))

    def preempted(self, request_id: str) -> None:
        """The block table of a request is gone."""
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            self._release_held(tracked)

    def swap_out(self, request: Request) -> tuple[StoreJob | None, bool]:
        """A request is about to be preempted: store what it would have to compute again.

        Its pages are wanted at once, so the job holds none: workers make it before the step
        overwrites them.

        Returns:
            The job, None if there is nothing to store; and whether the request can go on from where
            it stands once the job is made.
        """
        tracked = self._tracked.get(request.request_id)
        boundary = self._last_boundary(request)
        if tracked is None or boundary <= 0 or self.is_off:
            return None, False
        is_whole = self._store_end(request, tracked, boundary, most_share=math.inf)
        job = self._jobs.pop(request.request_id, None)
        if job is None:
            return None, is_whole
        self._references.release(list(job.pages.values()))
        return self._begin(job, []), is_whole

    def swap_bytes(self, request: Request) -> int:
        """Host bytes of what `swap_out` would store."""
        prefix = self._engine.prefix(request)
        boundary = self._last_boundary(request)
        pieces = self._tier.missing_pieces(prefix, 0, boundary) if boundary else []
        if boundary and self._layout.geometry.needs_tails:
            pieces.append(Piece.tails(boundary))
        return sum(self._layout.num_bytes(piece) for piece in pieces)

    def release_all_held(self) -> None:
        """Let go of the pages that no store reads yet."""
        for tracked in self._tracked.values():
            self._release_held(tracked)

    def abandon(self) -> None:
        """Let go of the pages of the stores of this step, which are not made."""
        for planned in self._jobs.values():
            self._references.release(list(planned.pages.values()))
            for stored in planned.stored:
                self._fail(stored)
        self._jobs.clear()

    # Jobs.

    def take_jobs(self) -> tuple[StoreJob, ...]:
        """What has been planned since the last call, for the workers."""
        jobs = [self._begin(job, list(job.pages.values())) for job in self._jobs.values()]
        self._jobs.clear()
        return tuple(jobs)

    def note_hit(self, entry: Entry) -> None:
        """A request resumes from tails."""
        reason = self._reasons.get(entry.number)
        if reason is not None:
            self._planner.note_hit(reason)

    def note_removed(self, entry: Entry, removal: Removal) -> None:
        """An entry is not there any more."""
        self._reasons.pop(entry.number, None)
        self._events.removed(entry, removal)

    # What is behind it.

    def _begin(self, job: _Job, blocks: list[Block]) -> StoreJob:
        number = self._under_way.begin(blocks, partial(self._end, job.stored))
        parts = table_parts(job.pages, len(self._engine.managers))
        return StoreJob(number, tuple(job.chunks), parts)

    def _end(self, stored: Sequence[_Stored], has_failed: bool) -> None:
        for each in stored:
            if has_failed:
                self._fail(each)
            else:
                self._finish(each)

    def _plan(self, request: Request, computed_tokens: int) -> dict[int, Reason]:
        """The boundaries of a request that is to begin there.

        They are those of `_admit`, whatever others store meanwhile: steps end where it will store.
        """
        plan = self._plans.get(request.request_id)
        if plan is None or plan.computed_tokens != computed_tokens:
            shared_tokens = self._shared_tokens(request)
            boundaries = self._planner.plan(request, computed_tokens, shared_tokens)
            plan = self._plans[request.request_id] = _Plan(computed_tokens, boundaries)
        return plan.boundaries

    def _admit(self, request: Request) -> _Tracked:
        """A request begins, or begins again after its blocks were taken."""
        before = self._tracked.get(request.request_id)
        if before is not None:
            self._release_held(before)
        self._planner.report_hints(request)
        computed_tokens = request.num_computed_tokens
        shared_tokens = self._shared_tokens(request)
        plan = self._plans.pop(request.request_id, None)
        if plan is not None and plan.computed_tokens == computed_tokens:
            boundaries = plan.boundaries
        else:
            boundaries = self._planner.plan(request, computed_tokens, shared_tokens)
        tracked = _Tracked(
            self._tier.next_use(),
            boundaries,
            done_tokens=computed_tokens,
            rows_tokens=shared_tokens,
        )
        self._tracked[request.request_id] = tracked
        return tracked

    def _shared_tokens(self, request: Request) -> int:
        """Up to where the rows of a prompt are stored, or being stored."""
        prefix = self._engine.prefix(request)
        return self._tier.present_tokens(prefix, request.num_prompt_tokens)

    def _advance(self, request: Request, tracked: _Tracked, computed_tokens: int) -> None:
        """A step takes a request past an event."""
        geometry = self._layout.geometry
        self._store_chunks(request, tracked, computed_tokens)
        next_tokens = _NEVER
        if geometry.needs_rows:
            chunk_tokens = geometry.chunk_tokens
            next_tokens = computed_tokens - computed_tokens % chunk_tokens + chunk_tokens
        # Without tails, a request can resume at every unit of what is stored.
        if geometry.needs_tails:
            self._store_boundaries(request, tracked, computed_tokens)
            next_tokens = min(next_tokens, self._planner.next_after(tracked.plan, computed_tokens))
            if self._can_swap or computed_tokens >= request.num_prompt_tokens:
                boundary = self._layout.geometry.floor(computed_tokens)
                self._hold_tails(request, tracked, boundary)
                next_tokens = min(next_tokens, boundary + self._layout.unit_tokens)
            elif self._layout.has_states:
                next_tokens = 0  # Where the next step ends, it leaves a state.
            else:
                next_tokens = min(next_tokens, request.num_prompt_tokens)
        tracked.done_tokens = computed_tokens
        tracked.next_event_tokens = next_tokens

    def _store_boundaries(self, request: Request, tracked: _Tracked, computed_tokens: int) -> None:
        """Store the boundaries that a step passes."""
        crossed = self._planner.crossed(tracked.plan, tracked.done_tokens, computed_tokens)
        known_tokens = self._engine.prefix(request).num_tokens
        crossed = [(tokens, reason) for tokens, reason in crossed if tokens <= known_tokens]
        if not crossed:
            return
        # Rows of all of them at once: in fewer pieces. Then what was asked for.
        has_rows = self._store_rows(request, tracked, crossed[-1][0])
        for tokens, reason in sorted(crossed, key=lambda each: each[1].origin in UNASKED):
            tails = Piece.tails(tokens)
            if not has_rows or self._store(request, tracked, tails, reason) not in _THERE:
                self._planner.note_tried(reason)

    def _store_chunks(self, request: Request, tracked: _Tracked, computed_tokens: int) -> None:
        """Store whole chunks that somebody else has computed before, or all of them."""
        geometry = self._layout.geometry
        if not geometry.needs_rows:
            return
        prefix = self._engine.prefix(request)
        chunk_tokens = geometry.chunk_tokens
        first_end = tracked.done_tokens - tracked.done_tokens % chunk_tokens + chunk_tokens
        last_end = min(computed_tokens, prefix.num_tokens)
        wanted_tokens = 0
        for chunk_end in range(first_end, last_end + 1, chunk_tokens):
            if self._chooser.is_wanted(prefix.key_at(chunk_end), request.request_id):
                wanted_tokens = chunk_end
        if wanted_tokens > tracked.rows_tokens:
            self._store_rows(request, tracked, wanted_tokens)

    def _store_end(
        self,
        request: Request,
        tracked: _Tracked,
        boundary_tokens: int,
        most_share: float = MOST_REFERENCED_SHARE,
    ) -> bool:
        """Store what a resume where a request stands needs.

        Returns:
            Whether all of it is stored, or going to be.
        """
        # Tails without the rows before them are of no use.
        if not self._store_rows(request, tracked, boundary_tokens, most_share):
            return False
        if not self._layout.geometry.needs_tails:
            return True
        tails = Piece.tails(boundary_tokens)
        return self._store(request, tracked, tails, _LATEST, most_share) in _THERE

    def _store_rows(
        self,
        request: Request,
        tracked: _Tracked,
        upto_tokens: int,
        most_share: float = MOST_REFERENCED_SHARE,
    ) -> bool:
        """Whether all rows before a boundary are stored, or going to be."""
        if not self._layout.geometry.needs_rows:
            return True
        prefix = self._engine.prefix(request)
        for piece in self._tier.missing_pieces(prefix, tracked.rows_tokens, upto_tokens):
            if self._store(request, tracked, piece, None, most_share) not in _THERE:
                return False
            tracked.rows_tokens = max(tracked.rows_tokens, piece.end_tokens)
        tracked.rows_tokens = max(tracked.rows_tokens, self._layout.geometry.floor(upto_tokens))
        return True

    def _store(
        self,
        request: Request,
        tracked: _Tracked,
        piece: Piece,
        reason: Reason | None = None,
        most_share: float = MOST_REFERENCED_SHARE,
    ) -> Refusal | None:
        """Plan the store of one piece; None if it is going to be made.

        Args:
            most_share: Of the pool's blocks that stores may hold then.
        """
        pages = self._pages_of(request.request_id, tracked, piece)
        if pages is None:
            self._tier.count_refusal(Refusal.PAGES_GONE)
            return Refusal.PAGES_GONE
        is_unasked = reason is not None and reason.origin in UNASKED
        most_share = MOST_UNASKED_SHARE if is_unasked else most_share
        if self._references.num_references + len(pages) > most_share * self._engine.num_blocks:
            self._tier.count_refusal(Refusal.BUSY)
            return Refusal.BUSY
        prefix = self._engine.prefix(request)
        num_bytes = self._layout.num_bytes(piece)
        # What nobody asked for gives way first, until somebody resumes there.
        use = 0 if is_unasked else tracked.use
        entry = self._tier.begin_store(prefix, piece, num_bytes, use)
        if isinstance(entry, Refusal):
            return entry
        if reason is not None:
            self._reasons[entry.number] = reason
            self._planner.note_tried(reason)
        job = self._jobs.setdefault(request.request_id, _Job())
        new = [block for key, block in pages.items() if key not in job.pages]
        self._references.take(new)
        job.pages.update(pages)
        job.chunks.append(self._layout.chunk(piece, entry.offset_bytes))
        job.stored.append(_Stored(entry, prefix, request))
        return None

    def _pages_of(self, request_id: str, tracked: _Tracked, piece: Piece) -> Pages | None:
        """The blocks that a piece is read from; None if some are not there any more."""
        pages: Pages = {}
        for page_range in self._layout.pages(piece):
            for key, block in self._blocks(request_id, tracked, *page_range):
                if block is None:
                    return None
                pages[key] = block
        return pages

    def _blocks(
        self, request_id: str, tracked: _Tracked, group: int, first_page: int, end_page: int
    ) -> Iterator[tuple[tuple[int, int], Block | None]]:
        """Blocks of a range of pages; None where they are neither in the table nor held."""
        found = self._engine.blocks(request_id, group, first_page, end_page)
        for page, block in enumerate(found, first_page):
            key = group, page
            yield key, tracked.held.get(key) if block.is_null else block
        for page in range(first_page + len(found), end_page):
            yield (group, page), tracked.held.get((group, page))

    def _last_boundary(self, request: Request) -> int:
        """The last boundary whose tokens are known and computed, by steps in flight at least."""
        known_tokens = min(request.num_computed_tokens, request.num_tokens)
        known_tokens = min(known_tokens, self._engine.prefix(request).num_tokens)
        return self._layout.geometry.floor(known_tokens)

    def _hold_tails(self, request: Request, tracked: _Tracked, boundary_tokens: int) -> None:
        """Hold what leaves the windows of the latest boundary before another can be reached."""
        if boundary_tokens <= tracked.held_tokens or boundary_tokens <= 0:
            return
        # Drafts that are rejected, and steps in flight, count as computed for a while: one more.
        upto_tokens = boundary_tokens + 2 * self._layout.unit_tokens
        held: Pages = {}
        for page_range in self._layout.pages_that_leave(boundary_tokens, upto_tokens):
            for key, block in self._blocks(request.request_id, tracked, *page_range):
                if block is not None:
                    held[key] = block
        self._references.take(list(held.values()))
        self._release_held(tracked)
        tracked.held, tracked.held_tokens = held, boundary_tokens

    def _release_held(self, tracked: _Tracked) -> None:
        self._references.release(list(tracked.held.values()))
        tracked.held, tracked.held_tokens = {}, 0

    def _finish(self, stored: _Stored) -> None:
        entry = stored.entry
        is_there = self._tier.finish_store(entry, self._layout.row_map(entry.piece))
        if is_there:
            self._events.stored(entry, stored.prefix, stored.request)
        else:
            self._reasons.pop(entry.number, None)

    def _fail(self, stored: _Stored) -> None:
        self._reasons.pop(stored.entry.number, None)
        self._tier.fail_store(stored.entry)
