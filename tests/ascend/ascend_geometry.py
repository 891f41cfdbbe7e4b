# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""KV cache layouts of DeepSeek-V4 on Ascend, as the scheduler sees them.

The true layouts come out of vllm-ascend's own planning; the small one has the same shape at sizes
that can be enumerated. They are built from the spec classes of the installed vllm-ascend, which
must be active (see ``conftest.py``). This module knows nothing of requests or retention.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
import vllm_ascend
from support.layout import upstream_line
from support.layout.upstream_line import HAS_ONE_VIEW
from support.scheduler.block_manager import Layout
from vllm.config import CacheConfig, VllmConfig
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.core import kv_cache_utils, single_type_kv_cache_manager
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm_ascend.core.kv_cache_interface import (
    AscendMLAAttentionSpec,
    AscendSlidingWindowMLASpec,
)

WINDOW_TOKENS = 128
HEAD_DIM = 512
INDEXER_HEAD_DIM = 128
INDEXER_ON_A3 = {"dtype": torch.int8, "scale_dtype": torch.float16}

NUM_LAYERS = 43
"""A model like Flash: two layers without compression, then ratios 4 and 128 in turn."""


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """The block sizes that one ``--block-size`` stands for, in rows, and its page sizes.

    Attributes:
        mla: The size for both compressed groups; a row covers ``compress_ratio`` tokens.
        window: The size for the sliding-window groups.
        c4_state: The size for the compressor states of ratio 4.
        c128_state: The size for the compressor states of ratio 128.
        page_bytes: Page sizes of the indexer's planes and of all others.
    """

    mla: int
    window: int
    c4_state: int
    c128_state: int
    page_bytes: tuple[int, int]


HIT_UNIT_TOKENS = {128: 16384, 32: 4096}
"""The least common multiple of the tokens per block of all groups, by ``--block-size``."""

SMALL_HIT_UNIT_TOKENS = 32


def _published_block_sizes() -> dict[int, BlockSizes]:
    """The table in vllm-ascend's sources, by ``--block-size``.

    The table is read as text, because its module needs a device to import.
    """
    path = Path(vllm_ascend.__file__).parent / "models/layer/attention/layer.py"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_DSV4_BLOCK_SIZES":
            return {
                block_size: BlockSizes(*sizes, page_bytes=tuple(page_bytes))
                for block_size, (sizes, page_bytes) in ast.literal_eval(node.value).items()
            }
    raise AssertionError(f"no _DSV4_BLOCK_SIZES in {path}")


BLOCK_SIZES = _published_block_sizes()


def planned_config(block_size: int, num_blocks: int = 1024) -> KVCacheConfig:
    """The layout that vLLM and vllm-ascend plan for the layers of a Flash-like DeepSeek-V4.

    Args:
        block_size: ``--block-size``, a key of `BLOCK_SIZES`.
        num_blocks: Size of the pool.

    Returns:
        The configuration as the scheduler gets it: one spec per group.
    """
    return plan(layer_specs(BLOCK_SIZES[block_size]), block_size, num_blocks)[1]


def plan(
    specs: dict[str, KVCacheSpec], block_size: int, num_blocks: int
) -> tuple[KVCacheConfig, KVCacheConfig]:
    """The configs of a worker and of the scheduler, by vLLM and vllm-ascend."""
    # The engine core does this before planning, too.
    single_type_kv_cache_manager.register_all_kvcache_specs(VllmConfig())
    return upstream_line.plan(specs, {"": AttentionBackend}, num_blocks, block_size)


def planned_layout(block_size: int, eagle_group_ids: frozenset[int] = frozenset()) -> Layout:
    specs = tuple(group.kv_cache_spec for group in planned_config(block_size).kv_cache_groups)
    return Layout(specs, eagle_group_ids)


def resolved_block_sizes(config: KVCacheConfig, block_size: int) -> tuple[int, int]:
    """``(scheduler_block_size, hash_block_size)`` as the engine resolves them."""
    vllm_config = VllmConfig(cache_config=CacheConfig(block_size=block_size))
    return kv_cache_utils.resolve_kv_cache_block_sizes(config, vllm_config)


