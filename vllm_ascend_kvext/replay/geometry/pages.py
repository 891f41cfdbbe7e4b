# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The pages that a worker would register for a KV cache config, without memory.

The module imports nothing of vLLM.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.groups.specs import LayerSpec, cache_group, read_layer_specs
from vllm_ascend_kvext.layout.model import KVLayout, LayoutGroup, Plane, RegisteredStorage

_STORAGE_BYTES = 1 << 62
"""The size of the one storage of all pages. Nothing is read from it."""


def pages_of(kv_cache_config: Any) -> KVLayout:
    """The layout of a worker whose kernels write rows of tokens, one plane for each layer.

    Args:
        kv_cache_config: vLLM's ``KVCacheConfig``, as a worker has it.

    Raises:
        GroupError: If the config is not supported.
    """
    specs_by_group = read_layer_specs(kv_cache_config)
    groups = [group for specs in specs_by_group for group in _layout_groups(specs)]
    storage = RegisteredStorage(1 << 20, _STORAGE_BYTES)
    num_pages = int(kv_cache_config.num_blocks)
    return KVLayout((storage,), tuple(groups), num_pages, len(specs_by_group))


def _layout_groups(specs: Sequence[LayerSpec]) -> list[LayoutGroup]:
    """The transfer groups of one KV cache group, as ``layout.build`` makes them of tensors."""
    group = cache_group(specs)
    by_row: dict[tuple[int, int], list[LayerSpec]] = defaultdict(list)
    for spec in specs:
        by_row[spec.compress_ratio, spec.restart_tokens].append(spec)
    return [
        LayoutGroup(
            kv_cache_group_id=of_row[0].kv_cache_group_id,
            kind=group.kind,
            tokens_per_page=group.tokens_per_page,
            tokens_per_row=_tokens_per_row(of_row[0]),
            window_tokens=group.window_tokens,
            restart_tokens=restart_tokens,
            planes=tuple(map(_plane, of_row)),
            holds_states=group.holds_states,
            compress_ratio=compress_ratio,
        )
        for (compress_ratio, restart_tokens), of_row in sorted(by_row.items())
    ]


def _tokens_per_row(spec: LayerSpec) -> int:
    """A page of a recurrence is one row; all others have a row for each entry."""
    return spec.tokens_per_page() if spec.kind is GroupKind.STATE else spec.compress_ratio


def _plane(spec: LayerSpec) -> Plane:
    num_rows = spec.tokens_per_page() // _tokens_per_row(spec)
    return Plane(
        layer_name=spec.layer_name,
        storage=0,
        base_bytes=0,
        page_stride_bytes=spec.page_bytes,
        region_offset_bytes=0,
        row_bytes=spec.min_page_bytes // num_rows,
        dtype="uint8",
        is_packed=False,
    )
