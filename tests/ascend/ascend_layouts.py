# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Layouts that the real vllm-ascend plans, allocates and shapes, with what they hold by hand.

Each function makes a new worker. DeepSeek-V4 has the geometry of ``ascend_geometry``; the others
are three layers each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import ascend_geometry
import torch
from ascend_geometry import BLOCK_SIZES, AscendMLAAttentionSpec, BlockSizes, plan
from ascend_runner import INDEX_DIM, LATENT_DIM, ROPE_DIM, attention_backend, kv_caches
from support.layout.reach import Reach
from support.layout.truth import LayoutFixture, paged_tensors
from support.layout.upstream_line import HAS_ONE_VIEW
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import RowAddressing

A5_BLOCK_SIZES = BlockSizes(128, 128, 8, 16, (16896, 81920))
"""``--block-size 128`` on A5 (``get_dsv4_block_sizes``)."""


def deepseek_v4(
    block_size: int = 128, num_blocks: int = 24, has_connector: bool = True
) -> LayoutFixture:
    """43 layers; six groups share the blobs."""
    sizes = BLOCK_SIZES[block_size]
    config, scheduler_config = plan(ascend_geometry.layer_specs(sizes), block_size, num_blocks)
    return _deepseek_v4(config, scheduler_config, sizes, has_connector, "A3", keys_by_row=True)


def deepseek_v4_on_a5(num_blocks: int = 88) -> LayoutFixture:
    """Six layers. The indexer registers a third view, over keys and scales."""
    specs = ascend_geometry.layer_specs(
        A5_BLOCK_SIZES,
        num_layers=6,
        num_uncompressed=0,
        latent={"head_size": 640, "dtype": torch.float8_e4m3fn},
        indexer={"dtype": torch.float8_e4m3fn, "scale_dtype": torch.float32},
    )
    config, scheduler_config = plan(specs, 128, num_blocks)
    return _deepseek_v4(config, scheduler_config, A5_BLOCK_SIZES, True, "A5", keys_by_row=False)


def _deepseek_v4(
    config: KVCacheConfig,
    scheduler_config: KVCacheConfig,
    sizes: BlockSizes,
    has_connector: bool,
    device_type: str,
    *,
    keys_by_row: bool,
) -> LayoutFixture:
    caches = kv_caches(
        config,
        attention_backend("dsa_v1"),
        has_connector=has_connector,
        is_compressed=True,
        device_type=device_type,
    )
    indexer_row_tokens = 4 if keys_by_row else 4 * sizes.mla
    by_row = (0, 1)
    indexer = [by_row, by_row] if keys_by_row else [(0,), (0,), (0,)]
    reaches = {
        name: reach
        for name, reach in _reaches(config, sizes).items()
        if not name.endswith("k_cache")
    }
    return LayoutFixture(
        config,
        scheduler_config,
        caches,
        paged_tensors(
            config,
            caches,
            {"": [by_row], "k_cache": indexer},
            reaches | {"k_cache": Reach(GroupKind.FULL, 4 * sizes.mla, indexer_row_tokens)},
        ),
        RowAddressing.TOKENS,
    )


def _reaches(config: KVCacheConfig, sizes: BlockSizes) -> dict[str, Reach]:
    """The reaches by layer. The number and the place of a layer say what it is."""
    ratios = {
        name.removesuffix(".attn"): 4 if int(name.split(".")[2]) % 2 == 0 else 128
        for group in config.kv_cache_groups
        for name in group.layer_names
        if name.endswith(".attn")
    }
    c4_state = Reach(GroupKind.WINDOW, sizes.c4_state, 1, 8, holds_states=True)
    c128_state = Reach(GroupKind.WINDOW, sizes.c128_state, 1, 128, 128, holds_states=True)
    found = {
        "swa_cache": Reach(GroupKind.WINDOW, sizes.window, 1, 128),
        "indexer.compressor.state_cache": c4_state,
    }
    for prefix, ratio in ratios.items():
        found[f"{prefix}.attn"] = Reach(GroupKind.FULL, sizes.mla * ratio, ratio)
        state = c4_state if ratio == 4 else c128_state
        found[f"{prefix}.compressor.state_cache"] = state
    return found


def _three_layers(
    specs: dict[str, KVCacheSpec],
    backend: str,
    views_per_layer: int,
    reaches: dict[str, Reach],
    **runner: bool,
) -> LayoutFixture:
    return _registered(specs, backend, {"": [(0, 1)] * views_per_layer}, reaches, **runner)


def _registered(
    specs: dict[str, KVCacheSpec],
    backend: str,
    axes: dict[str, list[tuple[int, ...]]],
    reaches: dict[str, Reach],
    **runner: bool,
) -> LayoutFixture:
    config, scheduler_config = plan(specs, 128, 80)
    caches = kv_caches(config, attention_backend(backend), has_connector=True, **runner)
    tensors = paged_tensors(config, caches, axes, reaches)
    return LayoutFixture(config, scheduler_config, caches, tensors, RowAddressing.TOKENS)


def latent_and_rope() -> LayoutFixture:
    """MLA: a pair of tensors of unequal rows."""
    spec = AscendMLAAttentionSpec(
        block_size=128,
        num_kv_heads=1,
        head_size=LATENT_DIM + ROPE_DIM,
        dtype=torch.bfloat16,
        **_INT8_CACHES,
    )
    specs = {f"model.layers.{layer}.self_attn.attn": spec for layer in range(3)}
    return _three_layers(specs, "mla_v1", 2, {"": Reach(GroupKind.FULL, 128, 1)})


