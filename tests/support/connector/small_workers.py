# SPDX-License-Identifier: Apache-2.0
"""Workers with a few small pages on the CPU, as different models have them.

On a CPU a page is one row. What must move is said here by torch indexing on the registered
tensors, without the layout's code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from support.connector.worker_configs import Options, VllmConfig
from support.layout.fakes import (
    AscendMLAAttentionSpec,
    FullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    config,
)
from support.layout.reach import Reach
from support.layout.truth import LayoutFixture, PagedTensor
from vllm_ascend_kvext.connector.messages import LoadJob, StoreJob
from vllm_ascend_kvext.connector.worker_side import WorkerSide
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.planner import TransferPlanner
from vllm_ascend_kvext.layout.row_map import StoredChunk
from vllm_ascend_kvext.layout.rows import TokenRange
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk, TablePart

NUM_PAGES = 64
BLOCK, HEADS, HEAD_SIZE, WINDOW = 16, 2, 8, 40


class C4AttnKVStateSpec(SlidingWindowMLASpec):
    """The compressor's states; known by the name."""


def _keys_and_values(storage: torch.Tensor | None = None) -> torch.Tensor:
    shape = (NUM_PAGES, 2, BLOCK, HEADS, HEAD_SIZE)
    return torch.zeros(shape, dtype=torch.bfloat16) if storage is None else storage.view(shape)


def single_group() -> LayoutFixture:
    """Two layers of full attention."""
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16
    )
    kv_caches = {f"{layer}.attn": _keys_and_values() for layer in range(2)}
    made = config(NUM_PAGES, (spec, *kv_caches))
    reach = Reach(GroupKind.FULL, BLOCK, BLOCK)
    tensors = tuple(PagedTensor(0, tensor, reach) for tensor in kv_caches.values())
    return LayoutFixture(made, made, kv_caches, tensors)


def gemma_like() -> LayoutFixture:
    """Full attention and two groups of sliding windows, which share storages."""
    sizes = {
        "block_size": BLOCK,
        "num_kv_heads": HEADS,
        "head_size": HEAD_SIZE,
        "dtype": torch.bfloat16,
    }
    window = Reach(GroupKind.WINDOW, BLOCK, BLOCK, WINDOW)
    groups = [
        (FullAttentionSpec(**sizes), Reach(GroupKind.FULL, BLOCK, BLOCK)),
        (SlidingWindowSpec(sliding_window=WINDOW, **sizes), window),
        (SlidingWindowSpec(sliding_window=WINDOW, **sizes), window),
    ]
    storages = [_keys_and_values() for _ in range(2)]
    kv_caches: dict[str, object] = {}
    tensors: list[PagedTensor] = []
    described = []
    for index, (spec, reach) in enumerate(groups):
        names = [f"{index}.{layer}.attn" for layer in range(len(storages))]
        described.append((spec, *names))
        for name, storage in zip(names, storages, strict=True):
            kv_caches[name] = _keys_and_values(storage)
            tensors.append(PagedTensor(index, kv_caches[name], reach))
    made = config(NUM_PAGES, *described)
    return LayoutFixture(made, made, kv_caches, tuple(tensors))


def deepseek_v4_like() -> LayoutFixture:
    """As vLLM-Ascend has it: latents of two ratios, a window, states; one tuple per layer."""
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
            C4AttnKVStateSpec(
                block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=8
            ),
            Reach(GroupKind.WINDOW, 4, 4, 8, holds_states=True),
        ),
    ]
    kv_caches: dict[str, object] = {}
    tensors: list[PagedTensor] = []
    names = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    for name in names:
        entry = []
        for index, (spec, reach) in enumerate(groups):
            tensor = torch.zeros(NUM_PAGES, spec.block_size, 1, spec.head_size, dtype=spec.dtype)
            tensors.append(PagedTensor(index, tensor, reach))
            entry.append(tensor)
        kv_caches[name] = tuple(entry)
    made = config(NUM_PAGES, *((spec, *names) for spec, _ in groups))
    return LayoutFixture(made, made, kv_caches, tuple(tensors))


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
        options: Options | None = None,
        vllm_config: VllmConfig | None = None,
        **arguments: object,
    ) -> None:
        self.pages = make()
        self.pages.fill(seed=1)
        self.options = options or Options()
        self.side = WorkerSide(
            vllm_config or VllmConfig(), self.pages.config, self.options, **arguments
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
                for row in reach.rows_needed(tokens.first, tokens.end)
            }
        )

    def store(self, number: int, tokens: TokenRange, tables: Sequence[TablePart]) -> StoreJob:
        """A store of one chunk behind those of earlier calls."""
        chunk = PlacedChunk(tokens, self._host_end_bytes)
        self._host_end_bytes += self.planner.chunk_bytes(tokens)
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
            view.clone().view(torch.uint8)
            for paged in self.pages.tensors
            for page in tables[paged.group].ids
            for view in paged.of_rows(page, range(1))
        ]

    def others_bytes(self, tables: Sequence[TablePart]) -> list[torch.Tensor]:
        """A copy of all storages, the pages of some tables zeroed."""
        kept = self.pages.copy_of_storages()
        for paged in self.pages.tensors:
            for page in tables[paged.group].ids:
                for view in paged.of_rows(page, range(1)):
                    view.zero_()
        others = self.pages.copy_of_storages()
        for storage, before in zip(self.pages.storages(), kept, strict=True):
            storage.copy_(before)
        return others


def same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))
