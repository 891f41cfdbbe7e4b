# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Stores that are planned: which of them begin, and which give way to a request that lacks blocks.

A store holds references to its blocks from its planning on::

    planned ──> begun ──> ended
       └──> gave way

The workers are told of a store when it begins, and may read its pages from then on. So its blocks
stay until all workers have ended it. A store that has not begun can give way at once. Workers copy
one store after the other, so the stores that begin are only those that they copy in a few steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from vllm_ascend_kvext.connector.common.block_references import BlockReferences
from vllm_ascend_kvext.connector.common.scheduler_view import Request
from vllm_ascend_kvext.connector.scheduler.request_state import StoreProgress
from vllm_ascend_kvext.connector.scheduler.transfer_cost import TransferCost
from vllm_ascend_kvext.connector.scheduler.worker_jobs import Pages
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk
from vllm_ascend_kvext.store.entries import Entry
from vllm_ascend_kvext.store.prefix import HashedPrefix

MAX_STEPS_OF_COPIES = 4
"""Stores begin while the workers can copy all begun stores in about this many steps.

With fewer, workers might wait for the next step before they get the next store.
"""

MAX_SHARE_OF_COMPUTING = 1 / 8
"""A store is worth a wait if the wait costs less than this share of computing the store's tokens.

The cost of a wait is its time multiplied by the share of the pool that the store holds, or by 1 if
no request runs. So stores that bring no hit slow an engine down by this share at most.
"""

MAX_SHARE_OF_TIME = 1 / 64
"""A store is also worth a wait if no store has begun for so long that the wait costs less than this
share of that time.

So some stores are made however long requests lack blocks, and a speed that has changed is noticed.
"""

MAX_ASKED = 256
"""The number of stores that are asked to give way to a request that waits.

Asking one takes about 3 us. The latest stores are asked. Earlier ones are copied first, or are
asked when the later ones are gone.
"""

MIN_FREE_SHARE = 1 / 4
"""While requests run, a store that is not worth a wait begins only if this share of the pool is
free."""


class StoredEntry(NamedTuple):
    """An entry whose store is planned or begun, and the request that it is stored for."""

    entry: Entry
    prefix: HashedPrefix
    request: Request
    progress: StoreProgress


@dataclass(slots=True, eq=False)
class PlannedStore:
    """What is stored of one request after one step.

    Attributes:
        num_bytes: The bytes of all chunks on one worker.
        num_tokens: The tokens that do not have to be computed if the store is hit.
    """

    chunks: list[PlacedChunk] = field(default_factory=list)
    pages: Pages = field(default_factory=dict)
    stored: list[StoredEntry] = field(default_factory=list)
    num_bytes: int = 0
    num_tokens: int = 0


_StoreKey = tuple[StoreProgress, int]
"""The request of a store, and the step in which it was planned."""