def tiled_latent_and_rope() -> LayoutFixture:
    """The same with ``enable_kv_nz``: tensors of the same shapes, whose kernels write tiles."""
    by_row = latent_and_rope()
    page = Reach(GroupKind.FULL, 128, 128)
    return replace(
        by_row,
        tensors=tuple(replace(paged, token_axis=None, reach=page) for paged in by_row.tensors),
        nz_layers=frozenset(by_row.kv_caches),
    )


def sparse_c8() -> LayoutFixture:
    """DSA-C8: latent, rope, int8 keys of the indexer and their fp16 scales.

    They are one layer, or since vLLM-Ascend 0.30 the indexer's are one of their own.
    """
    latent = {"block_size": 128, "num_kv_heads": 1, "dtype": torch.bfloat16}
    specs: dict[str, KVCacheSpec] = {}
    for layer in range(3):
        prefix = f"model.layers.{layer}.self_attn"
        if HAS_ONE_VIEW:
            from vllm_ascend.core.kv_cache_interface import AscendSFAIndexerCacheSpec

            specs[f"{prefix}.attn"] = AscendMLAAttentionSpec(
                head_size=LATENT_DIM + ROPE_DIM, **latent
            )
            specs[f"{prefix}.indexer.k_cache"] = AscendSFAIndexerCacheSpec(
                head_size=INDEX_DIM,
                scale_dim=1,
                cache_sparse_li_c8=True,
                **latent | {"dtype": torch.int8, "scale_dtype": torch.float16},
            )
            continue
        dims = (LATENT_DIM, ROPE_DIM, INDEX_DIM)
        specs[f"{prefix}.attn"] = AscendMLAAttentionSpec(
            head_size=sum(dims),
            sparse_head_dim=dims,
            cache_sparse_li_c8=True,
            **latent,
            **_INT8_CACHES,
        )
    num_views = 2 if HAS_ONE_VIEW else 4
    reaches = {"": Reach(GroupKind.FULL, 128, 1)}
    return _three_layers(specs, "sfa_v1", num_views, reaches, is_sparse=True)


def keys_and_values(has_paged_attention: bool = True) -> LayoutFixture:
    """Full attention and a sliding window, K and V in tensors of their own."""
    sizes = {"block_size": 128, "num_kv_heads": 4, "head_size": 64, "dtype": torch.bfloat16}
    specs: dict[str, KVCacheSpec] = {}
    for layer in range(3):
        specs[f"model.layers.{layer}.self_attn.attn"] = FullAttentionSpec(**sizes)
        specs[f"model.layers.{layer}.self_attn.window"] = SlidingWindowSpec(
            sliding_window=200, **sizes
        )
    reaches = {
        "attn": Reach(GroupKind.FULL, 128, 1),
        "window": Reach(GroupKind.WINDOW, 128, 1, 200),
    }
    return _three_layers(specs, "attention_v1", 2, reaches, has_paged_attention=has_paged_attention)


def attention_and_mamba() -> LayoutFixture:
    """Qwen3-Next-like: two states in each page of three layers, in the storage of attention."""
    attention = FullAttentionSpec(
        block_size=128, num_kv_heads=2, head_size=64, dtype=torch.bfloat16
    )
    mamba = MambaSpec(
        block_size=128,
        shapes=((3, 512), (4, 64, 32)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=attention.page_size_bytes,
        mamba_cache_mode="align",
    )
    specs: dict[str, KVCacheSpec] = {
        f"model.layers.{layer}.linear_attn": mamba for layer in range(3)
    }
    specs["model.layers.3.self_attn.attn"] = attention
    return _registered(
        specs,
        "attention_v1",
        {"self_attn.attn": [(0, 1)] * 2, "linear_attn": [(0,)] * 2},
        {
            "self_attn.attn": Reach(GroupKind.FULL, 128, 1),
            "linear_attn": Reach(GroupKind.STATE, 128, 128, holds_states=True),
        },
        has_states=True,
    )


_INT8_CACHES = (
    {}
    if HAS_ONE_VIEW
    else {"c8_k_cache_dtype": torch.int8, "c8_k_scale_cache_dtype": torch.float16}
)
"""vLLM-Ascend 0.23's defaults where the device is not A5. It would ask the device for them."""

FIXTURES: dict[str, Callable[[], LayoutFixture]] = {
    "DeepSeek-V4": partial(deepseek_v4, 32, 88),
    "DeepSeek-V4, no connector": partial(deepseek_v4, 32, 88, has_connector=False),
    "latent and rope": latent_and_rope,
    "latent and rope in tiles": tiled_latent_and_rope,
    "sparse C8": sparse_c8,
    "keys and values": keys_and_values,
    "keys and values by page": partial(keys_and_values, has_paged_attention=False),
    "DeepSeek-V4 on A5": deepseek_v4_on_a5,
}
if HAS_ONE_VIEW:
    # vLLM-Ascend 0.23 arranges states by the block sizes that its configuration has computed.
    FIXTURES["attention and Mamba"] = attention_and_mamba
