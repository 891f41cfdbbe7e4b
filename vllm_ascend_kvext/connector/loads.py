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

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from vllm_ascend_kvext.connector.counters import ConnectorCounters
from vllm_ascend_kvext.connector.engine import Engine, Request
from vllm_ascend_kvext.connector.errors import ConnectorError
from vllm_ascend_kvext.connector.host_layout import HostLayout
from vllm_ascend_kvext.connector.load_cost import LoadCost
from vllm_ascend_kvext.connector.messages import LoadJob
from vllm_ascend_kvext.connector.room import PoolRoom, Room
from vllm_ascend_kvext.holes.eligibility import can_have_holes
from vllm_ascend_kvext.holes.hole_queue import HoleQueue
from vllm_ascend_kvext.holes.host_hit import beyond_holes
from vllm_ascend_kvext.holes.span_plan import Run
from vllm_ascend_kvext.layout.row_map import StoredChunk
from vllm_ascend_kvext.layout.rows import TokenRange
from vllm_ascend_kvext.layout.transfer_plan import TablePart
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind
from vllm_ascend_kvext.store.loads import Load, LoadOutcome
from vllm_ascend_kvext.store.lookup import Hit, Shortfall
from vllm_ascend_kvext.store.tier import HostTier

LEAST_RUN_TOKENS = 64
"""Behind a hole, a shorter run is not worth a row of a step."""

