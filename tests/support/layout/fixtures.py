# SPDX-License-Identifier: Apache-2.0
"""Layouts as the installed vLLM plans, allocates and shapes them; nothing is computed on them.

Each function makes a new worker: config, tensors in memory of their own, and by hand what the
tensors hold. Planning and shaping are vLLM's own functions; only the layers are made up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace

import torch
from vllm.config import CacheConfig, VllmConfig
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend
from vllm.v1.attention.backends.rocm_attn import RocmAttentionBackend
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from support.layout.reach import Reach
from support.layout.truth import LayoutFixture, paged_tensors
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import RowAddressing


def plan(
    specs: Mapping[str, KVCacheSpec], num_blocks: int, block_size: int = 16
) -> tuple[KVCacheConfig, KVCacheConfig]:
    """The config of a worker, and of the scheduler, as vLLM makes it."""
    vllm_config = VllmConfig(
        cache_config=CacheConfig(block_size=block_size, num_gpu_blocks_override=num_blocks)
    )
    groups = kv_cache_utils.get_kv_cache_groups(vllm_config, dict(specs))
    config = kv_cache_utils.get_kv_cache_config_from_groups(
        vllm_config, groups, available_memory=1 << 40
    )
    return config, kv_cache_utils.generate_scheduler_kv_cache_config([config])


class FlashInferHndBackend:
    """Shape and order of FlashInfer's backend with heads outside tokens."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, **_: object
    ) -> tuple[int, ...]:
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        return 0, 1, 3, 2, 4


def register(
    config: KVCacheConfig,
    backends: Mapping[str, type],
    kernel_block_size: int | None = None,
    cache_dtype: str = "auto",
) -> dict[str, object]:
    """The tensors of a config, as vLLM's model runner makes them; backends by ends of layer names.

    ``kernel_block_size`` is that of the attention kernels, where it is not the config's.
    """
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
    # As much of a model runner as allocating and shaping KV caches reads.
    runner = SimpleNamespace(
        device="cpu",
        runner_only_attn_layers=frozenset(),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        _kv_cache_spec_attn_group_iterator=lambda: iter(groups),
    )
    arrange = GPUModelRunner._update_hybrid_attention_mamba_layout
    runner._update_hybrid_attention_mamba_layout = partial(arrange, runner)
    block_sizes = [
        kernel_block_size or group.kv_cache_spec.block_size for group in config.kv_cache_groups
    ]
    raw = GPUModelRunner._allocate_kv_cache_tensors(runner, config)
    return GPUModelRunner._reshape_kv_cache_tensors(runner, raw, block_sizes)


