# SPDX-License-Identifier: Apache-2.0
"""Stores that workers make: which blocks they read, and when all workers have ended one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vllm_ascend_kvext.connector.common.block_references import BlockReferences
from vllm_ascend_kvext.connector.common.scheduler_view import Block
from vllm_ascend_kvext.layout.model import NULL_PAGE
from vllm_ascend_kvext.layout.transfer_plan import TablePart

Pages = dict[tuple[int, int], Block]
"""By KV cache group and page of the request."""

_NUMBERS = itertools.count()  # Of jobs of all kinds, which workers report in the same way.


@dataclass(slots=True)
class _UnderWay:
    """A store that so many workers have not ended; its blocks are referenced for it."""

    blocks: Sequence[Block]
    on_end: Callable[[bool], None]
    workers_left: int
    has_failed: bool = False


class StoreJobs:
    """The stores under way of one engine, each of which all its workers make; or other jobs."""

    def __init__(self, references: BlockReferences, num_workers: int) -> None:
        self._references = references
        self.num_workers = num_workers
        self._under_way: dict[int, _UnderWay] = {}

    def __len__(self) -> int:
        """Stores that have not ended on all workers."""
        return len(self._under_way)

    def begin(self, blocks: Sequence[Block], on_end: Callable[[bool], None]) -> int:
        """A store is handed to the workers; its number, which no other has.

        Args:
            blocks: Referenced for it; released when it ends.
            on_end: Called then with whether it has failed.
        """
        number = next(_NUMBERS)
        self._under_way[number] = _UnderWay(blocks, on_end, self.num_workers)
        return number

    def end(self, number: int, num_workers: int, has_failed: bool) -> None:
        """So many workers have ended a store, or what is none; a failure counts for all."""
        job = self._under_way.get(number)
        if job is None:
            return
        job.workers_left -= num_workers
        job.has_failed |= has_failed
        if job.workers_left > 0:
            return  # others still read the pages, and write to host memory
        del self._under_way[number]
        self._references.release(job.blocks)
        job.on_end(job.has_failed)

    def abandon(self) -> None:
        """Let go of the pages of all stores, whose bytes are then worth nothing."""
        for job in self._under_way.values():
            self._references.release(job.blocks)
            job.blocks, job.has_failed = [], True


def table_parts(pages: Mapping[tuple[int, int], Block], num_groups: int) -> tuple[TablePart, ...]:
    """Parts of a block table that have some pages; null between them."""
    parts = []
    for group in range(num_groups):
        of_group = {page: block for (of, page), block in pages.items() if of == group}
        if not of_group:
            parts.append(TablePart(0, ()))
            continue
        first, end = min(of_group), max(of_group) + 1
        ids = [
            of_group[page].block_id if page in of_group else NULL_PAGE for page in range(first, end)
        ]
        parts.append(TablePart(first, tuple(ids)))
    return tuple(parts)
