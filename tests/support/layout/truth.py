# SPDX-License-Identifier: Apache-2.0
"""What a fixture of a layout is, and how its tensors are read without the layout's code.

A fixture states by hand which axis of each registered tensor counts pages and which counts tokens;
whatever moves is then compared with torch indexing on those tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from support.layout.reach import Reach
from vllm_ascend_kvext.layout.build import build_layout
from vllm_ascend_kvext.layout.model import KVLayout, RowAddressing
from vllm_ascend_kvext.layout.rows import TokenRange
from vllm_ascend_kvext.layout.views import tensors_of
from vllm_ascend_kvext.layout.worker_config import WorkerConfig


@dataclass(frozen=True, eq=False, slots=True)
class PagedTensor:
    """One registered tensor.

    Attributes:
        group: Index of its KV cache group.
        tensor: As registered.
        reach: What its group reads, and how many tokens its pages and rows hold.
        page_axis: Which axis counts pages, or kernel blocks.
        token_axis: Which axis counts rows; None where a page is taken whole.
        blocks_per_page: Kernel blocks per page.
    """

    group: int
    tensor: torch.Tensor
    reach: Reach
    page_axis: int = 0
    token_axis: int | None = None
    blocks_per_page: int = 1

    def of_rows(self, page: int, rows: range) -> list[torch.Tensor]:
        """Views of these rows of a page."""
        blocks = range(page * self.blocks_per_page, (page + 1) * self.blocks_per_page)
        if self.token_axis is None:
            return [self.tensor.select(self.page_axis, block) for block in blocks]
        rows_per_block = self.tensor.shape[self.token_axis]
        views = []
        for row in rows:
            block = self.tensor.narrow(self.page_axis, blocks[row // rows_per_block], 1)
            views.append(block.narrow(self.token_axis, row % rows_per_block, 1))
        return views


_PLAIN_WORKER = WorkerConfig()


@dataclass(frozen=True, eq=False, slots=True)
class LayoutFixture:
    """What one worker registers.

    Attributes:
        config: The KV cache config as the worker has it.
        scheduler_config: The same as the scheduler has it.
        kv_caches: The registered tensors.
        tensors: The same one by one, with what is known of them.
        addressing: As given to ``build_layout``; None for what the device decides.
        worker: As given to ``build_layout``.
    """

    config: object
    scheduler_config: object
    kv_caches: dict[str, object]
    tensors: tuple[PagedTensor, ...]
    addressing: RowAddressing | None = None
    worker: WorkerConfig = _PLAIN_WORKER

    @property
    def num_groups(self) -> int:
        return len(self.config.kv_cache_groups)

    def layout(self) -> KVLayout:
        return build_layout(self.config, self.kv_caches, self.worker, addressing=self.addressing)

    def storages(self) -> list[torch.Tensor]:
        """The bytes of every storage that tensors lie in."""
        found: dict[int, torch.UntypedStorage] = {}
        for entry in self.kv_caches.values():
            for tensor in tensors_of(entry):
                found.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
        return [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in found.values()]

    def copy_of_storages(self) -> list[torch.Tensor]:
        return [storage.clone() for storage in self.storages()]

    def fill(self, seed: int) -> None:
        """Random bytes everywhere, in padding too."""
        random = np.random.default_rng(seed)
        for storage in self.storages():
            storage.numpy()[:] = random.integers(0, 256, storage.numel(), dtype=np.uint8)

    def reaches(self, group: int) -> set[Reach]:
        return {paged.reach for paged in self.tensors if paged.group == group}


def paged_tensors(
    config: object,
    kv_caches: dict[str, object],
    describe: dict[str, Sequence[tuple[int | None, ...]]],
    reaches: dict[str, Reach],
) -> tuple[PagedTensor, ...]:
    """One per tensor, for configs in which a layer is in one group.

    Args:
        config: Names the layers of each group.
        kv_caches: The tensors.
        describe: By the end of a layer's name: ``(page_axis, token_axis, blocks_per_page)``,
            shortened from the right, for each tensor of the layer.
        reaches: By the end of a layer's name.
    """
    return tuple(
        PagedTensor(index, tensor, _of(reaches, name), *axes)
        for index, group in enumerate(config.kv_cache_groups)
        for name in group.layer_names
        for tensor, axes in zip(tensors_of(kv_caches[name]), _of(describe, name), strict=True)
    )


def _of(by_suffix: dict[str, object], name: str) -> object:
    found = [suffix for suffix in by_suffix if name.endswith(suffix)]
    return by_suffix[max(found, key=len)]


def random_block_ids(
    fixture: LayoutFixture, tokens: TokenRange, seed: int, null: Sequence[Sequence[int]] | None
) -> list[list[int]]:
    """Block ids of a request: distinct, in random order, null where nothing is read any more.

    Args:
        fixture: Of the request.
        tokens: Whose rows have pages.
        seed: Of the order, and of the pages that are null besides.
        null: Block ids of the same request elsewhere: what is null there is null here.
    """
    random = np.random.default_rng(seed)
    fresh = iter((random.permutation(fixture.config.num_blocks - 1) + 1).tolist())
    ids: list[list[int]] = []
    for group in range(fixture.num_groups):
        reaches = fixture.reaches(group)
        tokens_per_page = next(iter(reaches)).tokens_per_page
        used = {
            row * reach.tokens_per_row // tokens_per_page
            for reach in reaches
            for row in reach.rows_read(tokens.first, tokens.end)
        }
        ids.append([0] * math.ceil(tokens.end / tokens_per_page))
        for page in sorted(used):
            is_null = random.random() < 0.15 or (null is not None and not null[group][page])
            ids[group][page] = 0 if is_null else next(fresh)
    return ids


def copy_by_definition(
    source: LayoutFixture,
    source_ids: Sequence[Sequence[int]],
    target: LayoutFixture,
    target_ids: Sequence[Sequence[int]],
    tokens: TokenRange,
) -> int:
    """Copy what a chunk keeps and a resume at its end needs, row by row; returns the bytes."""
    num_bytes = 0
    for one, other in zip(source.tensors, target.tensors, strict=True):
        reach = one.reach
        rows_per_page = reach.tokens_per_page // reach.tokens_per_row
        needed = set(reach.rows_needed(tokens.first, tokens.end))
        for row in sorted(needed.intersection(reach.rows_read(tokens.first, tokens.end))):
            index, first = divmod(row, rows_per_page)
            page, other_page = source_ids[one.group][index], target_ids[one.group][index]
            if page and other_page:
                rows = range(first, first + 1)
                for view, other_view in zip(
                    one.of_rows(page, rows), other.of_rows(other_page, rows), strict=True
                ):
                    # As bytes: comparing or copying floats may lose the payload of a NaN.
                    other_view.view(_AS_INTEGER[view.element_size()]).copy_(
                        view.view(_AS_INTEGER[view.element_size()])
                    )
                    num_bytes += view.numel() * view.element_size()
    return num_bytes


_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
