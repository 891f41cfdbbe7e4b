# SPDX-License-Identifier: Apache-2.0
"""The layout of the first vLLM-Ascend with DeepSeek-V4: eleven KV cache groups, made by hand.

One model layer is one entry of ``kv_caches`` with the tensors of all its groups: eight for a layer
of compress ratio 4 (indexer keys and scales in one int8 blob, states in another), four for ratio
128, one for a layer that is not compressed. Planning is not reproduced, only what is registered.
"""

from __future__ import annotations

import torch

from support.layout.fakes import (
    AscendMLAAttentionSpec,
    SlidingWindowMLASpec,
    config,
)
from support.layout.reach import Reach
from support.layout.truth import LayoutFixture, PagedTensor
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import RowAddressing

LAYERS = (0, 1, 2, 3, 20, 21, 22, 23, 24)
NUM_BLOCKS = 24
ROWS = 128
LATENT = 512
INDEXER = 128
C4_STATE_ROWS, C128_STATE_ROWS = 8, 32

SECOND_WINDOW_LAYER = 22
"""From here on the windows of even layers are a group of their own."""


class C4AttnKVStateSpec(SlidingWindowMLASpec):
    """And its likes: four states of ratio 4, two of ratio 128."""


class C128AttnStateSpec(SlidingWindowMLASpec):
    """KV and score of ratio 128, in one group."""


def _latent_spec(ratio: int) -> AscendMLAAttentionSpec:
    return AscendMLAAttentionSpec(
        block_size=ROWS, head_size=LATENT, dtype=torch.bfloat16, compress_ratio=ratio
    )


def _window_spec() -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(
        block_size=ROWS, head_size=LATENT, dtype=torch.bfloat16, sliding_window=128
    )


def _c4_state_spec(head_dim: int) -> SlidingWindowMLASpec:
    return C4AttnKVStateSpec(
        block_size=C4_STATE_ROWS,
        head_size=2 * head_dim,
        dtype=torch.float32,
        sliding_window=8,
    )


SPECS = (
    _latent_spec(4),
    _window_spec(),
    _window_spec(),
    AscendMLAAttentionSpec(
        block_size=ROWS,
        head_size=INDEXER,
        dtype=torch.int8,
        compress_ratio=4,
        scale_dim=1,
        scale_dtype=torch.float16,
    ),
    _c4_state_spec(LATENT),
    _c4_state_spec(LATENT),
    _c4_state_spec(INDEXER),
    _c4_state_spec(INDEXER),
    _latent_spec(128),
    _window_spec(),
    C128AttnStateSpec(
        block_size=C128_STATE_ROWS,
        head_size=2 * LATENT,
        dtype=torch.float32,
        sliding_window=128,
    ),
)

_C4 = Reach(GroupKind.FULL, 4 * ROWS, 4)
_WINDOW = Reach(GroupKind.WINDOW, ROWS, 1, 128)
_C4_STATE = Reach(GroupKind.WINDOW, C4_STATE_ROWS, 1, 8, holds_states=True)

REACHES = (
    _C4,
    _WINDOW,
    _WINDOW,
    _C4,
    *(_C4_STATE for _ in range(4)),
    Reach(GroupKind.FULL, 128 * ROWS, 128),
    _WINDOW,
    Reach(GroupKind.WINDOW, C128_STATE_ROWS, 1, 128, 128, holds_states=True),
)


def groups_of_layer(layer: int) -> tuple[int, ...]:
    """Indexes of the groups that a layer is in."""
    if layer < 2:
        return (1,)
    if layer % 2:
        return 8, 9, 10
    return 0, (1 if layer < SECOND_WINDOW_LAYER else 2), 3, 4, 5, 6, 7


def eleven_groups(num_blocks: int = NUM_BLOCKS, layers: tuple[int, ...] = LAYERS) -> LayoutFixture:
    """A worker with some of the layers.

    Args:
        num_blocks: Pages.
        layers: By default two of every kind where the model has two.
    """
    names: list[list[str]] = [[] for _ in SPECS]
    kv_caches: dict[str, object] = {}
    tensors: list[PagedTensor] = []
    for layer in layers:
        name = f"model.layers.{layer}.self_attn"
        entry: list[torch.Tensor] = []
        for group in groups_of_layer(layer):
            names[group].append(name)
            of_group = _tensors_of_group(group, num_blocks)
            tensors += [PagedTensor(group, tensor, REACHES[group], 0, 1) for tensor in of_group]
            entry += of_group
        kv_caches[name] = entry[0] if len(entry) == 1 else tuple(entry)
    groups = [(spec, *of_group) for spec, of_group in zip(SPECS, names, strict=True)]
    made = config(num_blocks, *groups)
    return LayoutFixture(made, made, kv_caches, tuple(tensors), RowAddressing.TOKENS)


def _tensors_of_group(group: int, num_blocks: int) -> list[torch.Tensor]:
    if group == 3:
        return _indexer(num_blocks)
    if group in (4, 5, 6, 7):
        return [_zeros(num_blocks, C4_STATE_ROWS, SPECS[group].head_size, torch.float32)]
    if group == 10:
        return _c128_states(num_blocks)
    return [_zeros(num_blocks, ROWS, LATENT, torch.bfloat16)]


def _zeros(num_blocks: int, rows: int, row_elements: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(num_blocks, rows, 1, row_elements, dtype=dtype)


def _indexer(num_blocks: int) -> list[torch.Tensor]:
    """Keys, then scales, in each page of one int8 blob that does not begin at its storage."""
    page_bytes = ROWS * (INDEXER + 2)
    offset_bytes = 4096
    blob = torch.zeros(offset_bytes + num_blocks * page_bytes, dtype=torch.int8)
    keys = torch.as_strided(
        blob, (num_blocks, ROWS, 1, INDEXER), (page_bytes, INDEXER, INDEXER, 1), offset_bytes
    )
    scales = torch.as_strided(
        blob.view(torch.float16),
        (num_blocks, ROWS, 1, 1),
        (page_bytes // 2, 1, 1, 1),
        (offset_bytes + ROWS * INDEXER) // 2,
    )
    return [keys, scales]


def _c128_states(num_blocks: int) -> list[torch.Tensor]:
    """KV and score: the halves of one blob."""
    return list(torch.zeros(2, num_blocks, C128_STATE_ROWS, 1, LATENT).unbind(0))
