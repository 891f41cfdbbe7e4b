# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Operators on 8-bit integers compute what the restored numbers give. Bodies get CPU tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch_npu.operators import attention, experts, matrices, paged_cache

BLOCK_TOKENS = 16
KV_HEADS = 2
SIZE = 64
TILE = 32
HIDDEN = 48
INNER = 32
COUNTS = torch.tensor([3, 0, 4])
"""The rows of each expert. Two more rows belong to none."""
ROWS = 9


def quantized(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Random integers, a scale for each vector of the last dimension, and the restored numbers."""
    numbers = torch.randint(-127, 128, shape, dtype=torch.int8)
    scales = torch.rand(shape[:-1]) / 127
    return numbers, scales, numbers.float() * scales.unsqueeze(-1)


def by_expert(rows: Tensor, matrices_of: Tensor) -> Tensor:
    parts = rows[: int(COUNTS.sum())].split(COUNTS.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices_of, strict=True)])


def restored(found: tuple[Tensor, ...]) -> Tensor:
    return found[0].float() * found[1].unsqueeze(-1)


def near(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> bool:
    return found.shape == expected.shape and bool((found - expected).abs().max() < tolerance)


def test_a_product_has_the_scales_of_rows_and_columns() -> None:
    torch.manual_seed(0)
    x, x_scale, tokens = quantized((ROWS, HIDDEN))
    weight, scale, rows = quantized((INNER, HIDDEN))
    found = matrices.npu_quant_matmul(
        x, weight.t(), scale, pertoken_scale=x_scale, output_dtype=torch.float32
    )
    assert near(found, tokens @ rows.t())
    product = matrices.npu_quant_matmul(x, weight.t(), scale, output_dtype=torch.int32)
    assert torch.equal(product.long(), x.long() @ weight.t().long())
    bias = torch.randint(-999, 999, (INNER,), dtype=torch.int32)
    biased = matrices.npu_quant_matmul(x, weight.t(), scale, bias=bias, output_dtype=torch.float32)
    assert near(biased, (x.float() @ weight.t().float() + bias) * scale, 1e-1)


@pytest.mark.parametrize("num_scales", [1, HIDDEN])
def test_one_scale_and_one_offset_quantize_all_tokens(num_scales: int) -> None:
    """The product of the numbers and a layer's bias for the offset restore the layer's result."""
    torch.manual_seed(4)
    x = torch.randn(ROWS, HIDDEN)
    x[0, 0], x[1, 0] = 100, -100  # cut off
    scale = torch.tensor([4 / 127])
    offset = torch.tensor([3.0])
    found = matrices.npu_quantize(
        x, (1 / scale).expand(num_scales), offset.expand(num_scales), torch.qint8, -1, False
    )
    assert found.dtype == torch.int8 and (found[0, 0], found[1, 0]) == (127, -128)
    inside = (found.float() - offset) * scale
    assert near(inside[2:], x[2:].clamp(-4.1, 3.9), float(scale) / 2 + 1e-6)
    weight, weight_scale, rows = quantized((INNER, HIDDEN))
    product = matrices.npu_quant_matmul(
        found,
        weight.t(),
        scale * weight_scale,
        bias=-3 * weight.sum(-1, dtype=torch.int32),
        output_dtype=torch.float32,
    )
    assert near(product, inside @ rows.t())


def test_what_static_quantization_does_not_need_is_refused() -> None:
    x, one = torch.randn(ROWS, HIDDEN), torch.ones(1)
    for more in ((torch.quint8, -1, False), (torch.qint8, 0, False), (torch.qint8, -1, True)):
        with pytest.raises(RuntimeError, match=r"npu_quantize: .* not emulated"):
            matrices.npu_quantize(x, one, one, *more)
    for scales, zeros in ((torch.ones(3), torch.ones(3)), (one, one.to(torch.int8))):
        with pytest.raises(RuntimeError, match=r"npu_quantize: .*scales"):
            matrices.npu_quantize(x, scales, zeros, torch.qint8, -1, False)


def test_experts_have_their_own_scales() -> None:
    torch.manual_seed(1)
    x, x_scale, tokens = quantized((ROWS, HIDDEN))
    weight, scale, rows = quantized((len(COUNTS), 2 * INNER, HIDDEN))
    turned = weight.transpose(1, 2)
    (found,) = experts.npu_grouped_matmul(
        [x],
        [turned],
        scale=[scale],
        per_token_scale=[x_scale],
        group_list=COUNTS,
        split_item=2,
        group_type=0,
        group_list_type=1,
        output_dtype=torch.float32,
    )
    expected = by_expert(tokens, rows.transpose(1, 2))
    assert near(found[: len(expected)], expected)
    assert found[len(expected) :].isnan().all()
    gates, values = expected.chunk(2, dim=-1)
    activated = functional.silu(gates) * values
    fused = experts.grouped_matmul_swiglu_quant_weight_nz(
        x, turned, scale, x_scale, COUNTS.cumsum(0)
    )
    # A number of 8 bits is off by up to half a scale.
    assert near(restored(fused)[: len(expected)], activated, float(fused[1].max()))
    (product,) = experts.npu_grouped_matmul(
        [x],
        [turned],
        group_list=COUNTS,
        split_item=3,
        group_type=0,
        group_list_type=1,
        output_dtype=torch.int32,
    )
    in_two = experts.npu_dequant_swiglu_quant(
        product, scale, x_scale, group_index=COUNTS, activate_left=True, quant_mode=1
    )
    assert near(restored(in_two)[: len(expected)], activated, float(in_two[1].max()))


def test_tokens_are_quantized_one_by_one_where_they_are_sorted() -> None:
    torch.manual_seed(2)
    x = torch.randn(4, HIDDEN)
    chosen = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0]], dtype=torch.int32)
    options = {"expert_num": 3, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True}
    plain = experts.npu_moe_init_routing(x, chosen, quant_mode=-1, **options)
    found = experts.npu_moe_init_routing(x, chosen, quant_mode=1, **options)
    assert found[0].dtype == torch.int8
    assert near(restored((found[0], found[3])), plain[0], float(found[3].max()))


def test_tiled_pages_give_the_attention_of_their_tokens() -> None:
    torch.manual_seed(3)
    num_tokens = 2 * BLOCK_TOKENS + 5
    keys, values = torch.randint(-127, 128, (2, num_tokens, KV_HEADS, SIZE), dtype=torch.int8)
    tiled = (4, KV_HEADS, SIZE // TILE, BLOCK_TOKENS, TILE)
    key_pages, value_pages = torch.zeros(2, *tiled, dtype=torch.int8)
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    slots = torch.tensor(
        [
            int(table[0, at // BLOCK_TOKENS]) * BLOCK_TOKENS + at % BLOCK_TOKENS
            for at in range(num_tokens)
        ]
    )
    paged_cache.npu_scatter_pa_kv_cache(keys, values, key_pages, value_pages, slots)
    scales = torch.rand(2, KV_HEADS, 1, SIZE) / 127
    query = torch.randn(1, 2 * KV_HEADS, 1, SIZE)
    found, _ = attention.npu_fused_infer_attention_score(
        query,
        key_pages,
        value_pages,
        key_antiquant_scale=scales[0],
        value_antiquant_scale=scales[1],
        block_table=table,
        actual_seq_lengths_kv=[num_tokens],
        num_heads=2 * KV_HEADS,
        num_key_value_heads=KV_HEADS,
        input_layout="BNSD",
        scale=SIZE**-0.5,
        block_size=BLOCK_TOKENS,
    )
    plain = (
        one.float() * scale.squeeze(1) for one, scale in zip((keys, values), scales, strict=True)
    )
    key, value = (one.repeat_interleave(2, dim=1).transpose(0, 1) for one in plain)
    expected = functional.scaled_dot_product_attention(query[0], key, value)
    assert near(found[0], expected)
