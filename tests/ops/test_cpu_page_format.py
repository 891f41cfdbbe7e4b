# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Why a page of vLLM's CPU backend is one row: its kernels do not write what the shape says."""

from __future__ import annotations

import pytest
import torch
import vllm._custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

BLOCKS, HEADS, TOKENS, HEAD_SIZE = 4, 2, 32, 64
PAGE, TOKEN = 1, 5


def key_and_value_caches(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a registered tensor as the backend's ``forward`` does."""
    joined = cache.view(BLOCKS, HEADS, 2 * TOKENS, HEAD_SIZE)
    key_cache, value_cache = joined.chunk(2, dim=2)
    return key_cache, value_cache


@pytest.mark.parametrize("instruction_set", ["vec", "vec16", "amx"])
def test_a_key_is_spread_over_its_page(instruction_set: str) -> None:
    shape = CPUAttentionBackend.get_kv_cache_shape(BLOCKS, TOKENS, HEADS, HEAD_SIZE)
    key_cache, value_cache = key_and_value_caches(torch.zeros(shape, dtype=torch.bfloat16))
    key = torch.ones(1, HEADS, HEAD_SIZE, dtype=torch.bfloat16)
    slot = torch.tensor([PAGE * TOKENS + TOKEN])
    try:
        ops.cpu_attn_reshape_and_cache(key, key, key_cache, value_cache, slot, instruction_set)
    except RuntimeError as error:
        pytest.skip(f"not for this processor: {error}")
    written = key_cache[PAGE, 0].reshape(-1).nonzero().flatten()
    assert len(written) == HEAD_SIZE
    span = int(written[-1] - written[0]) + 1
    assert span > (TOKENS - 1) * HEAD_SIZE // 2, "rows could be addressed; see regions.py"
    others = [page for page in range(BLOCKS) if page != PAGE]
    assert not key_cache[others].any() and not value_cache[others].any()
