# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Tokens per block of DeepSeek-V4's groups on Ascend.

Sizes are those of vLLM-Ascend 0.23.0 (``_DSV4_BLOCK_SIZES``). `tests/ascend` has the groups that
vLLM-Ascend plans. It compares LMCache's slices of them with the rows that pages hold.
"""

from __future__ import annotations

import pytest
from support.layout.fakes import (
    BFLOAT16,
    FLOAT32,
    AscendMLAAttentionSpec,
    SlidingWindowMLASpec,
    config,
)

from vllm_ascend_kvext.lmcache.token_blocks import counted_in_tokens


def compressed(rows: int, ratio: int) -> AscendMLAAttentionSpec:
    return AscendMLAAttentionSpec(
        block_size=rows, head_size=512, dtype=BFLOAT16, compress_ratio=ratio
    )


def window(rows: int, window_tokens: int) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(
        block_size=rows, head_size=512, dtype=FLOAT32, sliding_window=window_tokens
    )


# By --block-size: the rows per block of the compressed, the window, and both state groups.
@pytest.mark.parametrize(("mla", "swa", "state", "states"), [(128, 128, 8, 32), (32, 32, 2, 8)])
def test_a_block_stands_for_the_tokens_that_its_rows_hold(
    mla: int, swa: int, state: int, states: int
) -> None:
    groups = config(
        1000,
        (compressed(mla, 4), "l2.attn"),
        (compressed(mla, 128), "l3.attn"),
        (window(swa, 128), "l0.swa", "l1.swa"),
        (window(state, 8), "l2.compressor.state_cache"),
        (window(states, 128), "l3.compressor.state_cache"),
    )
    new = counted_in_tokens(groups)
    old_specs, new_specs = (
        [group.kv_cache_spec for group in each.kv_cache_groups] for each in (groups, new)
    )
    assert [spec.block_size for spec in old_specs] == [mla, mla, swa, state, states]
    assert [spec.block_size for spec in new_specs] == [mla * 4, mla * 128, swa, state, states]
    # All other fields stay.
    for old_spec, new_spec in zip(old_specs, new_specs, strict=True):
        assert new_spec.page_size_bytes == old_spec.page_size_bytes
        assert new_spec.real_page_size_bytes == old_spec.real_page_size_bytes
        assert type(new_spec).__name__ == type(old_spec).__name__
        assert isinstance(new_spec, type(old_spec))
    assert counted_in_tokens(new) is new


def test_bundles_of_layers_count_tokens_too() -> None:
    groups = config(9, {"a": compressed(128, 4), "b": compressed(128, 4)})
    bundle = counted_in_tokens(groups).kv_cache_groups[0].kv_cache_spec
    assert bundle.block_size == 512
    assert [spec.block_size for spec in bundle.kv_cache_specs.values()] == [512, 512]
    assert groups.kv_cache_groups[0].kv_cache_spec.block_size == 128
