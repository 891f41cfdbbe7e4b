# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The pages that a worker would register for each layout of the benchmark, without memory.

The planning and shaping code of vLLM or vllm-ascend makes the pages of DeepSeek-V4. The pages of
other layouts are made here, each with the sizes of one model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from retention.layouts import ASCEND_BLOCK_SIZES, PLAIN_LAYOUTS
from support.scheduler.layouts import Attention, Group

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import KVLayout, LayoutGroup, Plane, RegisteredStorage

_FEW_BLOCKS = 4
"""The number of blocks of the tensors that are made to read their shapes."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of the layers of one KV cache group.

    Attributes:
        num_layers: The number of layers in each group.
        token_bytes: The bytes of K and V of one token in one layer.
        state_bytes: The bytes of a state in one layer.
    """

    num_layers: int
    token_bytes: int
    state_bytes: int = 0


MODELS = {
    # Qwen3-8B: 36 layers, 8 heads of 128.
    "full": ModelSizes(36, 2 * 8 * 128 * 2),
    # gpt-oss-120b: 36 layers, 8 heads of 64.
    "gptoss": ModelSizes(18, 2 * 8 * 64 * 2),
    # gemma-3-27b: 62 layers, one in six without a window; 16 heads of 128.
    "gemma": ModelSizes(10, 2 * 16 * 128 * 2),
    "gemma128": ModelSizes(10, 2 * 16 * 128 * 2),
    "gptoss128": ModelSizes(18, 2 * 8 * 64 * 2),
    # Qwen3-Next-80B: 48 layers, one in four with attention, 2 heads of 256.
    "mamba": ModelSizes(12, 2 * 2 * 256 * 2, 32 * 128 * 128 * 4 // 2 + 3 * 8192 * 2),
    # Qwen3.5-397B-A17B: 60 layers, one in four with attention, 2 heads of 256.
    "qwen3.5": ModelSizes(15, 2 * 2 * 256 * 2, 64 * 128 * 128 * 4 + 3 * 12288 * 2),
    # Kimi-Linear-48B-A3B: 27 layers, one in four with latents of 576.
    "kimi": ModelSizes(7, 576 * 2, 32 * 128 * 128 * 4 + 3 * 12288 * 2),
}


def pages_of(layout_name: str, num_blocks: int) -> KVLayout:
    """The layout of one worker's pages."""
    if layout_name in ASCEND_BLOCK_SIZES:
        import ascend_layouts

        block_size = ASCEND_BLOCK_SIZES[layout_name]
        layout = ascend_layouts.deepseek_v4(block_size, _FEW_BLOCKS).layout()
    elif layout_name == "dsv4":
        from support.layout.fixtures import deepseek_v4

        layout = deepseek_v4("fp8_ds_mla", num_blocks=_FEW_BLOCKS).layout()
    else:
        groups = PLAIN_LAYOUTS[layout_name].groups
        layout = made_up(groups, MODELS[layout_name])
    return replace(layout, num_pages=num_blocks)


def made_up(groups: tuple[Group, ...], sizes: ModelSizes) -> KVLayout:
    return KVLayout(
        storages=(RegisteredStorage(1 << 20, 1 << 50),),
        groups=tuple(_group(index, group, sizes) for index, group in enumerate(groups)),
        num_pages=_FEW_BLOCKS,
        num_scheduler_groups=len(groups),
    )


def _group(index: int, group: Group, sizes: ModelSizes) -> LayoutGroup:
    is_state = group.attention is Attention.MAMBA
    row_bytes = sizes.state_bytes if is_state else sizes.token_bytes
    rows_per_page = 1 if is_state else group.block_tokens
    kind = GroupKind.WINDOW if group.has_window else GroupKind.FULL
    return LayoutGroup(
        kv_cache_group_id=index,
        kind=GroupKind.STATE if is_state else kind,
        tokens_per_page=group.block_tokens,
        tokens_per_row=group.block_tokens // rows_per_page,
        window_tokens=group.span_tokens,
        restart_tokens=0,
        planes=tuple(
            Plane(
                layer_name=f"{index}.{layer}",
                storage=0,
                base_bytes=0,
                page_stride_bytes=rows_per_page * row_bytes,
                region_offset_bytes=0,
                row_bytes=row_bytes,
                dtype="bfloat16",
                is_packed=False,
            )
            for layer in range(sizes.num_layers)
        ),
        holds_states=is_state,
    )
