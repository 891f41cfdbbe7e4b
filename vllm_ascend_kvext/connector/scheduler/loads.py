# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Loads of requests: their plans, the loads under way, and how these end.

    match() ── a pinned plan ──> begin() ── under way ──> end()
       │                           │
       └ asked again, with other   └ the request was not admitted with it ──> cancelled
         tokens on the device ──> cancelled

If another request is loading the same prefix, `match` answers "later". Once the other load has
ended, the request can hit the loaded tokens on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from vllm_ascend_kvext.connector.common.messages import LoadJob
from vllm_ascend_kvext.connector.common.scheduler_view import Request
from vllm_ascend_kvext.connector.scheduler.extension import SchedulerExtension
from vllm_ascend_kvext.connector.scheduler.load_jobs import LoadJobs
from vllm_ascend_kvext.connector.scheduler.parts import SchedulerParts
from vllm_ascend_kvext.connector.scheduler.request_report import Decision, RequestReport
from vllm_ascend_kvext.connector.scheduler.request_state import (
    Admission,
    Awaited,
    Later,
    RequestLoad,
    RequestOffloadState,
)
from vllm_ascend_kvext.connector.scheduler.room import PoolRoom, Room
from vllm_ascend_kvext.connector.scheduler.transfer_cost import TransferCost
from vllm_ascend_kvext.errors import ConnectorError
from vllm_ascend_kvext.holes.behind_holes import plan_behind_holes
from vllm_ascend_kvext.holes.eligibility import HoleRefusal, why_no_holes
from vllm_ascend_kvext.holes.hole_blocks import WindowTables
from vllm_ascend_kvext.holes.load_plan import LoadPlan, plan_of_hit
from vllm_ascend_kvext.store.lookup import Hit
from vllm_ascend_kvext.token_range import TokenRange, union

MIN_RUN_TOKENS = 64
"""The shortest run of tokens behind a hole that is worth a row and a load.

On a CPU, a further row of a step costs as much as 7 tokens (``benchmarks/holes/first_token.py``).
An accelerator computes faster.
"""

MAX_PATIENCE_S = 10.0
"""The longest time that a request waits for another request's load, or for blocks of its holes.

After this time, the request makes a load of its own, or does without holes. Later requests may take
blocks while it waits.
"""

MAX_LOOKUPS_IN_VAIN = 16
"""The maximum number of lookups in one step that end with a wait.

After them, requests wait without a lookup. A lookup takes about a millisecond, and thousands of
requests may be waiting.
"""

MAX_FAILED_LOADS = 2
"""The number of failed loads after which the whole request is computed.

After fewer failures, the request is looked up again, for what is left.
"""


