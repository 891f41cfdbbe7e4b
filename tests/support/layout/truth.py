# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Fixtures of layouts. Their tensors are read without the layout's code.

By hand, a fixture states for each registered tensor which axis counts pages, and which axis counts
tokens. Moved bytes are compared by torch indexing on these tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from support.layout.fakes import cache_groups
from support.layout.reach import Reach
from vllm_ascend_kvext.groups.model import CacheGroup
from vllm_ascend_kvext.layout.build import build_layout
from vllm_ascend_kvext.layout.model import KVLayout, RowAddressing
from vllm_ascend_kvext.layout.views import tensors_of

_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, eq=False, slots=True)
class PagedTensor:
    """One registered tensor. ``token_axis`` is None if a page is taken whole.

    ``page_axis`` counts kernel blocks. A page consists of ``blocks_per_page`` of them.
    """

    group: int
    tensor: torch.Tensor
    reach: Reach
    page_axis: int = 0
    token_axis: int | None = None
    blocks_per_page: int = 1

    def by_row(self) -> torch.Tensor:
        """A view of integers, which keep NaN bits. shape: ``[num_pages, rows_per_page, ...]``."""
        tensor = self.tensor.view(_AS_INTEGER[self.tensor.element_size()])
        if self.token_axis is None:
            blocks = tensor.movedim(self.page_axis, 0)
            return blocks.unflatten(0, (-1, self.blocks_per_page)).unsqueeze(1)
        rows = tensor.movedim((self.page_axis, self.token_axis), (0, 1))
        num_pages = len(rows) // self.blocks_per_page
        return rows.view(num_pages, self.blocks_per_page * rows.shape[1], *rows.shape[2:])


@dataclass(frozen=True, eq=False, slots=True)
class LayoutFixture:
    """What one worker registers, with the worker's and the scheduler's KV cache config.

    ``tensors`` are the registered tensors and what is known about them. ``addressing`` and
    ``nz_layers`` are arguments of ``build_layout``.
    """

    config: object
    scheduler_config: object
    kv_caches: dict[str, object]
    tensors: tuple[PagedTensor, ...]
    addressing: RowAddressing | None = None
    nz_layers: frozenset[str] = frozenset()

    @property
    def num_groups(self) -> int:
        return len(self.config.kv_cache_groups)

    def layout(self) -> KVLayout:
        return build_layout(self.config, self.kv_caches, self.nz_layers, addressing=self.addressing)

    def storages(self) -> list[torch.Tensor]:
        """The bytes of every storage with tensors."""
        found: dict[int, torch.UntypedStorage] = {}
        for entry in self.kv_caches.values():
            for tensor in tensors_of(entry):
                found.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
        return [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in found.values()]

    def copy_of_storages(self) -> list[torch.Tensor]:
        return [storage.clone() for storage in self.storages()]

    def fill(self, seed: int) -> None:
        """Fill all storages with random bytes, padding included."""
        random = np.random.default_rng(seed)
        for storage in self.storages():
            storage.numpy()[:] = random.integers(0, 256, storage.numel(), dtype=np.uint8)

    def reaches(self, group: int) -> set[Reach]:
        return {paged.reach for paged in self.tensors if paged.group == group}

    def check_groups(self) -> None:
        """Check that the groups on both sides are those that the fixture states.

        The worker's config has bundles of specs. The scheduler's config has the first spec of each
        bundle.
        """
        groups = cache_groups(self.config)
        assert groups == cache_groups(self.scheduler_config)
        found = set()
        for of_layout in self.layout().groups:
            index = of_layout.kv_cache_group_id
            reach = Reach.of(of_layout)
            assert groups[index] == CacheGroup(
                reach.kind, reach.tokens_per_page, reach.window_tokens, reach.holds_states
            )
            found.add((index, replace(reach, compress_ratio=1)))
        assert found == {(one.group, replace(one.reach, compress_ratio=1)) for one in self.tensors}


def paged_tensors(
    config: object,
    kv_caches: dict[str, object],
    describe: dict[str, Sequence[tuple[int | None, ...]]],
    reaches: dict[str, Reach],
) -> tuple[PagedTensor, ...]:
    """The paged tensors of a config. Each layer is in one group.

    The keys of ``describe`` and ``reaches`` are ends of layers' names. For each tensor,
    ``describe`` has ``(page_axis, token_axis, blocks_per_page)``. Values at the right may be left
    out.
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
