# SPDX-License-Identifier: Apache-2.0
"""Tokens per block of DeepSeek-V4's groups on Ascend, against an oracle that fills row by row.

Sizes are those of vLLM-Ascend 0.23.0 (``_DSV4_BLOCK_SIZES``), which `tests/ascend` compares with
its sources.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.layout.fakes import (
    BFLOAT16,
    FLOAT32,
    AscendMLAAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    config,
)

from vllm_ascend_kvext.lmcache.errors import LMCacheError
from vllm_ascend_kvext.lmcache.token_blocks import (
    counted_in_tokens,
    has_states,
    require_chunks_of_whole_blocks,
    tokens_per_block,
)

GEOMETRIES = {128: (128, 128, 8, 32), 32: (32, 32, 2, 8)}
"""By ``--block-size``: rows per block of compressed, window, and both state groups."""


def compressed(rows: int, ratio: int) -> AscendMLAAttentionSpec:
    return AscendMLAAttentionSpec(
        block_size=rows, head_size=512, dtype=BFLOAT16, compress_ratio=ratio
    )


def window(rows: int, window_tokens: int) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(
        block_size=rows, head_size=512, dtype=FLOAT32, sliding_window=window_tokens
    )


def deepseek_v4(block_size: int) -> tuple[KVCacheConfig, tuple[int, ...]]:
    """A config, and the tokens that each row of its groups stands for."""
    mla, swa, c4_state, c128_state = GEOMETRIES[block_size]
    groups = config(
        1000,
        (compressed(mla, 4), "l2.attn"),
        (compressed(mla, 128), "l3.attn"),
        (window(swa, 128), "l0.swa", "l1.swa"),
        (window(c4_state, 8), "l2.compressor.state_cache"),
        (window(c128_state, 128), "l3.compressor.state_cache"),
    )
    return groups, (4, 128, 1, 1, 1)


def blocks_of(prompt_tokens: int, rows_per_block: int, tokens_per_row: int) -> list[int]:
    """Tokens in each block of a prompt whose tokens are laid down one after the other."""
    blocks: list[int] = []
    rows = tokens_in_row = 0
    for _ in range(prompt_tokens):
        if tokens_in_row == 0:
            if rows % rows_per_block == 0:
                blocks.append(0)
            rows += 1
        blocks[-1] += 1
        tokens_in_row = (tokens_in_row + 1) % tokens_per_row
    return blocks


@pytest.mark.parametrize("prompt_tokens", [1024, 8192, 16384, 17000, 40000])
@pytest.mark.parametrize("block_size", GEOMETRIES)
def test_a_block_stands_for_the_tokens_that_its_rows_hold(
    block_size: int, prompt_tokens: int
) -> None:
    groups, tokens_per_row = deepseek_v4(block_size)
    for group, per_row, tokens in zip(
        groups.kv_cache_groups, tokens_per_row, tokens_per_block(groups, 1), strict=True
    ):
        blocks = blocks_of(prompt_tokens, group.kv_cache_spec.block_size, per_row)
        assert len(blocks) == -(-prompt_tokens // tokens)
        assert all(in_block == tokens for in_block in blocks[:-1])


def test_everything_but_the_block_size_stays() -> None:
    groups, _ = deepseek_v4(128)
    new = counted_in_tokens(groups)
    assert [each.kv_cache_spec.block_size for each in groups.kv_cache_groups[:2]] == [128, 128]
    for old_group, new_group in zip(groups.kv_cache_groups, new.kv_cache_groups, strict=True):
        old_spec, new_spec = old_group.kv_cache_spec, new_group.kv_cache_spec
        assert new_spec.page_size_bytes == old_spec.page_size_bytes
        assert new_spec.real_page_size_bytes == old_spec.real_page_size_bytes
        assert type(new_spec).__name__ == type(old_spec).__name__
        assert isinstance(new_spec, type(old_spec))
        assert replace(old_spec, block_size=1) == replace(old_spec, block_size=1)
    assert counted_in_tokens(new) is new


def test_a_config_that_counts_tokens_is_handed_on_itself() -> None:
    groups = config(
        9,
        (FullAttentionSpec(block_size=16), "a"),
        (MLAAttentionSpec(block_size=256, head_size=512, compress_ratio=4), "b"),
    )
    assert counted_in_tokens(groups) is groups
    assert tokens_per_block(groups, 1) == (16, 256)


def test_bundles_of_layers_count_tokens_too() -> None:
    groups = config(9, {"a": compressed(128, 4), "b": compressed(128, 4)})
    bundle = counted_in_tokens(groups).kv_cache_groups[0].kv_cache_spec
    assert bundle.block_size == 512
    assert [spec.block_size for spec in bundle.kv_cache_specs.values()] == [512, 512]
    assert groups.kv_cache_groups[0].kv_cache_spec.block_size == 128


def test_attention_is_split_over_context_parallel_workers() -> None:
    groups, _ = deepseek_v4(32)
    assert tokens_per_block(groups, 2) == tuple(2 * each for each in tokens_per_block(groups, 1))


def test_a_chunk_that_cuts_blocks_is_refused_with_the_next_that_does_not() -> None:
    groups, _ = deepseek_v4(128)
    tokens = tokens_per_block(groups, 1)
    for good in (16384, 32768):
        require_chunks_of_whole_blocks(good, tokens, "tcp://host:1")
    for bad, possible in ((256, 16384), (16384 + 128, 32768)):
        with pytest.raises(LMCacheError, match=rf"host:1.*{bad}.*16384.*--chunk-size {possible}"):
            require_chunks_of_whole_blocks(bad, tokens, "tcp://host:1")


def test_scratch_groups_bound_no_chunk() -> None:
    require_chunks_of_whole_blocks(256, (0, 16), "tcp://host:1")


def test_states_are_told_from_what_is_looked_up() -> None:
    attention = (FullAttentionSpec(block_size=16), "a")
    states = (MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(FLOAT32,)), "b")
    assert has_states(config(9, attention, states))
    assert not has_states(config(9, attention))
    assert not has_states(deepseek_v4(128)[0])
