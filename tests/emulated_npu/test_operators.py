# SPDX-License-Identifier: Apache-2.0
"""Operators compute what an independent reference does: modules of transformers, or plain torch.

A negative control calls the operator with something wrong, and has to differ. Their bodies
get CPU tensors here; that they reach the device is shown by the models.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch_npu.custom_operators import expert_choice
from torch_npu.custom_operators import norms as custom_norms
from torch_npu.operators import (
    attention,
    experts,
    latent_attention,
    matrices,
    norms,
    paged_cache,
    rotary,
    sampling,
)
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

BLOCK_TOKENS = 16
HEADS, KV_HEADS, SIZE = 4, 2, 64


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def equal(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return found.shape == expected.shape and torch.allclose(
        found.float(), expected.float(), rtol=tolerance, atol=tolerance
    )


# Norms and activations


def test_norms_are_those_of_transformers() -> None:
    x, residual = torch.randn(5, 3, 32), torch.randn(5, 3, 32)
    llama, gemma = LlamaRMSNorm(32, eps=1e-5), Gemma3RMSNorm(32, eps=1e-5)
    weight = torch.randn(32)
    llama.weight.data, gemma.weight.data = weight, weight
    found, inverse = norms.npu_rms_norm(x, weight, 1e-5)
    assert equal(found, llama(x)) and equal(inverse, x.square().mean(-1, True).add(1e-5).rsqrt())
    assert equal(custom_norms.npu_gemma_rms_norm(x, weight, 1e-5)[0], gemma(x))
    bias = torch.randn(32)
    added, inverse, total = custom_norms.npu_add_rms_norm_bias(x, residual, weight, bias, 1e-5)
    assert equal(added, llama(x + residual) + bias) and equal(total, x + residual)
    assert inverse.shape == (5, 3, 1)
    assert not equal(norms.npu_rms_norm(x, weight, 1e-1)[0], llama(x))
    half = norms.npu_rms_norm(x.bfloat16(), weight)
    assert half[0].dtype == torch.bfloat16 and half[1].dtype == torch.float32


def test_a_norm_covers_all_dimensions_of_its_weight() -> None:
    x, weight = torch.randn(5, 3, 32), torch.randn(3, 32)
    flat = norms.npu_rms_norm(x.flatten(1), weight.flatten())[0]
    found, inverse = norms.npu_rms_norm(x, weight)
    assert equal(found.flatten(1), flat) and inverse.shape == (5, 1, 1)


def test_swiglu_is_silu_of_the_first_half_times_the_second() -> None:
    gate, up = torch.randn(7, 16), torch.randn(7, 16)
    assert equal(norms.npu_swiglu(torch.cat((gate, up), -1)), functional.silu(gate) * up)
    assert not equal(norms.npu_swiglu(torch.cat((up, gate), -1)), functional.silu(gate) * up)


# Rotary embeddings


def angles(num_tokens: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 1.0 / 10000 ** (torch.arange(0, size, 2) / size)
    turned = torch.arange(num_tokens).unsqueeze(1) * frequencies
    return turned.cos(), turned.sin()


def turn_as_complex(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns neighbouring numbers of ``x``, ``[tokens, heads, size]``."""
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(cos, sin).unsqueeze(1)
    return torch.view_as_real(turned).flatten(-2)