def _spec_of(group: KVCacheGroupSpec, layer_name: str) -> KVCacheSpec:
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[layer_name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _backend(backends: Mapping[str, type], layer_name: str) -> type:
    return next(backend for suffix, backend in backends.items() if layer_name.endswith(suffix))


HEADS, HEAD_SIZE, BLOCK, WINDOW = 2, 64, 16, 40


def _full_and_window(block: int, num_layers: int = 4) -> dict[str, KVCacheSpec]:
    sizes = {
        "block_size": block,
        "num_kv_heads": HEADS,
        "head_size": HEAD_SIZE,
        "dtype": torch.bfloat16,
    }
    specs: dict[str, KVCacheSpec] = {}
    for layer in range(num_layers):
        specs[f"{layer}.full"] = FullAttentionSpec(**sizes)
        specs[f"{layer}.window"] = SlidingWindowSpec(sliding_window=WINDOW, **sizes)
    return specs


def keys_and_values(
    backend: type,
    token_axis: int | None,
    *,
    addressing: RowAddressing | None = RowAddressing.TOKENS,
    blocks_per_page: int = 1,
    num_blocks: int = 300,
) -> LayoutFixture:
    """Full attention and a sliding window, K and V as the backend shapes them.

    Layers of both groups share storages. ``token_axis`` None: a page is one row.
    """
    block = BLOCK * blocks_per_page
    page_axis = backend.get_kv_cache_shape(40, BLOCK, HEADS, HEAD_SIZE).index(40)
    config, scheduler_config = plan(_full_and_window(block), num_blocks, block)
    kv_caches = register(config, {"": backend}, kernel_block_size=BLOCK)
    per_row = block if token_axis is None else 1
    return LayoutFixture(
        config,
        scheduler_config,
        kv_caches,
        paged_tensors(
            config,
            kv_caches,
            {"": [(page_axis, token_axis, blocks_per_page)]},
            {
                "full": Reach(GroupKind.FULL, block, per_row),
                "window": Reach(GroupKind.WINDOW, block, per_row, WINDOW),
            },
        ),
        addressing,
    )


# All pages of K, then all of V.
keys_then_values = partial(keys_and_values, RocmAttentionBackend, 2)
# vLLM's CPU backend stores K transposed: a page is one row.
cpu_attention = partial(keys_and_values, CPUAttentionBackend, None, addressing=None)


def latent_rows() -> LayoutFixture:
    """MLA in three dimensions."""
    spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    config, scheduler_config = plan({f"{layer}.attn": spec for layer in range(3)}, 150)
    kv_caches = register(config, {"": MLACommonBackend})
    tensors = paged_tensors(
        config, kv_caches, {"": [(0, 1)]}, {"": Reach(GroupKind.FULL, BLOCK, 1)}
    )
    return LayoutFixture(config, scheduler_config, kv_caches, tensors, RowAddressing.TOKENS)


def attention_and_mamba() -> LayoutFixture:
    """Two states per Mamba layer in padded pages; storages shared with attention."""
    attention = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16
    )
    mamba = MambaSpec(
        block_size=BLOCK,
        shapes=((3, 64), (2, 16, 16)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=attention.page_size_bytes,
        mamba_cache_mode="align",
    )
    specs = {f"{layer}.mamba": mamba for layer in range(3)} | {"3.attn": attention}
    config, scheduler_config = plan(specs, 300)
    kv_caches = register(config, {"": RocmAttentionBackend})
    tensors = paged_tensors(
        config,
        kv_caches,
        {"attn": [(1, 2)], "mamba": [(0,), (0,)]},
        {
            "attn": Reach(GroupKind.FULL, BLOCK, 1),
            "mamba": Reach(GroupKind.STATE, BLOCK, BLOCK, holds_states=True),
        },
    )
    return LayoutFixture(config, scheduler_config, kv_caches, tensors, RowAddressing.TOKENS)


def deepseek_v4(cache_dtype: str, num_layers: int = 43, num_blocks: int = 64) -> LayoutFixture:
    """DeepSeek-V4 Flash as upstream vLLM 0.23.0 lays it out.

    Two layers are not compressed, then ratios are 4 and 128 in turn. ``cache_dtype`` is
    ``fp8_ds_mla`` (packed bytes in padded pages) or ``auto`` (bfloat16 rows).
    """
    from vllm.models.deepseek_v4.compressor import CompressorBackend
    from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLABackend
    from vllm.v1.attention.backends.mla.indexer import DeepseekV4IndexerBackend
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWABackend

    config, scheduler_config = plan(_deepseek_v4_specs(cache_dtype, num_layers), num_blocks, 256)
    backends = {
        "swa_cache": DeepseekSparseSWABackend,
        "attn": DeepseekV4FlashMLABackend,
        "k_cache": DeepseekV4IndexerBackend,
        "state_cache": CompressorBackend,
    }
    kv_caches = register(config, backends, cache_dtype=cache_dtype)
    is_packed = cache_dtype == "fp8_ds_mla"
    rows = (0, None) if is_packed else (0, 1)
    reaches = {
        "c4.attn": Reach(GroupKind.FULL, 256, 256 if is_packed else 4),
        "c128.attn": Reach(GroupKind.FULL, 256, 256 if is_packed else 128),
        "indexer.k_cache": Reach(GroupKind.FULL, 256, 256),
        "swa_cache": Reach(GroupKind.WINDOW, 64, 64 if is_packed else 1, 128),
        "c4.state_cache": Reach(GroupKind.WINDOW, 4, 1, 8, holds_states=True),
        "c128.state_cache": Reach(GroupKind.WINDOW, 8, 1, 128, 128, holds_states=True),
    }
    describe = {
        "attn": [rows],
        "swa_cache": [rows],
        "k_cache": [(0, None)],
        "state_cache": [(0, 1)],
    }
    tensors = paged_tensors(config, kv_caches, describe, reaches)
    return LayoutFixture(config, scheduler_config, kv_caches, tensors, RowAddressing.TOKENS)


def _deepseek_v4_specs(cache_dtype: str, num_layers: int) -> dict[str, KVCacheSpec]:
    """One spec per cache that the model registers; names end in ratio and cache."""
    is_packed = cache_dtype == "fp8_ds_mla"
    alignment = 576 if is_packed else None
    latent = {
        "num_kv_heads": 1,
        "head_size": 512,
        "dtype": torch.uint8 if is_packed else torch.bfloat16,
        "cache_dtype_str": cache_dtype,
        "alignment": alignment,
        "model_version": "deepseek_v4",
    }
    specs: dict[str, KVCacheSpec] = {}
    for layer in range(num_layers):
        specs[f"{layer}.swa_cache"] = SlidingWindowMLASpec(
            block_size=64, sliding_window=128, **latent
        )
        if layer < 2:
            continue
        ratio = 4 if layer % 2 == 0 else 128
        prefix = f"{layer}.c{ratio}"
        specs[f"{prefix}.attn"] = MLAAttentionSpec(block_size=256, compress_ratio=ratio, **latent)
        specs[f"{prefix}.state_cache"] = _state_spec(ratio, 512, alignment)
        if ratio == 4:
            specs[f"{layer}.indexer.k_cache"] = MLAAttentionSpec(
                block_size=256,
                num_kv_heads=1,
                head_size=132,
                dtype=torch.uint8,
                compress_ratio=4,
                alignment=576,
            )
            specs[f"{layer}.indexer.c4.state_cache"] = _state_spec(4, 128, alignment)
    return specs


def _state_spec(ratio: int, head_dim: int, alignment: int | None) -> SlidingWindowMLASpec:
    overlap = 2 if ratio == 4 else 1
    return SlidingWindowMLASpec(
        block_size=4 if ratio == 4 else 8,
        num_kv_heads=1,
        head_size=2 * overlap * head_dim,
        dtype=torch.float32,
        sliding_window=overlap * ratio,
        alignment=alignment,
    )


_four_kernel_blocks = partial(keys_and_values, blocks_per_page=4, num_blocks=80)
FIXTURES: dict[str, Callable[[], LayoutFixture]] = {
    "keys then values": keys_then_values,
    # K and V together in each page; in vLLM 0.23.0 together in each row.
    "keys and values by page": partial(keys_and_values, FlexAttentionBackend, 2),
    "heads outside tokens": partial(keys_and_values, FlashInferHndBackend, 2),
    # Rows are adjacent across kernel blocks; or each has its own K and V: a page is one row.
    "kernel blocks": partial(_four_kernel_blocks, RocmAttentionBackend, 2),
    "kernel blocks apart": partial(_four_kernel_blocks, FlashInferHndBackend, None),
    "CPU attention": cpu_attention,
    "latent rows": latent_rows,
    "attention and Mamba": attention_and_mamba,
    "DeepSeek-V4, packed": partial(deepseek_v4, "fp8_ds_mla", 6, 96),
    "DeepSeek-V4, bfloat16": partial(deepseek_v4, "auto", 6, 96),
}
