# SPDX-License-Identifier: Apache-2.0
"""Loads of requests: what is found for them, what is under way, how it ends.

    match() ── a prospect: pinned ──> begin() ── under way ──> end()
       │                                │
       │ asked again, with other        │ the request was not admitted with it
       │ tokens on the device           v
       └──────────────────────────> cancelled

Where another request is loading the same prefix, `match` asks for patience: what it loads can be
hit on the device once it is there. Knows tier, layout and costs; knows no stores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vllm_ascend_kvext.connector.blended_requests import BlendedRequests
from vllm_ascend_kvext.connector.counters import ConnectorCounters
from vllm_ascend_kvext.connector.engine import Engine, Request
from vllm_ascend_kvext.connector.errors import ConnectorError
from vllm_ascend_kvext.connector.host_layout import HostLayout
from vllm_ascend_kvext.connector.load_cost import LoadCost
from vllm_ascend_kvext.connector.load_jobs import LoadJobs
from vllm_ascend_kvext.connector.messages import LoadJob
from vllm_ascend_kvext.connector.room import PoolRoom, Room
from vllm_ascend_kvext.holes.both_ends import best_split, split_hit
from vllm_ascend_kvext.holes.eligibility import HoleRefusal, why_no_holes
from vllm_ascend_kvext.holes.hole_queue import HoleQueue
from vllm_ascend_kvext.holes.host_hit import beyond_holes
from vllm_ascend_kvext.holes.span_plan import Run, union
from vllm_ascend_kvext.holes.window_blocks import DenseTable, WindowTable
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind
from vllm_ascend_kvext.store.loads import Load, LoadOutcome
from vllm_ascend_kvext.store.lookup import Hit, Shortfall
from vllm_ascend_kvext.store.tier import HostTier

LEAST_RUN_TOKENS = 64
"""Behind a hole, a shorter run is not worth a row and a load. On a CPU, a further row of a step
costs as much as 7 tokens (``benchmarks/holes/first_token.py``); an accelerator computes faster."""

MOST_PATIENCE_S = 10.0
"""How long a request waits for the load of another before it makes its own, and for blocks of its
holes, which later requests may take, before it does without."""

MOST_LOOKUPS_IN_VAIN = 16
"""So many requests are looked up in one step only to be told to wait. A lookup takes about a
millisecond, and thousands of requests may be waiting."""

MOST_FAILED_LOADS = 2
"""Of a request: then all of it is computed. Before, it is looked up again, for what is left."""

MOST_REMEMBERED_FAILURES = 4096
"""Requests of which it is known that a load failed."""


@dataclass(slots=True)
class _Prospect:
    """What was found for a request that is not admitted yet."""

    hit: Hit
    load: Load

    def is_good_for(self, local_tokens: int) -> bool:
        return self.hit.after_tokens == local_tokens and all(
            entry.state is EntryState.STORED for entry in self.load.entries
        )


class _Awaited(NamedTuple):
    """What a request waits for: the end of a load of another."""

    key: bytes
    boundary_tokens: int
    since_s: float


class _Later(NamedTuple):
    """Why a request has to wait for room.

    Attributes:
        local_tokens: What the device had.
        room_version: Of the room that its load did not find; None if it has nothing to load.
        free_blocks: That its load needs, where it is their number that it waits for; else 0.
    """

    local_tokens: int
    room_version: int | None
    free_blocks: int = 0


class LoadUnderWay(NamedTuple):
    """A load that workers make.

    Attributes:
        hit: What it loads.
        load: The pins.
        num_bytes: Of what is pinned: the transfer itself may be smaller.
        began_s: When it was handed to the workers.
    """

    hit: Hit
    load: Load
    num_bytes: int
    began_s: float


class Loads:
    """The loads of one engine.

    Args:
        engine: The scheduler's parts.
        tier: The host tier's books.
        layout: Of the pages.
        room: Of the pool.
        cost: Estimates; None makes every load.
        counters: Of the connector.
        clock: Seconds that only grow.
        holes: Where holes wait to be computed; None stops at the first one.
        blended: Requests with segments; None reuses none.
    """

    def __init__(
        self,
        engine: Engine,
        tier: HostTier,
        layout: HostLayout,
        room: PoolRoom,
        cost: LoadCost | None,
        counters: ConnectorCounters,
        clock: Callable[[], float],
        holes: HoleQueue | None = None,
        blended: BlendedRequests | None = None,
    ) -> None:
        self._engine = engine
        self._tier = tier
        self._layout = layout
        self._jobs = LoadJobs(layout, len(engine.managers))
        self._room = room
        self._cost = cost
        self._counters = counters
        self._clock = clock
        self._holes = holes
        self._blended = blended
        self._prospects: dict[str, _Prospect] = {}
        self._under_way: dict[str, LoadUnderWay] = {}
        # What can be hit on the device once a load is there: by the key of its end.
        self._expected: dict[bytes, str] = {}
        self._expected_tokens: dict[str, tuple[int, bytes]] = {}
        self._awaited: dict[str, _Awaited] = {}
        self._later: dict[str, _Later] = {}
        self._shortfalls: dict[str, Shortfall | None] = {}
        self._too_dear: set[str] = set()
        self._hole_refusals: dict[str, HoleRefusal] = {}
        self._lack_blocks_since_s: dict[str, float] = {}
        self._num_failed: dict[str, int] = {}
        self._lookups_in_vain = 0  # of the step that is being planned

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    @property
    def num_pinned(self) -> int:
        """Requests that hold pins."""
        return len(self._under_way) + len(self._prospects)

    def is_under_way(self, request_id: str) -> bool:
        return request_id in self._under_way

    def is_looked_up_again(self, request_id: str) -> bool:
        """Whether a request whose load has failed is to load what is left."""
        return 0 < self._num_failed.get(request_id, 0) < MOST_FAILED_LOADS

    def hole_tokens_of(self, request_id: str) -> int:
        """Tokens of a load under way that are computed before its end."""
        return self._under_way[request_id].hit.hole_tokens

    def tails_of(self, request_id: str) -> Entry | None:
        """The tails that a load under way reads; None if its model has none."""
        hit = self._under_way[request_id].hit
        tails = hit.exact_tails if hit.placed else hit.entries[-1]
        return tails if tails is not None and tails.piece.kind is Kind.TAILS else None

    def match(self, request: Request, local_tokens: int, may_load: bool = True) -> int | None:
        """How many tokens past those on the device can be loaded.

        What is found is pinned until `begin` or `forget`.

        Args:
            request: That is to be admitted.
            local_tokens: On the device.
            may_load: Whether anything may be loaded; always the same of one request.

        Returns:
            None if the answer has to wait: for the load of another request, or for room.
        """
        request_id = request.request_id
        self._room.release(request_id)
        # Its own load has ended, and what that left may have been taken.
        self._no_longer_expected(request_id)
        if self._still_lacks_room(request, local_tokens):
            return None
        self._later.pop(request_id, None)
        if self._blended is not None:
            self._blended.restart(request_id)
        num_tokens = self._match(request, local_tokens) if may_load else 0
        if num_tokens == 0 and self._room.of_other(request.num_tokens) is Room.LATER:
            self._later[request_id] = _Later(local_tokens, None)
            return None
        return num_tokens

    def _still_lacks_room(self, request: Request, local_tokens: int) -> bool:
        """Whether a request would get the answer that it got before; asked in every step."""
        later = self._later.get(request.request_id)
        if later is None or later.local_tokens != local_tokens:
            return False
        if later.room_version is None:
            return self._room.of_other(request.num_tokens) is Room.LATER
        self._room.keep_turn(request.request_id)
        if later.free_blocks:
            has_too_few = later.free_blocks > self._room.num_free
            return has_too_few and not self._has_waited_long(request.request_id)
        return later.room_version == self._room.version or self._room.is_behind_other(
            request.request_id
        )

    def _match(self, request: Request, local_tokens: int) -> int | None:
        request_id = request.request_id
        prospect = self._prospects.pop(request_id, None)
        if prospect is not None:
            is_good = prospect.is_good_for(local_tokens)
            # Free blocks may have become few since it was found.
            needs_more = is_good and self._holes_need_more_blocks(request, prospect.hit)
            if is_good and not (needs_more and self._has_waited_long(request_id)):
                self._prospects[request_id] = prospect
                if needs_more or self._keeps_parked_waiting():
                    return None
                if self._room_for(request, prospect.hit) is not Room.YES:
                    return None
                if self._hold_windows(request, prospect.hit):
                    return prospect.hit.num_tokens
                del self._prospects[request_id]
            self._tier.end_load(prospect.load, LoadOutcome.CANCELLED)
        if self._still_waits(request_id, local_tokens):
            return None
        self._shortfalls.pop(request_id, None)
        if request.skip_reading_prefix_cache:
            return 0
        if self._num_failed.get(request_id, 0) >= MOST_FAILED_LOADS:
            return 0
        if self._lookups_in_vain >= MOST_LOOKUPS_IN_VAIN:
            return None
        num_tokens = self._look_up(request, local_tokens)
        self._lookups_in_vain += num_tokens is None
        return num_tokens

    def _look_up(self, request: Request, local_tokens: int) -> int | None:
        request_id = request.request_id
        prefix = self._engine.prefix(request)
        # The last token is computed in any case: its output is wanted.
        hit = self._tier.look_up(prefix, request.num_tokens - 1, local_tokens)
        self._shortfalls[request_id] = hit.shortfall
        blended = self._with_segments(request, hit)
        if blended is not None:
            hit = blended
        elif self._holes is not None and request_id not in self._hole_refusals:
            hit = self._beyond_holes(request, hit)
        if hit.num_tokens <= 0:
            return 0
        if blended is not None:
            pass  # What it reuses is estimated by nobody, and awaited by nobody.
        elif self._waits_for_other(request_id, hit):
            return None
        elif self._can_split(request, hit):
            hit = self._from_both_ends(request, hit)
            if hit.num_tokens <= 0:
                return 0
        elif self._is_too_dear(request_id, hit):
            return 0
        room = self._room_for(request, hit)
        if room is Room.LATER:
            self._later[request_id] = _Later(local_tokens, self._room.version)
            return None
        if room is Room.NEVER:
            return 0
        if self._holes_need_more_blocks(request, hit):
            return None
        load = self._tier.begin_load(hit, self._tier.next_use())
        if load is None:
            return 0
        self._prospects[request_id] = _Prospect(hit, load)
        self._hold_windows(request, hit)
        return hit.num_tokens

    def _keeps_parked_waiting(self) -> bool:
        """Whether a request that was not admitted with its load stands before parked ones.

        vLLM 0.23 admits a load only beside all that parked requests still need, and tries nobody
        behind one that it cannot admit: where nothing runs, the engine would stand still.
        """
        return self._room.num_parked > 0 and not self._engine.num_running()

    def _hold_windows(self, request: Request, hit: Hit) -> bool:
        """Keep what a request with segments reads of windows on the device until it begins.

        Returns:
            False if it is not there any more.
        """
        if self._blended is None or self._holes is None or self._holes.windows is None:
            return True
        windows = self._holes.windows
        if not hit.placed or hit.exact_tails is not None or windows.is_held(request.request_id):
            return True
        cached = self._blended.cached_windows(request, hit.exact_tokens)
        if cached is not None:
            windows.hold(request.request_id, cached)
        return cached is not None

    def end_step(self) -> None:
        """A step is planned: who has not begun in it is asked about again."""
        self._lookups_in_vain = 0
        if self._holes is not None and self._holes.windows is not None:
            self._holes.windows.release_held()

    def _with_segments(self, request: Request, hit: Hit) -> Hit | None:
        """The hit with segments behind it, if there are some, and it could have room."""
        if self._blended is None:
            return None
        blended = self._blended.find(request, hit)
        if blended is None:
            return None
        if self._has_no_room(request, blended):
            self._blended.refuse_for_room(request.request_id)
            return None
        return blended

    def _beyond_holes(self, request: Request, hit: Hit) -> Hit:
        """The hit that goes on behind holes, if it costs less than it saves and could have room."""
        beyond = beyond_holes(self._tier, hit, request.num_tokens, LEAST_RUN_TOKENS)
        if not beyond.holes:
            return hit
        refusal = why_no_holes(request)
        if refusal is None and self._has_no_room(request, beyond):
            refusal = HoleRefusal.ROOM
        if refusal is None and self._takes_longer(beyond):
            refusal = HoleRefusal.TOO_DEAR
        if refusal is None:
            return beyond
        self._hole_refusals[request.request_id] = refusal
        return hit

    def _can_split(self, request: Request, hit: Hit) -> bool:
        """Whether the beginning can be computed while the rest is loaded, at nobody's cost."""
        return (
            self._holes is not None
            and self._cost is not None
            and why_no_holes(request) is None
            and (hit.after_tokens == 0 or self._holes.windows is None)
            and hit.after_tokens % self._layout.unit_tokens == 0
            and not self._engine.num_running()
            and not self._under_way
        )

    def _from_both_ends(self, request: Request, hit: Hit) -> Hit:
        """The hit with that beginning left out; an empty one if computing all of it is fastest."""
        assert self._cost is not None
        split = best_split(hit, self._cost)
        if split is None or split.tokens == hit.after_tokens:
            return hit
        if split.tokens == hit.boundary_tokens:
            self._count_too_dear(request.request_id)
            return replace(
                hit, boundary_tokens=hit.after_tokens, entries=(), holes=(), hole_tails=()
            )
        from_both_ends = split_hit(hit, split.tokens)
        # The windows of the beginning take blocks that the load alone does not.
        if self._room_for(request, from_both_ends) is Room.NEVER:
            return hit
        return from_both_ends

    def _holes_need_more_blocks(self, request: Request, hit: Hit) -> bool:
        """Whether there are too few free blocks for the request and the windows of its holes.

        Upstream asks only for those of the request, and takes them at once.
        """
        request_id = request.request_id
        free_blocks = self._too_few_blocks(request, hit)
        if not free_blocks:
            self._lack_blocks_since_s.pop(request_id, None)
            return False
        self._later[request_id] = _Later(hit.after_tokens, self._room.version, free_blocks)
        self._lack_blocks_since_s.setdefault(request_id, self._clock())
        return True

    def _too_few_blocks(self, request: Request, hit: Hit) -> int:
        """Free blocks that a request and the windows of its holes need; 0 if there are enough."""
        windows = self._holes.windows if self._holes is not None else None
        has_dense_windows = bool(hit.placed) and windows is not None
        if not any(hit.hole_tails) and not has_dense_windows:
            return 0
        free_blocks = self._room.blocks_of_load(request.num_tokens, hit.boundary_tokens, hit.holes)
        if windows is not None and has_dense_windows:
            free_blocks += windows.num_blocks(hit.exact_tokens, hit.boundary_tokens)
        return free_blocks if free_blocks > self._room.num_free else 0

    def _has_no_room(self, request: Request, hit: Hit) -> bool:
        """Whether holes wait in vain: blocks never suffice, or have been too few for long."""
        free_blocks = self._too_few_blocks(request, hit)
        return (
            free_blocks > self._room.num_blocks
            or (free_blocks > 0 and self._has_waited_long(request.request_id))
            or self._room_for(request, hit) is Room.NEVER
        )

    def _has_waited_long(self, request_id: str) -> bool:
        """Whether the windows of a request's holes have lacked blocks for a long time."""
        since_s = self._lack_blocks_since_s.get(request_id)
        return since_s is not None and self._clock() - since_s >= MOST_PATIENCE_S

    def begin(
        self, request_id: str, num_tokens: int, block_ids: tuple[list[int], ...]
    ) -> LoadJob | None:
        """A request has got its blocks.

        Args:
            num_tokens: To load; 0 if nothing is.
            block_ids: By KV cache group, from the request's first token on.

        Raises:
            ConnectorError: If this was not the answer to `match`.
        """
        self._awaited.pop(request_id, None)
        self._later.pop(request_id, None)
        self._lack_blocks_since_s.pop(request_id, None)
        self._no_longer_expected(request_id)
        prospect = self._prospects.pop(request_id, None)
        if prospect is not None and num_tokens == 0:
            self._tier.end_load(prospect.load, LoadOutcome.CANCELLED)
        if request_id in self._shortfalls:
            shortfall = self._shortfalls.pop(request_id)
            if request_id not in self._num_failed:  # Else it has been counted.
                self._tier.count_shortfall(shortfall)
        if request_id in self._hole_refusals:
            self._counters.hole_refusals[self._hole_refusals.pop(request_id)] += 1
        self._too_dear.discard(request_id)
        if num_tokens == 0:
            self._room.withdraw(request_id)
            return None
        if prospect is None or prospect.hit.num_tokens != num_tokens:
            found = prospect.hit.num_tokens if prospect else 0
            raise ConnectorError(
                f"request {request_id}: expected to load {found} tokens, as matched, found "
                f"{num_tokens}; the scheduler has to use what get_num_new_matched_tokens said"
            )
        hit = prospect.hit
        num_bytes = _num_bytes(hit)
        self._under_way[request_id] = LoadUnderWay(hit, prospect.load, num_bytes, self._clock())
        self._expect(request_id, hit)
        request = self._engine.requests[request_id]
        num_request_tokens = request.num_tokens
        self._room.park(request_id, num_request_tokens, hit.boundary_tokens, hit.holes)
        if hit.placed and self._blended is not None:
            dense = self._begin_dense(request_id, hit, block_ids)
            self._blended.begin(request, hit)
            return self._jobs.plan_blended(request_id, hit, block_ids, dense)
        tables = self._begin_holes(request_id, hit)
        return self._jobs.plan(request_id, hit, block_ids, tables, self._may_lack(request_id))

    def _begin_dense(
        self, request_id: str, hit: Hit, block_ids: tuple[list[int], ...]
    ) -> Mapping[int, DenseTable]:
        """By KV cache group with windows; nothing where there are none, or no blocks for them."""
        assert self._holes is not None
        probe = None
        if self._blended is not None:
            probe = self._blended.probe(self._engine.requests[request_id], hit)
        if not hit.holes and self._holes.windows is None and probe is None:
            return {}
        holes = [Run(*hole) for hole in hit.holes]
        dense = self._holes.begin_dense(
            request_id, holes, hit.after_tokens, hit.exact_tokens, block_ids, probe
        )
        return dense or {}

    def _begin_holes(self, request_id: str, hit: Hit) -> list[dict[int, WindowTable]]:
        if not hit.holes or self._holes is None:
            return []
        return self._holes.begin(request_id, [Run(*hole) for hole in hit.holes], hit.after_tokens)

    def _may_lack(self, request_id: str) -> bool:
        """Whether what a load fails to bring is computed as a hole at once.

        Not where a hole reads windows, for which it has no blocks yet, from the last tails before
        it, which may be what failed. There the request is looked up again.
        """
        return (
            self._holes is not None
            and self._holes.windows is None
            and self._engine.recomputes_failed_loads
            and why_no_holes(self._engine.requests[request_id]) is None
        )

    def end(
        self, request_id: str, has_failed: bool, unreadable: Collection[int] = ()
    ) -> Sequence[Run]:
        """All workers have ended a load; of another connector's nothing is known.

        Args:
            has_failed: The request has to begin again.
            unreadable: Where in host memory that begins which some worker could not read.

        Returns:
            Tokens that the request has to have computed as holes.
        """
        under_way = self._under_way.pop(request_id, None)
        if under_way is None:
            return []
        hit = under_way.hit
        failed = {entry for entry in under_way.load.entries if entry.offset_bytes in unreadable}
        if has_failed:
            self._tier.end_load(under_way.load, LoadOutcome.FAILED, failed)
            if self._holes is not None:
                self._holes.drop(request_id)
            # It holds its blocks until the scheduler looks at it: it stays parked.
            self._no_longer_expected(request_id)
            if self._blended is not None:
                self._blended.restart(request_id)
            is_all = len(failed) == len(under_way.load.entries)
            self._note_failed(request_id, MOST_FAILED_LOADS if is_all else 1)
            return []
        runs = union(Run(*tokens) for entry, *tokens in hit.loaded_rows if entry in failed)
        self._tier.end_load(under_way.load, LoadOutcome.LOADED, failed)
        loaded = replace(hit, holes=union([*map(Run._make, hit.holes), *runs]))
        self._counters.hit_tokens += loaded.loaded_tokens
        self._counters.hit_requests += 1
        self._counters.holes += len(loaded.holes)
        self._counters.behind_hole_tokens += loaded.behind_hole_tokens
        if self._cost is not None and not runs:
            self._cost.note_load(under_way.num_bytes, self._clock() - under_way.began_s)
        return runs if self._is_live(request_id) else []

    def forget(self, request_id: str) -> None:
        """A request has ended. A load under way ends by itself."""
        prospect = self._prospects.pop(request_id, None)
        if prospect is not None:
            self._tier.end_load(prospect.load, LoadOutcome.CANCELLED)
        self._no_longer_expected(request_id)
        if self._holes is not None:
            self._holes.drop(request_id)
        self._awaited.pop(request_id, None)
        self._shortfalls.pop(request_id, None)
        self._hole_refusals.pop(request_id, None)
        self._lack_blocks_since_s.pop(request_id, None)
        self._room.unpark(request_id)
        self._later.pop(request_id, None)
        self._too_dear.discard(request_id)
        self._num_failed.pop(request_id, None)

    def _room_for(self, request: Request, hit: Hit) -> Room:
        return self._room.of_load(
            request.request_id, request.num_tokens, hit.boundary_tokens, hit.holes
        )

    def _is_too_dear(self, request_id: str, hit: Hit) -> bool:
        if not self._takes_longer(hit):
            return False
        self._count_too_dear(request_id)
        return True

    def _takes_longer(self, hit: Hit) -> bool:
        """Whether a load is estimated to take longer than computing the same tokens."""
        return self._cost is not None and self._cost.is_too_dear(_num_bytes(hit), hit.loaded_tokens)

    def _count_too_dear(self, request_id: str) -> None:
        if request_id not in self._too_dear:  # asked in every step while it waits
            self._too_dear.add(request_id)
            self._counters.too_dear_loads += 1

    def _expect(self, request_id: str, hit: Hit) -> None:
        """Others may wait for what this load leaves on the device, if they can hit all of it."""
        if not self._engine.caches_prefixes or self._engine.looks_ahead or hit.placed:
            return
        boundary = hit.boundary_tokens
        if any(boundary % tokens for tokens in self._layout.tokens_per_page.values()):
            return
        key = hit.prefix.key_at(boundary)
        if key not in self._expected:
            self._expected[key] = request_id
            self._expected_tokens[request_id] = boundary, key

    def _no_longer_expected(self, request_id: str) -> None:
        expected = self._expected_tokens.pop(request_id, None)
        if expected is not None:
            del self._expected[expected[1]]

    def _still_waits(self, request_id: str, local_tokens: int) -> bool:
        """Whether what a request waited for is still to come; asked in every step."""
        awaited = self._awaited.get(request_id)
        return (
            awaited is not None
            and awaited.key in self._expected
            and local_tokens < awaited.boundary_tokens
            and self._clock() - awaited.since_s < MOST_PATIENCE_S
        )

    def _waits_for_other(self, request_id: str, hit: Hit) -> bool:
        """Whether the load of another will leave on the device what this one needs."""
        if not self._expected or request_id in self._awaited:
            return False  # Once is enough.
        for boundary in {tokens for tokens, _ in self._expected_tokens.values()}:
            if hit.after_tokens < boundary <= hit.boundary_tokens:
                key = hit.prefix.key_at(boundary)
                if key in self._expected:
                    self._awaited[request_id] = _Awaited(key, boundary, self._clock())
                    self._counters.joined_loads += 1
                    return True
        return False

    def _note_failed(self, request_id: str, num_loads: int) -> None:
        if not self._is_live(request_id):
            return  # `forget` has been called
        self._num_failed[request_id] = self._num_failed.get(request_id, 0) + num_loads
        if len(self._num_failed) > MOST_REMEMBERED_FAILURES:
            del self._num_failed[next(iter(self._num_failed))]

    def _is_live(self, request_id: str) -> bool:
        request = self._engine.requests.get(request_id)
        return request is not None and not request.is_finished()


def _num_bytes(hit: Hit) -> int:
    return sum(entry.num_bytes for entry in hit.all_entries)