class StoreQueue:
    """The stores of one engine that are planned, in the order of their planning.

    Args:
        num_blocks: The number of blocks of the pool.
        num_running: The number of requests that run.
        on_waiting: Called with whether stores are planned, when that changes.
        clock: Seconds that only grow.

    Attributes:
        lacks_blocks: Whether a request lacked blocks in the latest step.
        is_idle: Whether the latest step computes nothing, for example because the scheduler is
            paused. A pause waits until the engine has no more work, and stores are work.
        step_s: The time of the latest step that computed something, in seconds.
    """

    def __init__(
        self,
        references: BlockReferences,
        cost: TransferCost,
        num_blocks: int,
        num_running: Callable[[], int],
        on_waiting: Callable[[bool], object],
        clock: Callable[[], float],
    ) -> None:
        self._references = references
        self._cost = cost
        self._num_blocks = num_blocks
        self._num_running = num_running
        self._on_waiting = on_waiting
        self._clock = clock
        self._last_begun_s = clock()
        # By request and step. A new request may have the id of a request that has just ended, so
        # the progress stands for the request.
        self._planned: dict[_StoreKey, PlannedStore] = {}
        # The stores of what lies behind rows, by the key at the end of these rows.
        self._behind: dict[bytes, dict[_StoreKey, None]] = {}
        self._num_steps = 0
        self._num_begun = 0
        self._begun_bytes = 0
        self._planned_bytes = 0
        self.lacks_blocks = False
        self.is_idle = False
        self.step_s = 0.0

    def __len__(self) -> int:
        return len(self._planned)

    def may_plan(self, num_blocks: int, num_bytes: int, num_tokens: int) -> bool:
        """Whether a store may be planned. If requests lack blocks, most stores would give way."""
        ahead_bytes = self._begun_bytes + self._planned_bytes + num_bytes
        return (
            not self.lacks_blocks
            or not self._cost.has_stored
            or self._is_worth_a_wait(ahead_bytes, num_blocks, num_tokens)
        )

    def add(
        self,
        pages: Pages,
        chunk: PlacedChunk,
        stored: StoredEntry,
        num_bytes: int,
        num_tokens: int,
    ) -> None:
        """Plan the store of a chunk. Chunks of one request and one step are one store."""
        if not self._planned:
            self._on_waiting(True)
        key = stored.progress, self._num_steps
        store = self._planned.setdefault(key, PlannedStore())
        if stored.entry.key_before is not None:
            self._behind.setdefault(stored.entry.key_before, {})[key] = None
        self._references.take([block for key, block in pages.items() if key not in store.pages])
        store.pages.update(pages)
        store.chunks.append(chunk)
        store.stored.append(stored)
        store.num_bytes += num_bytes
        store.num_tokens += num_tokens
        self._planned_bytes += num_bytes

    def num_bytes_of(self, progress: StoreProgress) -> int:
        """The bytes of the stores of a request that have not begun."""
        planned = self._planned.items()
        return sum(store.num_bytes for (of, _), store in planned if of is progress)

    def withdraw(self, progress: StoreProgress) -> list[PlannedStore]:
        """Take back the stores of a request that have not begun, and release their blocks."""
        return [self._drop(key) for key in list(self._planned) if key[0] is progress]

    def withdraw_all(self) -> list[PlannedStore]:
        """Take back all stores that have not begun, and release their blocks."""
        return [self._drop(key) for key in list(self._planned)]

    def begin(self) -> Iterator[PlannedStore]:
        """End the planning of a step. Yields the stores that begin with it, in their order.

        The blocks of a store stay referenced until the caller releases them.
        """
        self._num_steps += 1
        for key, store in list(self._planned.items()):
            begun_bytes = self._begun_bytes + store.num_bytes
            if self._num_begun and not self._is_copied_soon(begun_bytes):
                break
            if not self._may_begin(store, begun_bytes):
                break
            self._forget(key)
            self._num_begun += 1
            self._begun_bytes = begun_bytes
            self._last_begun_s = self._clock()
            yield store

    def note_ended(self, store: PlannedStore) -> None:
        """All workers have ended a store."""
        self._num_begun -= 1
        self._begun_bytes -= store.num_bytes

    def give_way(self, to_running: bool) -> list[PlannedStore]:
        """Take back one store, so that blocks become free for a request; the latest store first.

        Stores of what lies behind its rows go with it: behind a gap, they would be of no use. At
        most `MAX_ASKED` stores are asked to give way to a request that waits.

        Args:
            to_running: Whether the request runs. It would be preempted, so all stores give way to
                it. Only stores that are not worth a wait give way to a request that waits.

        Returns:
            The stores, whose blocks are released; none if no store gives way. If no request runs,
            other stores may still hold all of these blocks.
        """
        ahead_bytes = self._begun_bytes + self._planned_bytes
        is_idle = not self._num_running()
        asked: Iterable[tuple[_StoreKey, PlannedStore]] = reversed(self._planned.items())
        if not to_running:
            asked = islice(asked, MAX_ASKED)
        for key, store in asked:
            is_kept = not to_running and self._is_worth_a_wait(
                ahead_bytes, len(store.pages), store.num_tokens
            )
            ahead_bytes -= store.num_bytes
            if is_kept:
                continue
            # A request that runs has most blocks of its stores itself. If none runs, two stores may
            # have the same blocks, which become free with the second one.
            if is_idle or any(block.ref_cnt == 1 for block in store.pages.values()):
                return [self._drop(each) for each in self._with_behind(key)]
        return []

    def _with_behind(self, first: _StoreKey) -> list[_StoreKey]:
        """A store, and the stores of rows and tails behind those of it."""
        found = {first: None}
        following = [first]
        while following:
            for each in self._planned[following.pop(0)].stored:
                for unit in each.entry.keys:
                    for key in self._behind.get(unit, ()):
                        if key not in found:
                            found[key] = None
                            following.append(key)
        return list(found)

    def _drop(self, key: _StoreKey) -> PlannedStore:
        store = self._forget(key)
        self._references.release(list(store.pages.values()))
        return store

    def _forget(self, key: _StoreKey) -> PlannedStore:
        store = self._planned.pop(key)
        self._planned_bytes -= store.num_bytes
        for each in store.stored:
            key_before = each.entry.key_before
            if key_before is not None and key in self._behind.get(key_before, ()):
                del self._behind[key_before][key]
                if not self._behind[key_before]:
                    del self._behind[key_before]
        if not self._planned:
            self._on_waiting(False)
        return store

    def _may_begin(self, store: PlannedStore, begun_bytes: int) -> bool:
        """Whether a store may hold its blocks until it ends, whatever comes.

        Args:
            begun_bytes: The bytes of the store, and of all stores that have begun.
        """
        if not self._cost.has_stored:
            return True  # No other store has begun, and this one shows how fast copies are.
        if self._is_worth_a_wait(begun_bytes, len(store.pages), store.num_tokens):
            return True
        has_room = self._references.num_free >= MIN_FREE_SHARE * self._num_blocks
        is_idle = self.is_idle or not self._num_running()
        return not self.lacks_blocks and (has_room or is_idle)

    def _is_copied_soon(self, num_bytes: int) -> bool:
        return self._cost.store_s(num_bytes) <= MAX_STEPS_OF_COPIES * self.step_s

    def _is_worth_a_wait(self, ahead_bytes: int, num_blocks: int, num_tokens: int) -> bool:
        """Whether a request may wait until all of ``ahead_bytes`` are copied.

        Args:
            ahead_bytes: The bytes of the store, and of all stores that end before it.
            num_blocks: The blocks that the store holds.
            num_tokens: Its tokens.
        """
        wait_s = self._cost.store_s(ahead_bytes)
        if wait_s <= self.step_s:
            return True
        share = num_blocks / self._num_blocks if self._num_running() else 1.0
        # Before computing is measured, it counts as free.
        compute_s = self._cost.compute_s(num_tokens, 0.0)
        quiet_s = self._clock() - self._last_begun_s
        return wait_s * share <= max(
            MAX_SHARE_OF_COMPUTING * compute_s, MAX_SHARE_OF_TIME * quiet_s
        )
