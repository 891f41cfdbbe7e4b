# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Workers with a few small pages on the CPU. The pages are like those of different models.

On a CPU, a page is one row. The expected bytes come from the registered tensors by torch indexing,
without the layout's code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from support.connector.gates import until
from support.connector.worker_configs import vllm_config as default_config
from support.connector.worker_configs import worker_options
from support.layout.fakes import (
    AscendMLAAttentionSpec,
    FullAttentionSpec,
    SlidingWindowMLASpec,
    config,
)
from support.layout.reach import Reach
from support.layout.truth import LayoutFixture, PagedTensor
from vllm_ascend_kvext.connector.common.messages import (
    ConnectorMetadata,
    LoadJob,
    StoreJob,
    WorkerOutput,
)
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.connector.worker.worker_side import EndedJobs, WorkerSide
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.planner import TransferPlanner
from vllm_ascend_kvext.layout.row_map import StoredChunk
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk, TablePart
from vllm_ascend_kvext.token_range import TokenRange

NUM_PAGES = 64
_LATENT = {"num_kv_heads": 1, "dtype": torch.bfloat16}


def _fixture(*groups: tuple[str, Any, tuple[int, ...], Reach]) -> LayoutFixture:
    """A worker with groups of two layers.

    Each group has the end of its layers' names, a spec, the shape of its pages, and its reach.
    """
    kv_caches: dict[str, torch.Tensor] = {}
    described = []
    tensors = []
    for index, (name, spec, shape, reach) in enumerate(groups):
        of_group = {
            f"model.layers.{layer}.{name}": torch.zeros((NUM_PAGES, *shape), dtype=spec.dtype)
            for layer in range(2)
        }
        described.append((spec, *of_group))
        tensors += [PagedTensor(index, tensor, reach) for tensor in of_group.values()]
        kv_caches |= of_group
    made = config(NUM_PAGES, *described)
    return LayoutFixture(made, made, kv_caches, tuple(tensors))


def single_group() -> LayoutFixture:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
    return _fixture(("attn", spec, (2, 16, 2, 8), Reach(GroupKind.FULL, 16, 16)))


def one_head() -> LayoutFixture:
    """Full attention whose worker has one KV head, which other workers may have, too."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    return _fixture(("attn", spec, (2, 16, 1, 8), Reach(GroupKind.FULL, 16, 16)))


def deepseek_v4_like() -> LayoutFixture:
    """A worker like vLLM-Ascend's: latents of two ratios, a window, and states of a compressor."""
    states = {"num_kv_heads": 1, "dtype": torch.float32}
    return _fixture(
        (
            "c4.attn",
            AscendMLAAttentionSpec(block_size=8, head_size=16, compress_ratio=4, **_LATENT),
            (8, 1, 16),
            Reach(GroupKind.FULL, 32, 32, compress_ratio=4),
        ),
        (
            "c16.attn",
            AscendMLAAttentionSpec(block_size=4, head_size=16, compress_ratio=16, **_LATENT),
            (4, 1, 16),
            Reach(GroupKind.FULL, 64, 64, compress_ratio=16),
        ),
        (
            "swa_cache",
            SlidingWindowMLASpec(block_size=16, head_size=16, sliding_window=32, **_LATENT),
            (16, 1, 16),
            Reach(GroupKind.WINDOW, 16, 16, 32),
        ),
        (
            "compressor.state_cache",
            SlidingWindowMLASpec(block_size=4, head_size=8, sliding_window=8, **states),
            (4, 1, 8),
            Reach(GroupKind.WINDOW, 4, 4, 8, holds_states=True),
        ),
    )


TOKENS = TokenRange(0, 128)


