# SPDX-License-Identifier: Apache-2.0
"""Workers with a few small pages on the CPU, as different models have them.

On a CPU a page is one row. What must move is said here by torch indexing on the registered
tensors, without the layout's code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from support.connector.worker_configs import vllm_config as default_config
from support.connector.worker_configs import worker_options
from support.layout.byte_memory import chunk_bytes
from support.layout.fakes import (
    AscendMLAAttentionSpec,
    FullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    config,
)
from support.layout.reach import Reach
from support.layout.truth import LayoutFixture, PagedTensor
from vllm_ascend_kvext.connector.common.messages import LoadJob, StoreJob
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.connector.worker.worker_side import WorkerSide
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.planner import TransferPlanner
from vllm_ascend_kvext.layout.row_map import StoredChunk
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk, TablePart
from vllm_ascend_kvext.token_range import TokenRange

NUM_PAGES = 64
BLOCK, HEADS, HEAD_SIZE, WINDOW = 16, 2, 8, 40


_SIZES = {
    "block_size": BLOCK,
    "num_kv_heads": HEADS,
    "head_size": HEAD_SIZE,
    "dtype": torch.bfloat16,
}
_FULL = FullAttentionSpec(**_SIZES), Reach(GroupKind.FULL, BLOCK, BLOCK)
_WINDOW = (
    SlidingWindowSpec(sliding_window=WINDOW, **_SIZES),
    Reach(GroupKind.WINDOW, BLOCK, BLOCK, WINDOW),
)
_Group = tuple[Any, Reach]


def _attention(*groups: _Group) -> LayoutFixture:
    """Two layers per group; the groups share storages."""
    shape = (NUM_PAGES, 2, BLOCK, HEADS, HEAD_SIZE)
    storages = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2)]
    caches = [
        {f"{index}.{layer}.attn": storage.view(shape) for layer, storage in enumerate(storages)}
        for index in range(len(groups))
    ]
    return _fixture(groups, caches)


def _fixture(groups: Sequence[_Group], caches: Sequence[dict[str, Any]]) -> LayoutFixture:
    """What these groups and their tensors by layer make."""
    described = [(spec, *of_group) for (spec, _), of_group in zip(groups, caches, strict=True)]
    tensors = [
        PagedTensor(index, cache[0] if isinstance(cache, tuple) else cache, groups[index][1])
        for index, of_group in enumerate(caches)
        for cache in of_group.values()
    ]
    made = config(NUM_PAGES, *described)
    kv_caches = {name: cache for of_group in caches for name, cache in of_group.items()}
    return LayoutFixture(made, made, kv_caches, tuple(tensors))


def single_group() -> LayoutFixture:
    return _attention(_FULL)


def gemma_like() -> LayoutFixture:
    return _attention(_FULL, _WINDOW, _WINDOW)


def deepseek_v4_like() -> LayoutFixture:
    """As vLLM-Ascend has it: latents of two ratios, a window, states of a compressor."""
    latent = {"num_kv_heads": 1, "dtype": torch.bfloat16}
    groups = [
        (
            AscendMLAAttentionSpec(block_size=8, head_size=16, compress_ratio=4, **latent),
            Reach(GroupKind.FULL, 32, 32, compress_ratio=4),
        ),
        (
            AscendMLAAttentionSpec(block_size=4, head_size=16, compress_ratio=16, **latent),
            Reach(GroupKind.FULL, 64, 64, compress_ratio=16),
        ),
        (
            SlidingWindowMLASpec(block_size=16, head_size=16, sliding_window=32, **latent),
            Reach(GroupKind.WINDOW, 16, 16, 32),
        ),
        (
            SlidingWindowMLASpec(
                block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=8
            ),
            Reach(GroupKind.WINDOW, 4, 4, 8, holds_states=True),
        ),
    ]
    names = ("c4.attn", "c16.attn", "swa_cache", "compressor.state_cache")
    caches = []
    for name, (spec, _) in zip(names, groups, strict=True):
        shape = (NUM_PAGES, spec.block_size, 1, spec.head_size)
        caches.append(
            {
                f"model.layers.{layer}.{name}": (torch.zeros(shape, dtype=spec.dtype),)
                for layer in range(2)
            }
        )
    return _fixture(groups, caches)


LAYOUTS: dict[str, Callable[[], LayoutFixture]] = {
    "single group": single_group,
    "gemma": gemma_like,
    "deepseek v4": deepseek_v4_like,
}


class SmallWorker:
    """A worker side, its pages, and jobs for it.

    Args:
        make: The layout.
        options: Of the connector.
        arguments: Of `WorkerSide`.
    """

    def __init__(
        self,
        make: Callable[[], LayoutFixture] = gemma_like,
        options: ConnectorOptions | None = None,
        vllm_config: Any = None,
        **arguments: object,
    ) -> None:
        self.pages = make()
        self.pages.fill(seed=1)
        self.options = options or worker_options()
        self.side = WorkerSide(
            vllm_config or default_config(), self.pages.config, self.options, **arguments
        )
        self.side.register(self.pages.kv_caches)
        self.planner = TransferPlanner(self.side.describe().layout, self.options.state_policy)
        self._host_end_bytes = 0

    def tables(self, tokens: TokenRange, first_page: int = 1) -> tuple[TablePart, ...]:
        """What a transfer of these tokens needs of a request's block tables.

        Args:
            tokens: Of the transfer.
            first_page: The request has the pages from here on, in falling order.
        """
        taken = [self.pages_used(group, tokens) for group in range(self.pages.num_groups)]
        free = iter(range(first_page + sum(map(len, taken)) - 1, 0, -1))
        return tuple(
            TablePart(pages[0], tuple(next(free) for _ in pages)) if pages else TablePart(0, ())
            for pages in taken
        )

    def pages_used(self, group: int, tokens: TokenRange) -> list[int]:
        """Pages of a request that resuming at the end of a range needs, counted from its first."""
        return sorted(
            {
                row * reach.tokens_per_row // reach.tokens_per_page
                for reach in self.pages.reaches(group)
                for row in reach.rows_needed(tokens.first_tokens, tokens.end_tokens)
            }
        )

    def chunk_bytes(self, tokens: TokenRange) -> int:
        layout = self.side.describe().layout
        return chunk_bytes(layout, PlacedChunk(tokens), self.options.state_policy)

    def store(self, number: int, tokens: TokenRange, tables: Sequence[TablePart]) -> StoreJob:
        """A store of one chunk behind those of earlier calls."""
        chunk = PlacedChunk(tokens, self._host_end_bytes)
        self._host_end_bytes += self.chunk_bytes(tokens)
        return StoreJob(number, (chunk,), tuple(tables))

    def load(self, request_id: str, store: StoreJob, tables: Sequence[TablePart]) -> LoadJob:
        """A load of what a store has stored."""
        plan = self.planner.plan_store(store.chunks, store.block_ids)
        stored = tuple(
            StoredChunk(row_map, chunk.host_offset_bytes)
            for row_map, chunk in zip(plan.row_maps, store.chunks, strict=True)
        )
        tokens = store.chunks[0].tokens
        return LoadJob(request_id, tokens, stored, tuple(tables))

    def page_bytes(self, tables: Sequence[TablePart]) -> list[torch.Tensor]:
        """A copy of every page of some tables, group by group."""
        return [
            paged.by_row()[page].clone()
            for paged in self.pages.tensors
            for page in tables[paged.group].ids
        ]

    def others_bytes(self, tables: Sequence[TablePart]) -> list[torch.Tensor]:
        """A copy of all storages, the pages of some tables zeroed."""
        kept = self.pages.copy_of_storages()
        for paged in self.pages.tensors:
            for page in tables[paged.group].ids:
                paged.by_row()[page].zero_()
        others = self.pages.copy_of_storages()
        for storage, before in zip(self.pages.storages(), kept, strict=True):
            storage.copy_(before)
        return others


def same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))
