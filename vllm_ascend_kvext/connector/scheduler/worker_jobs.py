# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Jobs that all workers of an engine do: the blocks that they read, and the end of each job.

A job is a store of pages, or a job of a secondary tier. Workers report both by number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vllm_ascend_kvext.connector.common.block_references import BlockReferences
from vllm_ascend_kvext.connector.common.scheduler_view import Block
from vllm_ascend_kvext.layout.model import NULL_PAGE
from vllm_ascend_kvext.layout.transfer_plan import TablePart

Pages = dict[tuple[int, int], Block]
"""The blocks of a request, by KV cache group and page."""


@dataclass(slots=True)
class _UnderWay:
    """A job under way, which ``workers_left`` workers have not ended yet.

    Attributes:
        blocks: The blocks that are referenced for it; None if it reads no pages.
    """

    on_end: Callable[[bool], None]
    blocks: Sequence[Block] | None
    workers_left: int
    has_failed: bool = False


class WorkerJobs:
    """The jobs under way of one engine. This object gives all job numbers of the engine.

    Attributes:
        num_workers: The number of workers. All of them do each job.
        num_stores: The number of jobs under way that read pages.
    """

    def __init__(self, references: BlockReferences, num_workers: int) -> None:
        self._references = references
        self.num_workers = num_workers
        self.num_stores = 0
        self._numbers = itertools.count()
        self._under_way: dict[int, _UnderWay] = {}

    def begin_store(self, blocks: Sequence[Block], on_end: Callable[[bool], None]) -> int:
        """A store of pages is handed to the workers.

        Args:
            blocks: The blocks that are referenced for the store. They are released when the store
                ends.
            on_end: Called at the end, with whether the job has failed.

        Returns:
            The number of the job.
        """
        self.num_stores += 1
        return self._begin(blocks, on_end)

    def begin(self, on_end: Callable[[bool], None]) -> int:
        """A job that reads no pages is handed to the workers. See `begin_store`."""
        return self._begin(None, on_end)

    def _begin(self, blocks: Sequence[Block] | None, on_end: Callable[[bool], None]) -> int:
        number = next(self._numbers)
        self._under_way[number] = _UnderWay(on_end, blocks, self.num_workers)
        return number

    def end(self, number: int, num_workers: int, has_failed: bool) -> None:
        """``num_workers`` workers have ended a job. One failure makes the whole job fail."""
        job = self._under_way[number]
        job.workers_left -= num_workers
        job.has_failed |= has_failed
        if job.workers_left > 0:
            return  # Other workers still read the pages, or write to host memory.
        del self._under_way[number]
        if job.blocks is not None:
            self.num_stores -= 1
            self._references.release(job.blocks)
        job.on_end(job.has_failed)

    def abandon_stores(self) -> None:
        """Release the pages of all stores. The bytes of these stores are then worth nothing."""
        for job in self._under_way.values():
            if job.blocks is not None:
                self._references.release(job.blocks)
                job.blocks = []
                job.has_failed = True


def table_parts(pages: Mapping[tuple[int, int], Block], num_groups: int) -> tuple[TablePart, ...]:
    """The parts of a block table with the given pages. The pages between these are null."""
    parts = []
    for group in range(num_groups):
        of_group = {page: block for (of, page), block in pages.items() if of == group}
        if not of_group:
            parts.append(TablePart(0, ()))
            continue
        first_page = min(of_group)
        end_page = max(of_group) + 1
        ids = [
            of_group[page].block_id if page in of_group else NULL_PAGE
            for page in range(first_page, end_page)
        ]
        parts.append(TablePart(first_page, tuple(ids)))
    return tuple(parts)