def layer_specs(
    sizes: BlockSizes,
    num_layers: int = NUM_LAYERS,
    num_uncompressed: int = 2,
    latent: Mapping[str, object] = MappingProxyType({}),
    indexer: Mapping[str, object] = INDEXER_ON_A3,
) -> dict[str, KVCacheSpec]:
    """One spec per cache that the model registers, in the model's order.

    Args:
        latent: What attention's specs have besides, ``indexer`` those of the indexer's keys.
    """
    specs: dict[str, KVCacheSpec] = {}
    small_page_bytes, large_page_bytes = sizes.page_bytes
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}.self_attn"
        if layer >= num_uncompressed and layer % 2 == 0:
            specs |= {
                f"{prefix}.attn": compressed_spec(sizes.mla, 4, **latent),
                f"{prefix}.indexer.k_cache": compressed_spec(
                    sizes.mla, 4, head_size=INDEXER_HEAD_DIM, scale_dim=1, **indexer
                ),
                f"{prefix}.compressor.state_cache": state_spec(
                    sizes.c4_state, 8, 4 * HEAD_DIM, large_page_bytes
                ),
                f"{prefix}.indexer.compressor.state_cache": state_spec(
                    sizes.c4_state, 8, 4 * INDEXER_HEAD_DIM, small_page_bytes
                ),
            }
        elif layer >= num_uncompressed:
            specs |= {
                f"{prefix}.attn": compressed_spec(sizes.mla, 128, **latent),
                f"{prefix}.compressor.state_cache": state_spec(
                    sizes.c128_state, 128, 2 * HEAD_DIM, large_page_bytes
                ),
            }
        specs[f"{prefix}.swa_cache"] = window_spec(
            sizes.window, WINDOW_TOKENS, model_version="deepseek_v4", **latent
        )
    return specs


def compressed_spec(rows: int, compress_ratio: int, **overrides: object) -> KVCacheSpec:
    """A compressed MLA group, each of whose rows has ``compress_ratio`` tokens.

    vLLM-Ascend 0.23 counts its blocks in rows.
    """
    fields = {
        "block_size": rows * compress_ratio if HAS_ONE_VIEW else rows,
        "num_kv_heads": 1,
        "head_size": HEAD_DIM,
        "dtype": torch.bfloat16,
        "model_version": "deepseek_v4",
        "cache_dtype_str": "auto",
        **upstream_line.compressed(compress_ratio),
    }
    return AscendMLAAttentionSpec(**fields | overrides)


def window_spec(block_size: int, window_tokens: int, **overrides: object) -> KVCacheSpec:
    fields = {
        "block_size": block_size,
        "num_kv_heads": 1,
        "head_size": HEAD_DIM,
        "dtype": torch.bfloat16,
        "sliding_window": window_tokens,
    }
    return AscendSlidingWindowMLASpec(**fields | overrides)


def state_spec(block_size: int, window_tokens: int, state_dim: int, page_bytes: int) -> KVCacheSpec:
    """Compressor states: to the scheduler, a sliding window like any other."""
    return window_spec(
        block_size,
        window_tokens,
        head_size=state_dim,
        dtype=torch.float32,
        page_size_padded=page_bytes,
    )


def small_layout(eagle_group_ids: frozenset[int] = frozenset(), window_tokens: int = 6) -> Layout:
    """Group for group the shape of the true layout; hits land on multiples of 32 tokens."""
    return Layout(
        (
            compressed_spec(4, 4),
            compressed_spec(4, 8),
            window_spec(4, window_tokens, model_version="deepseek_v4"),
            window_spec(4, window_tokens, model_version="deepseek_v4"),
            window_spec(2, 3, dtype=torch.float32),
            window_spec(4, 16, dtype=torch.float32),
        ),
        eagle_group_ids,
    )
