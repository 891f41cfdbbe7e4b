# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Layouts that the installed vLLM plans, allocates and shapes. Nothing is computed on them.

Each function makes a new worker: a config, tensors with their own memory, and the facts about the
tensors, written by hand. vLLM's own functions plan and shape. Only the layers are invented.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend
from vllm.v1.attention.backends.rocm_attn import RocmAttentionBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from support.layout.reach import Reach
from support.layout.truth import LayoutFixture, paged_tensors
from support.layout.upstream_line import (
    HAS_ONE_VIEW,
    compressed,
    packed,
    page_axis_of,
    plan,
    register,
    token_axis_of,
    views,
)
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import RowAddressing


class FlashInferHndBackend(AttentionBackend):
    """A backend with FlashInfer's shape and order. Heads come before tokens."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, **_: object
    ) -> tuple[int, ...]:
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        return 0, 1, 3, 2, 4

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[object, ...]:
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.LBHNC,)


HEADS = 2
HEAD_SIZE = 64
BLOCK = 16
WINDOW = 40


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
    """Full attention and a sliding window. The backend shapes K and V.

    The layers of both groups share storages. If ``token_axis`` is None, a page is one row.
    """
    block = BLOCK * blocks_per_page
    config, scheduler_config = plan(_full_and_window(block), {"": backend}, num_blocks, block)
    kv_caches = register(config, {"": backend}, kernel_block_size=BLOCK)
    token_axis = token_axis_of(token_axis)
    per_row = block if token_axis is None else 1
    return LayoutFixture(
        config,
        scheduler_config,
        kv_caches,
        paged_tensors(
            config,
            kv_caches,
            {"": [(page_axis_of(backend), token_axis, blocks_per_page)]},
            {
                "full": Reach(GroupKind.FULL, block, per_row),
                "window": Reach(GroupKind.WINDOW, block, per_row, WINDOW),
            },
        ),
        addressing,
    )


# The tensor first has all pages of K, and then all pages of V.
keys_then_values = partial(keys_and_values, RocmAttentionBackend, 2)
# vLLM's CPU backend stores K transposed, so a page is one row.
cpu_attention = partial(keys_and_values, CPUAttentionBackend, None, addressing=None)


def latent_rows() -> LayoutFixture:
    """MLA. Before vLLM 0.30, its tensors have three dimensions."""
    spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    backends = {"": MLACommonBackend}
    config, scheduler_config = plan({f"{layer}.attn": spec for layer in range(3)}, backends, 150)
    kv_caches = register(config, backends)
    token_axis = token_axis_of(1)
    per_row = BLOCK if token_axis is None else 1
    tensors = paged_tensors(
        config, kv_caches, {"": [(0, token_axis)]}, {"": Reach(GroupKind.FULL, BLOCK, per_row)}
    )
    return LayoutFixture(config, scheduler_config, kv_caches, tensors, RowAddressing.TOKENS)


def attention_and_mamba() -> LayoutFixture:
    """Mamba layers with two states each in padded pages. They share storages with attention."""
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
    backends = {"": RocmAttentionBackend}
    config, scheduler_config = plan(specs, backends, 300)
    kv_caches = register(config, backends)
    token_axis = token_axis_of(2)
    per_row = BLOCK if token_axis is None else 1
    tensors = paged_tensors(
        config,
        kv_caches,
        {
            "attn": [(page_axis_of(RocmAttentionBackend), token_axis)],
            "mamba": [(0,)] * views(len(mamba.shapes)),
        },
        {
            "attn": Reach(GroupKind.FULL, BLOCK, per_row),
            "mamba": Reach(GroupKind.STATE, BLOCK, BLOCK, holds_states=True),
        },
    )
    return LayoutFixture(config, scheduler_config, kv_caches, tensors, RowAddressing.TOKENS)


def deepseek_v4(cache_dtype: str, num_layers: int = 43, num_blocks: int = 64) -> LayoutFixture:
    """DeepSeek-V4 Flash as upstream vLLM lays it out.

    Two layers are not compressed. Then the ratios are 4 and 128 in turn. ``cache_dtype`` is
    ``fp8_ds_mla`` (packed bytes in padded pages) or ``auto`` (bfloat16 rows).
    """
    from vllm.models.deepseek_v4.compressor import CompressorBackend
    from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLABackend
    from vllm.v1.attention.backends.mla.indexer import DeepseekV4IndexerBackend
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWABackend

    backends = {
        "swa_cache": DeepseekSparseSWABackend,
        "attn": DeepseekV4FlashMLABackend,
        "k_cache": DeepseekV4IndexerBackend,
        "state_cache": CompressorBackend,
    }
    specs = _deepseek_v4_specs(cache_dtype, num_layers)
    config, scheduler_config = plan(specs, backends, num_blocks, 256)
    kv_caches = register(config, backends, cache_dtype=cache_dtype)
    by_row = (0, token_axis_of(1))
    of_latents = (0, None) if cache_dtype == "fp8_ds_mla" else by_row
    tensors = paged_tensors(
        config,
        kv_caches,
        {
            "attn": [of_latents],
            "swa_cache": [of_latents],
            "k_cache": [(0, None)],
            "state_cache": [by_row],
        },
        _deepseek_v4_reaches(of_latents != (0, None), by_row != (0, None)),
    )
    return LayoutFixture(config, scheduler_config, kv_caches, tensors, RowAddressing.TOKENS)


def _deepseek_v4_reaches(has_latent_rows: bool, has_state_rows: bool) -> dict[str, Reach]:
    """Reaches by the end of a layer's name. If a page has no rows of its own, it is one row."""

    def full(tokens_per_row: int) -> Reach:
        return Reach(GroupKind.FULL, 256, tokens_per_row if has_latent_rows else 256)

    def states(tokens: int, window_tokens: int, restart_tokens: int = 0) -> Reach:
        per_row = 1 if has_state_rows else tokens
        return Reach(
            GroupKind.WINDOW, tokens, per_row, window_tokens, restart_tokens, holds_states=True
        )

    return {
        "c4.attn": full(4),
        "c128.attn": full(128),
        "indexer.k_cache": Reach(GroupKind.FULL, 256, 256),
        "swa_cache": Reach(GroupKind.WINDOW, 64, 1 if has_latent_rows else 64, 128),
        "c4.state_cache": states(4, 8),
        "c128.state_cache": states(8, 128, 128),
    }