class SmallWorker:
    """A worker side, its pages, its jobs and its reports. A report may not come twice.

    ``job`` is a store of the tokens `TOKENS`. Their KV is in the pages of ``tables``.
    ``arguments`` are those of `WorkerSide`.
    """

    def __init__(
        self,
        make: Callable[[], LayoutFixture] = deepseek_v4_like,
        options: ConnectorOptions | None = None,
        vllm_config: Any = None,
        **arguments: object,
    ) -> None:
        self.pages = make()
        self.pages.fill(seed=1)
        options = options or worker_options()
        self.side = WorkerSide(
            vllm_config or default_config(), self.pages.config, options, **arguments
        )
        self.side.register(self.pages.kv_caches)
        self.planner = TransferPlanner(self.side.describe().layout, options.state_policy)
        self._host_end_bytes = 0
        self.loads: set[str] = set()
        self.failed_pages: set[int] = set()
        self.results = WorkerOutput()
        self.tables = self.tables_of(TOKENS)
        self.job = self.store(1, TOKENS, self.tables)

    def tables_of(self, tokens: TokenRange, first_page: int = 1) -> tuple[TablePart, ...]:
        """The part of a request's block tables that a transfer of these tokens needs.

        The request has the pages from ``first_page`` on, in falling order of their numbers.
        """
        taken = [self._pages_used(group, tokens) for group in range(self.pages.num_groups)]
        free = iter(range(first_page + sum(map(len, taken)) - 1, 0, -1))
        return tuple(TablePart(pages[0], tuple(next(free) for _ in pages)) for pages in taken)

    def _pages_used(self, group: int, tokens: TokenRange) -> list[int]:
        """The pages that a resume at the end of a range needs.

        The request's first page has number 0.
        """
        return sorted(
            {
                row * reach.tokens_per_row // reach.tokens_per_page
                for reach in self.pages.reaches(group)
                for row in reach.rows_needed(*tokens)
            }
        )

    def store(self, number: int, tokens: TokenRange, tables: Sequence[TablePart]) -> StoreJob:
        """A store of one chunk. Its place in host memory follows the places of earlier calls."""
        chunk = PlacedChunk(tokens, self._host_end_bytes)
        self._host_end_bytes = self.planner.plan_store([chunk], tables).host_bytes
        return StoreJob(number, (chunk,), tuple(tables))

    def load(
        self,
        store: StoreJob | None = None,
        tables: Sequence[TablePart] | None = None,
        **changes: Any,
    ) -> LoadJob:
        """A load of a stored chunk. By default, it loads ``job`` into its own pages."""
        store = store or self.job
        row_maps = self.planner.plan_store(store.chunks, store.block_ids).row_maps
        places = [chunk.host_offset_bytes for chunk in store.chunks]
        stored = tuple(map(StoredChunk, row_maps, places))
        load = LoadJob("a", store.chunks[0].tokens, stored, tuple(tables or self.tables))
        return replace(load, **changes)

    def page_bytes(self, tables: Sequence[TablePart] | None = None) -> list[torch.Tensor]:
        """A copy of every page in some tables, group by group."""
        tables = tables or self.tables
        return [
            paged.by_row()[page].clone()
            for paged in self.pages.tensors
            for page in tables[paged.group].ids
        ]

    def take(self) -> EndedJobs:
        """Collect the reports since the last call."""
        ended = self.side.end_step()
        assert ended.loads.isdisjoint(self.loads)
        assert ended.results.jobs_ended.keys().isdisjoint(self.results.jobs_ended)
        assert ended.results.failed_loads <= ended.loads
        assert bool(ended.failed_pages) <= bool(ended.results.failed_loads)
        self.loads |= ended.loads
        self.failed_pages |= ended.failed_pages
        self.results.add(ended.results)
        return ended

    def begin(self, *jobs: StoreJob | LoadJob, has_forward: bool = False) -> None:
        stores = tuple(job for job in jobs if isinstance(job, StoreJob))
        loads = tuple(job for job in jobs if isinstance(job, LoadJob))
        self.side.begin_step(ConnectorMetadata(stores=stores, loads=loads, has_forward=has_forward))

    def wait_for(self, *names: int | str) -> None:
        """Take reports until these stores and loads have ended, too. No other job may end."""
        expected = {*names, *self.results.jobs_ended, *self.loads}

        def have_ended() -> bool:
            self.take()
            return self.loads | self.results.jobs_ended.keys() >= expected

        until(have_ended, f"the end of {names}")
        assert self.loads | self.results.jobs_ended.keys() == expected
        assert set(self.results.jobs_ended.values()) <= {1}

    def run(self, *jobs: StoreJob | LoadJob) -> None:
        """Begin jobs in a step that computes nothing, and wait for their ends."""
        self.begin(*jobs)
        self.wait_for(
            *(job.number if isinstance(job, StoreJob) else job.request_id for job in jobs)
        )


def name_of(job: StoreJob | LoadJob) -> int | str:
    return job.number if isinstance(job, StoreJob) else job.request_id


def same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))