class Loads:
    """The loads of one engine.

    Attributes:
        num_under_way: The number of loads that workers make.
    """

    def __init__(
        self,
        parts: SchedulerParts,
        extension: SchedulerExtension,
        cost: TransferCost,
    ) -> None:
        self._view = parts.view
        self._tier = parts.tier
        self._layout = parts.layout
        self._jobs = LoadJobs(parts.layout, len(parts.view.managers))
        self.room = PoolRoom(parts.layout.all_groups, parts.view, parts.references)
        self.cost = cost
        self._counters = parts.counters
        self._references = parts.references
        self._clock = parts.clock
        self._holes = parts.holes
        self._computes_holes = parts.computes_holes
        self._extension = extension
        # The boundaries of loads under way, by key. After a load, other requests can hit its tokens
        # on the device up to its boundary.
        self._promised: dict[bytes, int] = {}
        self.num_under_way = 0
        self._lookups_in_vain = 0  # In the step that is being planned.

    def match(
        self,
        request: Request,
        state: RequestOffloadState,
        num_computed_tokens: int,
        may_load: bool = True,
    ) -> int | None:
        """How many tokens past the tokens on the device can be loaded.

        What is to be loaded is pinned until `begin` or `forget`.

        Args:
            may_load: Whether anything may be loaded.

        Returns:
            None if the answer has to wait: for the load of another request, or for room.
        """
        admission = state.admission
        self.room.release(request.request_id)
        # The request's own load has ended. Other requests may have taken the blocks that the load
        # filled.
        self._withdraw_promise(state)
        if self._still_lacks_room(request, admission, num_computed_tokens):
            return None
        admission.later = None
        self._extension.restart(request.request_id)
        num_tokens: int | None = 0
        if may_load:
            num_tokens = self._match(request, state, num_computed_tokens)
        state.device_tokens = num_computed_tokens
        if num_tokens == 0 and self.room.of_other(request.num_tokens) is Room.LATER:
            admission.later = Later(num_computed_tokens, None)
            return None
        return num_tokens

    def _still_lacks_room(
        self, request: Request, admission: Admission, num_computed_tokens: int
    ) -> bool:
        """Whether a request still lacks the room that it lacked before; asked in every step."""
        later = admission.later
        if later is None or later.num_computed_tokens != num_computed_tokens:
            return False
        if later.room_version is None:
            return self.room.of_other(request.num_tokens) is Room.LATER
        self.room.keep_turn(request.request_id)
        if later.free_blocks:
            has_too_few = not self._references.make_free(later.free_blocks)
            return has_too_few and not self._has_waited_long(admission)
        return later.room_version == self.room.version or self.room.is_behind_other(
            request.request_id
        )

    def _match(
        self, request: Request, state: RequestOffloadState, num_computed_tokens: int
    ) -> int | None:
        admission = state.admission
        pinned = admission.pinned
        if pinned is not None:
            is_good = pinned.is_good_for(num_computed_tokens)
            # Free blocks may have become few since the plan was made.
            needs_more = is_good and self._holes_need_more_blocks(request, admission, pinned.plan)
            if is_good and not (needs_more and self._has_waited_long(admission)):
                if needs_more or self._keeps_parked_waiting():
                    return None
                if self._room_for(request, pinned.plan) is not Room.YES:
                    return None
                if self._hold(request, pinned.plan):
                    return pinned.plan.num_tokens
            self._cancel(admission)
        if self._still_waits(admission, num_computed_tokens):
            return None
        admission.shortfall = None
        admission.decision = Decision.NOT_LOOKED_UP
        if request.skip_reading_prefix_cache:
            return 0
        if state.num_failed_loads >= MAX_FAILED_LOADS:
            admission.decision = Decision.FAILED_LOADS
            return 0
        if self._lookups_in_vain >= MAX_LOOKUPS_IN_VAIN:
            return None
        num_tokens = self._look_up(request, admission, num_computed_tokens)
        if num_tokens is None:
            self._lookups_in_vain += 1
        return num_tokens

    def _look_up(
        self, request: Request, admission: Admission, num_computed_tokens: int
    ) -> int | None:
        prefix = self._view.prefix(request)
        # The last token is computed in any case, because its output is wanted.
        hit = self._tier.look_up(prefix, request.num_tokens - 1, num_computed_tokens)
        if (
            self._layout.has_states
            and num_computed_tokens < hit.boundary_tokens
            and self._view.leaves_a_decode(request, hit.boundary_tokens)
        ):
            hit = self._tier.look_up(prefix, hit.boundary_tokens - 1, num_computed_tokens)
        admission.shortfall = hit.shortfall
        has_room = partial(self._can_have_room, request, admission)
        plan = self._extension.plan(request, hit, has_room)
        if plan is None:
            plan = self._plan(request, admission, hit)
            if plan.num_tokens <= 0:
                admission.decision = Decision.NOTHING_FOUND
                return 0
            if self._waits_for_other(admission, plan):
                return None
            if not plan.holes and self._takes_longer(plan):  # With holes, `_plan` asks this.
                if not admission.is_slower:  # A waiting request is asked about in every step.
                    self._counters.too_dear_loads += 1
                admission.is_slower = True
                admission.decision = Decision.SLOWER
                return 0
        room = self._room_for(request, plan)
        if room is Room.LATER:
            admission.later = Later(num_computed_tokens, self.room.version)
            return None
        if room is Room.NEVER:
            admission.decision = Decision.NO_ROOM
            return 0
        if self._holes_need_more_blocks(request, admission, plan):
            return None
        load = self._tier.begin_load(
            prefix, plan.boundary_tokens, plan.entries, self._tier.next_use()
        )
        if load is None:
            admission.decision = Decision.NO_ROOM
            return 0
        admission.decision = Decision.LOADED
        admission.pinned = RequestLoad(plan, load)
        self._hold(request, plan)
        return plan.num_tokens

    def _keeps_parked_waiting(self) -> bool:
        """Whether parked requests wait behind a request that was not admitted with its load.

        vLLM 0.23 admits a load only if there is room for all that parked requests still need, too.
        It tries no request behind a request that it cannot admit. If nothing runs, the engine would
        stand still.
        """
        return self.room.num_parked > 0 and not self._view.num_running()

    def _hold(self, request: Request, plan: LoadPlan) -> bool:
        """Keep what an extension's plan needs on the device. Returns whether the device has it."""
        return plan.is_exact or self._extension.hold(request, plan)

    def end_step(self) -> None:
        """A step is planned. Requests that have not begun in it are asked about again."""
        self._lookups_in_vain = 0

    def _plan(self, request: Request, admission: Admission, hit: Hit) -> LoadPlan:
        """The plan that goes on behind holes, if it costs less than it saves, and has room.

        Otherwise the plan stops at the first hole.
        """
        if not self._computes_holes or admission.hole_refusal is not None:
            return plan_of_hit(hit)
        beyond = plan_behind_holes(self._tier, hit, request.num_tokens, MIN_RUN_TOKENS)
        if beyond is None:
            return plan_of_hit(hit)
        refusal = why_no_holes(request)
        if refusal is None and not self._can_have_room(request, admission, beyond):
            refusal = HoleRefusal.ROOM
        if refusal is None and self._takes_longer(beyond):
            refusal = HoleRefusal.TOO_DEAR
        admission.hole_refusal = refusal
        return beyond if refusal is None else plan_of_hit(hit)

    def _holes_need_more_blocks(
        self, request: Request, admission: Admission, plan: LoadPlan
    ) -> bool:
        """Whether there are too few free blocks for the request and the windows of its holes.

        Upstream counts only the blocks of the request, and takes them at once.
        """
        free_blocks = self._too_few_blocks(request, plan)
        if not free_blocks:
            admission.lacks_blocks_since_s = None
            return False
        admission.later = Later(plan.after_tokens, self.room.version, free_blocks)
        if admission.lacks_blocks_since_s is None:
            admission.lacks_blocks_since_s = self._clock()
        return True

    def _too_few_blocks(self, request: Request, plan: LoadPlan) -> int:
        """The free blocks that a request and its holes' windows need; 0 if enough are free."""
        blocks = self._holes.blocks
        has_tails = any(hole.first_tokens in plan.tails for hole in plan.holes)
        if not blocks.has_windows or not (plan.num_window_blocks or has_tails):
            return 0
        free_blocks = self.room.blocks_of_load(request.num_tokens, plan.boundary_tokens, plan.holes)
        free_blocks += plan.num_window_blocks
        return 0 if self._references.make_free(free_blocks) else free_blocks

    def _can_have_room(self, request: Request, admission: Admission, plan: LoadPlan) -> bool:
        """Whether a plan with holes can ever get its blocks.

        A request whose holes have lacked blocks for a long time does without holes.
        """
        free_blocks = self._too_few_blocks(request, plan)
        return not (
            free_blocks > self.room.num_blocks
            or (free_blocks > 0 and self._has_waited_long(admission))
            or self._room_for(request, plan) is Room.NEVER
        )

    def _has_waited_long(self, admission: Admission) -> bool:
        """Whether the windows of a request's holes have lacked blocks for a long time."""
        since_s = admission.lacks_blocks_since_s
        return since_s is not None and self._clock() - since_s >= MAX_PATIENCE_S

    def begin(
        self,
        request: Request,
        state: RequestOffloadState,
        num_tokens: int,
        block_ids: tuple[list[int], ...],
    ) -> LoadJob | None:
        """A request has got its blocks, and is to load as many tokens as `match` said, or none.

        Args:
            block_ids: The request's blocks by KV cache group, from its first token on.

        Raises:
            ConnectorError: If the number differs. Tokens would then count as computed although they
                are not.
        """
        request_id = request.request_id
        self._withdraw_promise(state)
        admission, state.admission = state.admission, Admission()
        # A request whose load has failed was counted at its first admission.
        if admission.shortfall is not None and not state.num_failed_loads:
            self._tier.counters.shortfalls[admission.shortfall] += 1
        if admission.hole_refusal is not None:
            self._counters.hole_refusals[admission.hole_refusal] += 1
        pinned = admission.pinned
        # After a load, upstream admits the request again. The report of the first admission stays.
        if num_tokens or not request.num_computed_tokens:
            state.report = _report(request, state, admission, num_tokens)
        if num_tokens == 0:
            self._cancel(admission)
            self.room.withdraw(request_id)
            return None
        if pinned is None or pinned.plan.num_tokens != num_tokens:
            self._cancel(admission)
            found = 0 if pinned is None else pinned.plan.num_tokens
            raise ConnectorError(
                f"request {request_id}: expected to load {found} tokens, as matched, found "
                f"{num_tokens}; the scheduler has to use what get_num_new_matched_tokens said"
            )
        plan = pinned.plan
        pinned.began_s = self._clock()
        state.under_way = pinned
        self.num_under_way += 1
        self._promise(state, plan)
        self.room.park(request_id, request.num_tokens, plan.boundary_tokens, plan.holes)
        if not plan.is_exact:
            return self._extension.begin(request, plan, block_ids)
        tables: Sequence[WindowTables] = []
        if plan.holes:
            tables = self._holes.begin(request_id, plan.holes, plan.after_tokens)
        return self._jobs.plan(request_id, plan, block_ids, tables, self._may_lack(request))

    def _may_lack(self, request: Request) -> bool:
        """Whether tokens that a load fails to bring are computed as a hole at once.

        This is not possible for models with windows. The hole has no blocks for its windows yet.
        The hole reads its windows from the last tails before it, and these tails may have failed to
        load. Such a request is looked up again. So is a request of a model with draft layers: the
        hole might end where its blocks end, and drafts are written behind a hole.
        """
        return (
            self._computes_holes
            and not self._holes.blocks.has_windows
            and not self._view.has_draft_layers
            and self._view.recomputes_failed_loads
            and why_no_holes(request) is None
        )

    def end(self, request_id: str, state: RequestOffloadState) -> Sequence[TokenRange]:
        """All workers have ended a load. A load of another connector is ignored.

        Returns:
            The tokens that are to be computed as holes of the request.
        """
        under_way, state.under_way = state.under_way, None
        if under_way is None:
            return []
        self.num_under_way -= 1
        plan = under_way.plan
        failed = {e for e in plan.entries if e.offset_bytes in under_way.unreadable}
        self._tier.end_load(under_way.load, failed)
        if under_way.has_failed:
            self._holes.drop(request_id)
            # The request holds its blocks until the scheduler looks at it, so it stays parked.
            self._withdraw_promise(state)
            self._extension.restart(request_id)
            # Upstream may let the request go on behind the device's tokens, and ask for no load
            # again.
            _note_loaded(state, 0, [], Decision.FAILED_LOADS)
            is_all = len(failed) == len(plan.entries)
            state.num_failed_loads += MAX_FAILED_LOADS if is_all else 1
            return []
        runs = union(
            TokenRange(span.first_tokens, span.end_tokens)
            for span in plan.exact_spans
            if span.entry in failed
        )
        holes = union([*plan.holes, *runs])
        self._count_hit(plan, holes)
        self._counters.shortened_loads += state.num_failed_loads > 0
        if runs:
            num_tokens = plan.num_tokens - sum(hole.num_tokens for hole in holes)
            _note_loaded(state, num_tokens, holes, Decision.LOADED)
        else:
            self.cost.note_load(plan.num_bytes, self._clock() - under_way.began_s)
        return [] if state.has_ended else runs

    def _count_hit(self, plan: LoadPlan, holes: Sequence[TokenRange]) -> None:
        hole_tokens = sum(hole.num_tokens for hole in holes)
        self._counters.hit_tokens += plan.num_tokens - hole_tokens
        self._counters.hit_requests += 1
        self._counters.holes += len(holes)
        if holes:
            behind_tokens = plan.boundary_tokens - holes[0].first_tokens - hole_tokens
            self._counters.behind_hole_tokens += behind_tokens

    def forget(self, request_id: str, state: RequestOffloadState) -> None:
        """A request has ended. A load under way ends by itself."""
        self._cancel(state.admission)
        self._withdraw_promise(state)
        self._holes.drop(request_id)
        self.room.unpark(request_id)

    def cancel_pinned(self, state: RequestOffloadState) -> None:
        """Drop the plan of a request that has not been admitted. It is looked up again."""
        self._cancel(state.admission)

    def _cancel(self, admission: Admission) -> None:
        """Release what is pinned for a request that is not admitted."""
        if admission.pinned is not None:
            self._tier.end_load(admission.pinned.load)
            admission.pinned = None

    def _room_for(self, request: Request, plan: LoadPlan) -> Room:
        return self.room.of_load(
            request.request_id, request.num_tokens, plan.boundary_tokens, plan.holes
        )

    def _takes_longer(self, plan: LoadPlan) -> bool:
        """Whether a load is estimated to take longer than computing the same tokens."""
        return self.cost.is_slower_than_computing(plan.num_bytes, plan.loaded_tokens)

    def _promise(self, state: RequestOffloadState, plan: LoadPlan) -> None:
        """Let others wait for this load, if they can hit all that it leaves on the device."""
        if not self._view.enable_caching or self._view.use_eagle or not plan.is_exact:
            return
        boundary = plan.boundary_tokens
        if any(boundary % tokens for tokens in self._layout.tokens_per_page.values()):
            return
        key = plan.prefix.key_at(boundary)
        if key not in self._promised:
            self._promised[key] = boundary
            state.promised_key = key

    def _withdraw_promise(self, state: RequestOffloadState) -> None:
        if state.promised_key is not None:
            del self._promised[state.promised_key]
            state.promised_key = None

    def _still_waits(self, admission: Admission, num_computed_tokens: int) -> bool:
        """Whether the load that a request waited for has not ended yet; asked in every step."""
        awaited = admission.awaited
        return (
            awaited is not None
            and awaited.key in self._promised
            and num_computed_tokens < awaited.boundary_tokens
            and self._clock() - awaited.since_s < MAX_PATIENCE_S
        )

    def _waits_for_other(self, admission: Admission, plan: LoadPlan) -> bool:
        """Whether another request's load will leave on the device what this request needs."""
        if not self._promised or admission.awaited is not None:
            return False  # A request waits for another load only once.
        for boundary in set(self._promised.values()):
            if plan.after_tokens < boundary <= plan.boundary_tokens:
                key = plan.prefix.key_at(boundary)
                if key in self._promised:
                    admission.awaited = Awaited(key, boundary, self._clock())
                    self._counters.joined_loads += 1
                    return True
        return False


def _report(
    request: Request, state: RequestOffloadState, admission: Admission, num_tokens: int
) -> RequestReport:
    """The report of a request that has got blocks, and loads ``num_tokens`` tokens."""
    plan = None if admission.pinned is None or not num_tokens else admission.pinned.plan
    return RequestReport(
        request.num_tokens,
        state.device_tokens,
        0 if plan is None else plan.loaded_tokens,
        0,
        0 if plan is None else plan.hole_tokens,
        0 if plan is None else len(plan.holes),
        admission.shortfall,
        admission.hole_refusal,
        admission.decision,
    )


def _note_loaded(
    state: RequestOffloadState, num_tokens: int, holes: Sequence[TokenRange], decision: Decision
) -> None:
    """Correct the report of a request whose load has brought less than the report says."""
    if state.report is not None:
        state.report = replace(
            state.report,
            host_tokens=num_tokens,
            hole_tokens=sum(hole.num_tokens for hole in holes),
            num_holes=len(holes),
            decision=decision,
        )