@pytest.mark.parametrize("rotary_size", [SIZE, SIZE // 2])
@pytest.mark.parametrize("is_neox", [True, False])
def test_heads_are_turned_by_their_positions(is_neox: bool, rotary_size: int) -> None:
    cos, sin = angles(100, rotary_size)
    positions = torch.randint(100, (6,))
    query, key = torch.randn(6, HEADS, SIZE), torch.randn(6, KV_HEADS, SIZE)
    flat = query.flatten(1).clone(), key.flatten(1).clone()
    cache = torch.cat((cos, sin), -1)
    rotary._npu_rotary_embedding(positions, *flat, SIZE, cache, is_neox)
    cos, sin = cos[positions], sin[positions]
    for found, given in zip(flat, (query, key), strict=True):
        found = found.view_as(given)
        part = given[..., :rotary_size]
        if is_neox:
            whole = (torch.cat((one, one), -1).unsqueeze(1) for one in (cos, sin))
            expected = apply_rotary_pos_emb(part, part, *whole, unsqueeze_dim=0)[0].squeeze(0)
        else:
            expected = turn_as_complex(part, cos, sin)
        assert equal(found[..., :rotary_size], expected)
        assert equal(found[..., rotary_size:], given[..., rotary_size:])
    other = query.flatten(1).clone()
    rotary._npu_rotary_embedding(positions, other, flat[1], SIZE, cache, not is_neox)
    assert not equal(other, flat[0])


def test_rotary_mul_turns_halves_or_neighbours() -> None:
    cos, sin = angles(6, SIZE)
    x = torch.randn(6, HEADS, SIZE)
    halves = [torch.cat((one, one), -1).unsqueeze(1) for one in (cos, sin)]
    neighbours = [one.repeat_interleave(2, -1).unsqueeze(1) for one in (cos, sin)]
    expected = apply_rotary_pos_emb(x, x, *halves, unsqueeze_dim=0)[0].squeeze(0)
    assert equal(rotary.npu_rotary_mul(x, *halves), expected)
    expected = turn_as_complex(x, cos, sin)
    assert equal(rotary.npu_rotary_mul(x, *neighbours, rotary_mode="interleave"), expected)
    assert not equal(rotary.npu_rotary_mul(x, *neighbours), expected)


def test_interleave_rope_is_deepseeks() -> None:
    cos, sin = angles(6, 64)
    whole = [torch.cat((one, one), -1) for one in (cos, sin)]
    x = torch.randn(6, HEADS, 1, 64)
    expected = modeling_deepseek_v3.apply_rotary_pos_emb_interleave(
        x.transpose(0, 2), x.transpose(0, 2), *(one.unsqueeze(0) for one in whole)
    )[0].transpose(0, 2)
    found = rotary.npu_interleave_rope(x, *(one.view(6, 1, 1, 64) for one in whole))
    assert equal(found, expected)
    assert not equal(rotary.npu_rotary_mul(x, *(one.view(6, 1, 1, 64) for one in whole)), expected)


# The paged cache


def paged(tokens: torch.Tensor, blocks: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A cache that holds ``tokens`` in ``blocks``, and elsewhere what must not be read."""
    cache = torch.full((num_blocks, BLOCK_TOKENS, *tokens.shape[1:]), float("nan"))
    for place, token in enumerate(tokens):
        cache[blocks[place // BLOCK_TOKENS], place % BLOCK_TOKENS] = token
    return cache


def test_tokens_are_written_to_their_slots_and_padding_is_not() -> None:
    key, value = torch.randn(5, KV_HEADS, SIZE), torch.randn(5, KV_HEADS, SIZE)
    caches = torch.zeros(2, 3, BLOCK_TOKENS, KV_HEADS, SIZE)
    slots = torch.tensor([17, 0, -1, 47, 5], dtype=torch.int32)
    expected = torch.zeros_like(caches)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, BLOCK_TOKENS)
            expected[0, block, offset], expected[1, block, offset] = key[token], value[token]
    paged_cache._npu_reshape_and_cache(key, value, caches[0], caches[1], slots)
    assert torch.equal(caches, expected)


@pytest.mark.parametrize("is_wrong", [False, True], ids=["right pages", "wrong pages"])
def test_parts_of_sequences_are_collected_from_their_pages(is_wrong: bool) -> None:
    tokens = torch.randn(2, 50, 1, 8)
    table = torch.tensor([[5, 2, 7, 1], [0, 3, 6, 4]], dtype=torch.int32)
    cache = paged(tokens[0], table[0], 8)
    cache.copy_(torch.where(cache.isnan(), paged(tokens[1], table[1], 8), cache))
    lengths, starts = torch.tensor([18, 30]), torch.tensor([32, 16])
    key, value = torch.empty(48, 1, 8), torch.empty(48, 1, 8)
    if is_wrong:
        table[1, 2] = 2
    paged_cache.npu_paged_cache_load(
        cache, cache * 2, table, lengths, seq_starts=starts, key=key, value=value
    )
    expected = torch.cat((tokens[0, 32:50], tokens[1, 16:46]))
    assert equal(key, expected) is not is_wrong and equal(value, expected * 2) is not is_wrong


# Attention

QUERIES, KEYS = (1, 40, 7), (33, 40, 60)  # a decode step, a prompt, a part of a prompt
CAUSAL = {"sparse_mode": 3, "atten_mask": torch.ones(2048, 2048, dtype=torch.int8).triu(1)}


def band(num_tokens: int) -> dict[str, Any]:
    return CAUSAL | {"sparse_mode": 4, "pre_tokens": num_tokens, "next_tokens": 0}


def ends(lengths: tuple[int, ...]) -> list[int]:
    return torch.tensor(lengths).cumsum(0).tolist()


class Sequences:
    """Queries, keys and values of three sequences, and attention over each of them by torch."""

    def __init__(self) -> None:
        self.queries = [torch.randn(count, HEADS, SIZE) for count in QUERIES]
        self.keys = [torch.randn(count, KV_HEADS, SIZE) for count in KEYS]
        self.values = [torch.randn(count, KV_HEADS, SIZE) for count in KEYS]
        places = torch.randperm(11).to(torch.int32)
        self.table = torch.zeros(3, 4, dtype=torch.int32)
        self.caches = [torch.full((11, BLOCK_TOKENS, KV_HEADS, SIZE), float("nan")) for _ in "kv"]
        for row, count in enumerate(KEYS):
            num_blocks = -(-count // BLOCK_TOKENS)
            self.table[row, :num_blocks], places = places[:num_blocks], places[num_blocks:]
            for cache, tokens in zip(self.caches, (self.keys[row], self.values[row]), strict=True):
                mine = paged(tokens, self.table[row], 11)
                cache.copy_(torch.where(mine.isnan(), cache, mine))

    def expected(self, window_tokens: int | None = None, is_causal: bool = True) -> torch.Tensor:
        parts = []
        for q, k, v in zip(self.queries, self.keys, self.values, strict=True):
            place = torch.arange(len(k) - len(q), len(k)).unsqueeze(1)
            distance = place - torch.arange(len(k))
            seen = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
            if window_tokens is not None:
                seen &= distance < window_tokens
            q, k, v = (one.transpose(0, 1) for one in (q, k, v))
            parts.append(
                functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=seen, scale=0.2, enable_gqa=True
                ).transpose(0, 1)
            )
        return torch.cat(parts)

    def found(self, is_paged: bool, **options: Any) -> torch.Tensor:
        call: dict[str, Any] = {
            "num_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "input_layout": "TND",
            "scale": 0.2,
            "actual_seq_lengths": ends(QUERIES),
        }
        if is_paged:
            key, value = (cache.flatten(2) for cache in self.caches)
            call |= {"block_table": self.table, "block_size": BLOCK_TOKENS}
            call |= {"actual_seq_lengths_kv": list(KEYS)}
        else:
            key, value = torch.cat(self.keys), torch.cat(self.values)
            call |= {"actual_seq_lengths_kv": ends(KEYS)}
        query = torch.cat(self.queries)
        output, lse = attention.npu_fused_infer_attention_score(query, key, value, **call | options)
        assert [(one.shape, one.dtype) for one in (output, lse)] == [
            (torch.Size(shape), dtype)
            for shape, dtype in attention.attention_outputs(query, key, value, **call | options)
        ]
        return output


@pytest.mark.parametrize("is_paged", [True, False], ids=["pages", "no pages"])
@pytest.mark.parametrize("kind", ["all", "causal", "band"])
def test_attention_is_torchs(kind: str, is_paged: bool) -> None:
    sequences = Sequences()
    options = {"all": {}, "causal": CAUSAL, "band": band(20)}[kind]
    expected = sequences.expected(20 if kind == "band" else None, is_causal=kind != "all")
    assert equal(sequences.found(is_paged, **options), expected)


@pytest.mark.parametrize(
    "wrong",
    [
        {"scale": 0.21},
        band(21),
        band(19),
        {"sparse_mode": 0, "atten_mask": None},
        CAUSAL,
        "page",
        "length",
    ],
    ids=["scale", "wider", "narrower", "no mask", "no window", "page", "length"],
)
def test_wrong_attention_is_seen(wrong: Any) -> None:
    sequences = Sequences()
    options = band(20)
    if wrong == "page":
        sequences.table[2, 3] = sequences.table[1, 0]
    elif wrong == "length":
        options |= {"actual_seq_lengths_kv": [KEYS[0], KEYS[1], KEYS[2] - 1]}
    else:
        options |= wrong
    assert not equal(sequences.found(True, **options), sequences.expected(20), 1e-3)


def test_a_literal_band_sees_one_key_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_NPU_LITERAL_BAND", "1")
    sequences = Sequences()
    assert equal(sequences.found(True, **band(20)), sequences.expected(21))


@pytest.mark.parametrize("is_wrong", [False, True], ids=["right", "without sinks"])
def test_sinks_are_those_of_transformers(is_wrong: bool) -> None:
    query, key, value = (torch.randn(30, count, SIZE) for count in (HEADS, KV_HEADS, KV_HEADS))
    config = GptOssConfig(
        hidden_size=SIZE, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=SIZE
    )
    module = modeling_gpt_oss.GptOssAttention(config, layer_idx=0)
    module.sinks.data = torch.randn(HEADS)
    mask = torch.full((30, 30), float("-inf")).triu(1)
    expected, _ = modeling_gpt_oss.eager_attention_forward(
        module, *(one.transpose(0, 1)[None] for one in (query, key, value)), mask, scaling=0.2
    )
    found, _ = attention.npu_fused_infer_attention_score_v2(
        query,
        key,
        value,
        num_query_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        input_layout="TND",
        softmax_scale=0.2,
        actual_seq_qlen=torch.tensor([30]),
        actual_seq_kvlen=[30],
        learnable_sink=None if is_wrong else module.sinks.detach(),
        **CAUSAL,
    )
    assert equal(found, expected[0]) is not is_wrong


@pytest.mark.parametrize("layout", ["BNSD", "BNSD_NBSD", "TND_NTD"])
def test_latent_attention_reads_its_pages_in_every_layout(layout: str) -> None:
    """One key of 512 numbers for all heads, which are the values too, and 64 further."""
    lengths = (33, 16)
    latents, ropes = ([torch.randn(count, 1, size) for count in lengths] for size in (512, 64))
    table = torch.tensor([[4, 0, 2], [3, 1, 1]], dtype=torch.int32)
    caches = []
    for tokens in (latents, ropes):
        cache = paged(tokens[0], table[0], 5)
        cache = torch.where(cache.isnan(), paged(tokens[1], table[1], 5), cache)
        caches.append(cache.transpose(1, 2).contiguous())
    query, query_rope = torch.randn(2, HEADS, 512), torch.randn(2, HEADS, 64)
    expected = torch.stack(
        [
            functional.scaled_dot_product_attention(
                torch.cat((query[row], query_rope[row]), -1).unsqueeze(1),
                torch.cat((latents[row], ropes[row]), -1).transpose(0, 1),
                latents[row].transpose(0, 1),
                scale=0.1,
                enable_gqa=True,
            ).squeeze(1)
            for row in range(2)
        ]
    )  # [sequences, heads, 512]
    is_batch = layout.startswith("BNSD")
    parts = [one.unsqueeze(2) if is_batch else one for one in (query, query_rope)]
    options = {
        "num_query_heads": HEADS,
        "num_key_value_heads": 1,
        "input_layout": layout,
        "softmax_scale": 0.1,
        "block_table": table,
        "block_size": BLOCK_TOKENS,
        "actual_seq_qlen": None if is_batch else [1, 2],
        "actual_seq_kvlen": list(lengths),
        "return_softmax_lse": True,
    }
    call = (parts[0], caches[0], caches[0])
    ropes_of = {"query_rope": parts[1], "key_rope": caches[1]}
    found = attention.npu_fused_infer_attention_score_v2(*call, **ropes_of, **options)
    expected = {
        "BNSD": expected.unsqueeze(2),
        "BNSD_NBSD": expected.transpose(0, 1).unsqueeze(2),
        "TND_NTD": expected.transpose(0, 1),
    }[layout]
    assert equal(found[0], expected)
    assert [tuple(one.shape) for one in found] == [
        shape for shape, _ in attention.attention_outputs(*call, **ropes_of, **options)
    ]
    turned = {"query_rope": parts[1] * -1, "key_rope": caches[1]}
    assert not equal(
        attention.npu_fused_infer_attention_score_v2(*call, **turned, **options)[0], expected
    )


def test_parts_of_the_keys_join_to_all_of_them() -> None:
    query, key, value = (torch.randn(9, HEADS, SIZE) for _ in range(3))

    def attend(first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse = attention.npu_fused_infer_attention_score(
            query,
            key[first:end],
            value[first:end],
            num_heads=HEADS,
            input_layout="TND",
            scale=0.2,
            actual_seq_lengths=[9],
            actual_seq_lengths_kv=[end - first],
            softmax_lse_flag=True,
        )
        return output.flatten(0, 1), lse.flatten()

    whole, lse = attend(0, 9)
    parts = [attend(0, 4), attend(4, 9), attend(3, 3)]  # the last has no keys
    outputs, sums = ([part[index] for part in parts] for index in (0, 1))
    joined, total = latent_attention.npu_attention_update(sums, outputs, 1)
    assert total is not None and equal(joined, whole) and equal(total, lse)
    assert not equal(latent_attention.npu_attention_update(sums[:1], outputs[:1], 0)[0], whole)


# Latent attention


def test_latents_are_normed_turned_and_cached() -> None:
    cos, sin = (torch.cat((one, one), -1).view(5, 1, 1, 64) for one in angles(5, 64))
    kv, gamma = torch.randn(5, 1, 1, 576), torch.randn(512)
    caches = torch.zeros(3, BLOCK_TOKENS, 1, 64), torch.zeros(3, BLOCK_TOKENS, 1, 512)
    slots = torch.tensor([3, 40, -1, 20, 0])
    turned, normed = latent_attention.npu_kv_rmsnorm_rope_cache(
        kv, gamma, cos, sin, slots, *caches, epsilon=1e-5, cache_mode="PA", is_output_kv=True
    )
    norm = modeling_deepseek_v3.DeepseekV3RMSNorm(512, eps=1e-5)
    norm.weight.data = gamma
    assert equal(normed, norm(kv[..., :512]))
    assert equal(turned, rotary.npu_interleave_rope(kv[..., 512:], cos, sin))
    for cache, tokens in zip(caches, (turned, normed), strict=True):
        expected = torch.zeros_like(cache).flatten(0, 1)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot] = tokens[token, 0]
        assert torch.equal(cache.flatten(0, 1), expected)


def test_heads_are_multiplied_with_their_own_matrices() -> None:
    heads, matrices_ = torch.randn(HEADS, 5, 32), torch.randn(HEADS, 32, 16)
    expected = torch.einsum("bmk,bkn->mbn", heads, matrices_)
    found = latent_attention.npu_transpose_batchmatmul(heads, matrices_, perm_y=(1, 0, 2))
    assert equal(found, expected, 1e-4)
    found = latent_attention.npu_transpose_batchmatmul(
        heads.transpose(0, 1), matrices_, perm_x1=(1, 0, 2), batch_split_factor=2
    )
    assert equal(found, expected.flatten(1).unflatten(1, (2, -1)).transpose(0, 1), 1e-4)


# Experts


def moe(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Any,
    down: Any,
    act: Any,
    **bias: Any,
) -> torch.Tensor:
    """The operators' way through the experts, as vllm-ascend calls them."""
    num_experts = len(gate_up)
    rows, places, counts, _ = expert_choice.npu_moe_init_routing_custom(
        x,
        ids,
        active_num=ids.numel(),
        expert_num=num_experts,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, num_experts],
        quant_mode=-1,
    )
    options: dict[str, Any] = {
        "split_item": 2,
        "group_list_type": 1,
        "group_type": 0,
        "group_list": counts,
    }
    made = experts.npu_grouped_matmul([rows], [gate_up], bias=bias.get("first"), **options)[0]
    made = experts.npu_grouped_matmul([act(made)], [down], bias=bias.get("second"), **options)[0]
    return experts.npu_moe_token_unpermute(made, places.abs(), weights)


@pytest.mark.parametrize("is_wrong", [False, True], ids=["right", "wrong choice"])
def test_experts_with_biases_are_those_of_transformers(is_wrong: bool) -> None:
    config = GptOssConfig(
        hidden_size=32, intermediate_size=48, num_local_experts=8, num_experts_per_tok=3
    )
    module = modeling_gpt_oss.GptOssMLP(config)
    for parameter in module.parameters():
        parameter.data.normal_(std=0.3)
    x = torch.randn(20, 32)
    logits = functional.linear(x, module.router.weight, module.router.bias)
    weights, ids, _ = expert_choice.moe_gating_top_k(logits, 3, 1, 1, 1, 1, 0, False, 1.0, 1e-20)
    part = module.experts
    with torch.no_grad():
        found = moe(
            x,
            weights,
            ids.flip(-1) if is_wrong else ids,
            part.gate_up_proj,
            part.down_proj,
            part._apply_gate,
            first=[part.gate_up_proj_bias],
            second=[part.down_proj_bias],
        )
        expected = module(x.unsqueeze(0))[0].squeeze(0)
    assert equal(found, expected, 1e-4) is not is_wrong


@pytest.mark.parametrize("groups", [1, 4])
def test_experts_chosen_by_sigmoid_are_those_of_transformers(groups: int) -> None:
    config = DeepseekV3Config(
        hidden_size=32,
        moe_intermediate_size=48,
        n_routed_experts=16,
        num_experts_per_tok=3,
        n_group=groups,
        topk_group=max(1, groups // 2),
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    module = modeling_deepseek_v3.DeepseekV3MoE(config)
    for parameter in module.parameters():
        parameter.data.normal_(std=0.3)
    bias = module.gate.e_score_correction_bias.normal_(std=0.3)
    x = torch.randn(20, 32)
    logits = functional.linear(x, module.gate.weight)
    arguments = (3, config.topk_group, groups, 1, 1, 1, False, 2.5, 1e-20)
    part = module.experts
    with torch.no_grad():
        expected = module(x.unsqueeze(0)).squeeze(0) - module.shared_experts(x)

        def found(bias: torch.Tensor | None) -> torch.Tensor:
            weights, ids, _ = expert_choice.moe_gating_top_k(logits, *arguments, bias_opt=bias)
            matrices_ = (one.transpose(1, 2) for one in (part.gate_up_proj, part.down_proj))
            return moe(x, weights, ids, *matrices_, norms.npu_swiglu)

        assert equal(found(bias), expected, 1e-4)
        assert not equal(found(None), expected, 1e-4)


@pytest.mark.parametrize("select_mode", [0, 1])
def test_groups_of_experts_are_chosen_by_their_best_or_their_best_two(select_mode: int) -> None:
    """Transformers' DeepSeek-V2 takes the best; the choice of the best two differs."""
    config = DeepseekV2Config(
        hidden_size=32,
        n_routed_experts=16,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.5,
    )
    gate = modeling_deepseek_v2.DeepseekV2TopkRouter(config)
    gate.weight.data.normal_(std=0.3)
    x = torch.randn(50, 32)
    _, weights, ids = gate(x.unsqueeze(0))
    found, found_ids, _ = expert_choice.moe_gating_top_k(
        functional.linear(x, gate.weight), 3, 2, 4, select_mode, 0, 0, False, 1.5, 1e-20
    )
    is_same = torch.equal(found_ids.long().sort(-1).values, ids.sort(-1).values)
    assert is_same is (select_mode == 0)
    assert equal(found.sort(-1).values, weights.sort(-1).values) is (select_mode == 0)


def test_tokens_of_other_devices_experts_come_last() -> None:
    x, ids = torch.arange(4.0).unsqueeze(1), torch.tensor([[0, 3], [2, 1], [3, 0], [1, 2]])
    rows, places, counts, _ = expert_choice.npu_moe_init_routing_custom(
        x,
        ids.int(),
        active_num=8,
        expert_num=4,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[2, 4],
        quant_mode=-1,
    )
    assert counts.tolist() == [2, 2] and counts.dtype == torch.int64
    assert rows[:4, 0].tolist() == [1, 3, 0, 2]
    assert places.tolist() == [-1, 2, 0, -1, 3, -1, -1, 1] and places.dtype == torch.int32


def test_groups_given_by_their_ends_are_those_given_by_their_sizes() -> None:
    rows, matrices_ = torch.randn(6, 8), torch.randn(3, 8, 5)
    options: dict[str, Any] = {"split_item": 2, "group_type": 0}
    sizes, stops = torch.tensor([2, 0, 3]), torch.tensor([2, 2, 5])
    by_size = experts.npu_grouped_matmul(
        [rows], [matrices_], group_list=sizes, group_list_type=1, **options
    )
    by_end = experts.npu_grouped_matmul(
        [rows], [matrices_], group_list=stops, group_list_type=0, **options
    )
    expected = torch.cat((rows[:2] @ matrices_[0], rows[2:5] @ matrices_[2]))
    assert equal(by_size[0][:5], expected) and equal(by_end[0][:5], expected)
    assert by_size[0][5].isnan().all()


# The rest


def test_logits_are_filtered_as_vllm_does() -> None:
    vllm_sampler = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    logits = torch.randn(4, 50)
    k, p = torch.tensor([1, 5, 50, 20]), torch.tensor([0.9, 0.5, 0.3, 1.0])
    for one_p, one_k in ((p, k), (None, k), (p, None)):
        expected = vllm_sampler.apply_top_k_top_p_pytorch(logits.clone(), one_k, one_p)
        assert torch.equal(sampling.npu_top_k_top_p(logits, p=one_p, k=one_k), expected)
    assert not torch.equal(sampling.npu_top_k_top_p(logits, p=p, k=k), logits)


def test_a_product_is_added_in_place() -> None:
    x, weight, total = torch.randn(2, 3).half(), torch.randn(2, 4).half(), torch.ones(3, 4)
    matrices._npu_matmul_add_fp32(x, weight, total)
    assert equal(total, 1 + torch.einsum("mi,mj->ij", x.float(), weight.float()))
    assert matrices.npu_format_cast(total, 29) is total


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: norms.npu_rms_norm(torch.ones(2), torch.ones(2), eps=1), "npu_rms_norm.*'eps'"),
        (lambda: rotary.npu_rotary_mul(*[torch.ones(2)] * 3, rotate=torch.ones(2)), "mul: rotate"),
        (lambda: Sequences().found(True, sparse_mode=3), "needs a 2048 x 2048 atten_mask"),
        (lambda: Sequences().found(True, input_layout="SBH"), "input_layout SBH"),
        (lambda: Sequences().found(True, pse_shift=torch.ones(1)), "score: pse_shift"),
    ],
)
def test_what_is_not_emulated_is_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises((TypeError, NotImplementedError, RuntimeError), match=message):
        call()
