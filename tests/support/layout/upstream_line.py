# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Hides the differences of vLLM's releases in planning, allocating and shaping KV caches.

Since 0.30, a backend states the number and the size of a page's rows (``customize_spec``), and
which orders of axes it reads. Then vLLM makes one view ``[pages, heads, rows, content]`` per layer.
Before, the backend states the shape. In both, vLLM's own functions plan and shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from vllm.config import CacheConfig, VllmConfig
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

_FIELDS = {field.name for field in dataclasses.fields(MLAAttentionSpec)}

HAS_ONE_VIEW = "tokens_per_state" in _FIELDS
"""Whether this is vLLM 0.30 or later."""

Backends = Mapping[str, type]
"""Backends, by the end of a layer's name."""


def compressed(tokens_per_row: int) -> dict[str, Any]:
    """The field of a spec whose rows hold several tokens."""
    return {"tokens_per_state" if HAS_ONE_VIEW else "compress_ratio": tokens_per_row}


def packed(row_bytes: int) -> dict[str, Any]:
    """The field of a spec whose rows are bytes. ``head_size`` does not show their size."""
    return {"state_content_bytes": row_bytes} if HAS_ONE_VIEW else {}


def page_axis_of(backend: Any) -> int:
    """The axis of a backend's tensors that counts pages."""
    return 0 if HAS_ONE_VIEW else backend.get_kv_cache_shape(40, 16, 2, 64).index(40)


def token_axis_of(token_axis: int | None) -> int | None:
    """The axis that counts tokens. ``token_axis`` is this axis in the backend's own shape.

    In the single view, another axis stands before the rows, so a page is one row.
    """
    return None if HAS_ONE_VIEW else token_axis


def views(number: int) -> int:
    """The number of tensors that a layer registers. ``number`` is that of releases before 0.30."""
    return 1 if HAS_ONE_VIEW else number


def plan(
    specs: Mapping[str, KVCacheSpec], backends: Backends, num_blocks: int, block_size: int = 16
) -> tuple[KVCacheConfig, KVCacheConfig]:
    """The configs of a worker and of the scheduler, like vLLM makes them."""
    vllm_config = VllmConfig(
        cache_config=CacheConfig(block_size=block_size, num_gpu_blocks_override=num_blocks)
    )
    of_layers = dict(specs)
    if HAS_ONE_VIEW:
        of_layers = _resolved(vllm_config, of_layers, backends)
    groups = kv_cache_utils.get_kv_cache_groups(vllm_config, of_layers)
    config = kv_cache_utils.get_kv_cache_config_from_groups(
        vllm_config, groups, available_memory=1 << 40
    )
    if HAS_ONE_VIEW:  # The engine core does the same.
        config.kv_cache_layout = vllm_config.cache_config.kv_cache_layout
    return config, kv_cache_utils.generate_scheduler_kv_cache_config([config])


def _resolved(
    vllm_config: VllmConfig, specs: dict[str, KVCacheSpec], backends: Backends
) -> dict[str, KVCacheSpec]:
    """The specs that the backends state. The order of axes in ``vllm_config`` is set, too."""
    from vllm.v1.attention.backends import utils

    found = {
        name: _backend(backends, name)
        for name, spec in specs.items()
        if isinstance(spec, AttentionSpec)
    }
    specs = {
        name: found[name].customize_spec(spec) if name in found else spec
        for name, spec in specs.items()
    }
    layouts = utils.get_supported_kv_cache_layouts(dict.fromkeys(found.values()))
    names = [layout.name for layout in layouts]
    utils.resolve_kv_cache_layout(vllm_config, [names], specs.values())
    return specs


def config_by_layers(groups: list[KVCacheGroupSpec], num_blocks: int) -> KVCacheConfig:
    """A config of vLLM 0.30. Layers of one page size have their own pages.

    Groups share the pages.
    """
    from vllm.v1.kv_cache_interface import KVCacheTensor

    page_bytes = groups[0].kv_cache_spec.page_size_bytes
    layer_bytes = page_bytes * num_blocks
    config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(
                size=layer_bytes * max(len(group.layer_names) for group in groups),
                layers=group.layer_names,
                layer_stride=layer_bytes,
                block_stride=page_bytes,
            )
            for group in groups
        ],
        kv_cache_groups=groups,
    )
    config.kv_cache_layout = "LBHNC"  # The CPU backend reads this order.
    return config


def register(
    config: KVCacheConfig,
    backends: Backends,
    kernel_block_size: int | None = None,
    cache_dtype: str = "auto",
) -> dict[str, object]:
    """The tensors of a config, like vLLM's model runner makes them.

    ``kernel_block_size`` is the block size of the attention kernels, if it is not the config's.
    """
    block_sizes = [
        kernel_block_size or group.kv_cache_spec.block_size for group in config.kv_cache_groups
    ]
    make = _one_view_each if HAS_ONE_VIEW else _shaped_by_backends
    return make(config, backends, block_sizes, cache_dtype)


def _one_view_each(
    config: KVCacheConfig, _backends: Backends, block_sizes: list[int], _cache_dtype: str
) -> dict[str, object]:
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    return allocate_kv_cache(config, "cpu", KVCacheLayout[config.kv_cache_layout], block_sizes)


def _shaped_by_backends(
    config: KVCacheConfig, backends: Backends, block_sizes: list[int], cache_dtype: str
) -> dict[str, object]:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    groups = [
        SimpleNamespace(
            backend=_backend(backends, name),
            layer_names=[name],
            kv_cache_spec=_spec_of(group, name),
            kv_cache_group_id=index,
        )
        for index, group in enumerate(config.kv_cache_groups)
        for name in group.layer_names
    ]
    # The attributes of a model runner that are read to allocate and shape KV caches.
    runner = SimpleNamespace(
        device="cpu",
        runner_only_attn_layers=frozenset(),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        _kv_cache_spec_attn_group_iterator=lambda: iter(groups),
    )
    arrange = GPUModelRunner._update_hybrid_attention_mamba_layout
    runner._update_hybrid_attention_mamba_layout = partial(arrange, runner)
    raw = GPUModelRunner._allocate_kv_cache_tensors(runner, config)
    return GPUModelRunner._reshape_kv_cache_tensors(runner, raw, block_sizes)


def _spec_of(group: KVCacheGroupSpec, layer_name: str) -> KVCacheSpec:
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[layer_name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _backend(backends: Backends, layer_name: str) -> Any:
    return next(backend for suffix, backend in backends.items() if layer_name.endswith(suffix))