def _deepseek_v4_specs(cache_dtype: str, num_layers: int) -> dict[str, KVCacheSpec]:
    """One spec for each cache that the model registers. Names end with the ratio and the cache."""
    is_packed = cache_dtype == "fp8_ds_mla"
    alignment = 576 if is_packed else None
    latent = {
        "num_kv_heads": 1,
        "head_size": 512,
        "dtype": torch.uint8 if is_packed else torch.bfloat16,
        "cache_dtype_str": cache_dtype,
        "alignment": alignment,
        "model_version": "deepseek_v4",
        **(packed(584) if is_packed else {}),
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
        specs[f"{prefix}.attn"] = MLAAttentionSpec(block_size=256, **compressed(ratio), **latent)
        specs[f"{prefix}.state_cache"] = _state_spec(ratio, 512, alignment)
        if ratio == 4:
            specs[f"{layer}.indexer.k_cache"] = MLAAttentionSpec(
                block_size=256,
                num_kv_heads=1,
                head_size=132,
                dtype=torch.uint8,
                alignment=576,
                **compressed(4),
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
# Since vLLM 0.30, only backends with dense pages can have kernel blocks.
_dense_backend = FlexAttentionBackend if HAS_ONE_VIEW else RocmAttentionBackend
FIXTURES: dict[str, Callable[[], LayoutFixture]] = {
    "keys then values": keys_then_values,
    # K and V are together in each page, or in vLLM 0.23.0 together in each row.
    "keys and values by page": partial(keys_and_values, FlexAttentionBackend, 2),
    "heads outside tokens": partial(keys_and_values, FlashInferHndBackend, 2),
    # Rows are adjacent across kernel blocks. If each block has its own K and V, a page is one row.
    "kernel blocks": partial(_four_kernel_blocks, _dense_backend, 2),
    "kernel blocks apart": partial(_four_kernel_blocks, FlashInferHndBackend, None),
    "CPU attention": cpu_attention,
    "latent rows": latent_rows,
    "attention and Mamba": attention_and_mamba,
    "DeepSeek-V4, packed": partial(deepseek_v4, "fp8_ds_mla", 6, 96),
    "DeepSeek-V4, bfloat16": partial(deepseek_v4, "auto", 6, 96),
}