MOST_PATIENCE_S = 10.0
"""How long a request waits for the load of another before it makes its own."""

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
    """

    local_tokens: int
    room_version: int | None


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
    ) -> None:
        self._engine = engine
        self._tier = tier
        self._layout = layout
        self._room = room
        self._cost = cost
        self._counters = counters
        self._clock = clock
        self._holes = holes
        self._prospects: dict[str, _Prospect] = {}
        self._under_way: dict[str, LoadUnderWay] = {}
        # What can be hit on the device once a load is there: by the key of its end.
        self._expected: dict[bytes, str] = {}
        self._expected_tokens: dict[str, tuple[int, bytes]] = {}
        self._awaited: dict[str, _Awaited] = {}
        self._later: dict[str, _Later] = {}
        self._shortfalls: dict[str, Shortfall | None] = {}
        self._too_dear: set[str] = set()
        self._failed: dict[str, None] = {}

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    @property
    def num_pinned(self) -> int:
        """Requests that hold pins."""
        return len(self._under_way) + len(self._prospects)

    def is_under_way(self, request_id: str) -> bool:
        return request_id in self._under_way

    def tails_of(self, request_id: str) -> Entry | None:
        """The tails that a load under way reads; None if its model has none."""
        tails = self._under_way[request_id].hit.entries[-1]
        return tails if tails.piece.kind is Kind.TAILS else None

    def match(self, request: Request, local_tokens: int) -> int | None:
        """How many tokens past those on the device can be loaded.

        What is found is pinned until `begin` or `forget`.

        Returns:
            None if the answer has to wait: for the load of another request, or for room.
        """
        request_id = request.request_id
        self._room.release(request_id)
        if self._still_lacks_room(request, local_tokens):
            return None
        self._later.pop(request_id, None)
        num_tokens = self._match(request, local_tokens)
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
        return later.room_version == self._room.version

    def _match(self, request: Request, local_tokens: int) -> int | None:
        request_id = request.request_id
        prospect = self._prospects.pop(request_id, None)
        if prospect is not None:
            if prospect.is_good_for(local_tokens):
                self._prospects[request_id] = prospect
                has_room = self._room_for(request, prospect.hit) is Room.YES
                return prospect.hit.num_tokens if has_room else None
            self._tier.end_load(prospect.load, LoadOutcome.CANCELLED)
        if self._still_waits(request_id, local_tokens):
            return None
        self._shortfalls.pop(request_id, None)
        if request.skip_reading_prefix_cache or request_id in self._failed:
            return 0
        prefix = self._engine.prefix(request)
        # The last token is computed in any case: its output is wanted.
        hit = self._tier.look_up(prefix, request.num_tokens - 1, local_tokens)
        self._shortfalls[request_id] = hit.shortfall
        if self._holes is not None and can_have_holes(request):
            hit = beyond_holes(self._tier, hit, request.num_tokens, LEAST_RUN_TOKENS)
        if hit.num_tokens <= 0:
            return 0
        if self._waits_for_other(request_id, hit):
            return None
        if self._is_too_dear(request_id, hit):
            return 0
        room = self._room_for(request, hit)
        if room is Room.LATER:
            self._later[request_id] = _Later(local_tokens, self._room.version)
            return None
        if room is Room.NEVER:
            return 0
        load = self._tier.begin_load(hit, self._tier.next_use())
        if load is None:
            return 0
        self._prospects[request_id] = _Prospect(hit, load)
        return hit.num_tokens

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
        self._no_longer_expected(request_id)
        prospect = self._prospects.pop(request_id, None)
        if prospect is not None and num_tokens == 0:
            self._tier.end_load(prospect.load, LoadOutcome.CANCELLED)
        if request_id in self._shortfalls:
            self._tier.count_shortfall(self._shortfalls.pop(request_id))
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
        num_request_tokens = self._engine.requests[request_id].num_tokens
        self._room.park(request_id, num_request_tokens, hit.boundary_tokens)
        if hit.holes and self._holes is not None:
            self._holes.begin(request_id, [Run(*hole) for hole in hit.holes], hit.after_tokens)
        return self._job(request_id, hit, block_ids)

    def end(self, request_id: str, has_failed: bool) -> None:
        """All workers have ended a load; of another connector's nothing is known."""
        under_way = self._under_way.pop(request_id, None)
        if under_way is None:
            return
        outcome = LoadOutcome.FAILED if has_failed else LoadOutcome.LOADED
        if not has_failed:
            self._counters.hit_tokens += under_way.hit.loaded_tokens
            self._counters.hit_requests += 1
        self._tier.end_load(under_way.load, outcome)
        if has_failed:
            if self._holes is not None:
                self._holes.drop(request_id)
            # It holds its blocks until the scheduler looks at it: it stays parked.
            self._no_longer_expected(request_id)
            self._remember_failure(request_id)
        elif self._cost is not None:
            self._cost.note_load(under_way.num_bytes, self._clock() - under_way.began_s)

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
        self._room.unpark(request_id)
        self._later.pop(request_id, None)
        self._too_dear.discard(request_id)
        self._failed.pop(request_id, None)

    def _job(self, request_id: str, hit: Hit, block_ids: tuple[list[int], ...]) -> LoadJob:
        tokens = TokenRange(hit.after_tokens, hit.boundary_tokens)
        holes = tuple(TokenRange(first, end) for first, end in hit.holes)
        return LoadJob(request_id, tokens, self._stored(hit), self._parts(tokens, block_ids), holes)

    def _stored(self, hit: Hit) -> tuple[StoredChunk, ...]:
        """Rows that a later entry has, too, are those of another prefix in the earlier one::

        found by the key at 8      rows 0 ── 8 ── 16    of another request
        found by the key at 24          rows 8 ──────── 24
        """
        stored = []
        for entry, following in itertools.zip_longest(hit.entries, hit.entries[1:]):
            row_map = entry.row_map
            if following is not None and following.piece.kind is Kind.ROWS:
                first_tokens = following.piece.first_tokens
                if first_tokens < entry.piece.end_tokens:
                    row_map = self._layout.rows_before(row_map, first_tokens)
            stored.append(StoredChunk(row_map, entry.offset_bytes))
        return tuple(stored)

    def _parts(self, tokens: TokenRange, block_ids: tuple[list[int], ...]) -> tuple[TablePart, ...]:
        parts = []
        for group, ids in enumerate(block_ids):
            tokens_per_page = self._layout.tokens_per_page.get(group)
            first_page = tokens.first // tokens_per_page if tokens_per_page else len(ids)
            parts.append(TablePart(first_page, tuple(ids[first_page:])))
        return tuple(parts)

    def _room_for(self, request: Request, hit: Hit) -> Room:
        return self._room.of_load(request.request_id, request.num_tokens, hit.boundary_tokens)

    def _is_too_dear(self, request_id: str, hit: Hit) -> bool:
        if self._cost is None or not self._cost.is_too_dear(_num_bytes(hit), hit.loaded_tokens):
            return False
        if request_id not in self._too_dear:  # asked in every step while it waits
            self._too_dear.add(request_id)
            self._counters.too_dear_loads += 1
        return True

    def _expect(self, request_id: str, hit: Hit) -> None:
        """Others may wait for what this load leaves on the device, if they can hit all of it."""
        if not self._engine.caches_prefixes or self._engine.looks_ahead:
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

    def _remember_failure(self, request_id: str) -> None:
        request = self._engine.requests.get(request_id)
        if request is None or request.is_finished():
            return  # `forget` has been called
        self._failed[request_id] = None
        if len(self._failed) > MOST_REMEMBERED_FAILURES:
            del self._failed[next(iter(self._failed))]


def _num_bytes(hit: Hit) -> int:
    return sum(entry.num_bytes for entry in hit.entries)
