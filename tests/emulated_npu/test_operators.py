# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Operators compute the same as an independent reference, where no served model shows it.

`test_models` compares with transformers what a model of `random_models` reaches. The tests here
cover padding, parts that such short prompts do not have, and calls that are refused. Bodies get CPU
tensors.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch_npu.operators import (
    attention,
    attention_residuals,
    gated_delta_rule,
    kimi_delta_attention,
    latent_attention,
    matrices,
    norms,
    paged_cache,
    rotary,
    sampling,
)
from transformers.models.qwen3_next import modeling_qwen3_next

BLOCK_TOKENS = 16
HEADS = 4
KV_HEADS = 2
SIZE = 64
CHANNELS = 12
WIDTH = 4
BLOCKS = 7
CAUSAL = {"sparse_mode": 3, "atten_mask": torch.ones(2048, 2048, dtype=torch.int8).triu(1)}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def equal(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return found.shape == expected.shape and torch.allclose(
        found.float(), expected.float(), rtol=tolerance, atol=tolerance
    )


def test_tokens_are_written_to_their_slots_and_padding_is_not() -> None:
    key, value = torch.randn(5, KV_HEADS, SIZE), torch.randn(5, KV_HEADS, SIZE)
    caches = torch.zeros(2, 3, BLOCK_TOKENS, KV_HEADS, SIZE)
    slots = torch.tensor([17, 0, -1, 46, 5], dtype=torch.int32)
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
    cache = torch.full((8, BLOCK_TOKENS, 1, 8), float("nan"))
    for blocks, sequence in zip(table, tokens, strict=True):
        for place, token in enumerate(sequence):
            cache[blocks[place // BLOCK_TOKENS], place % BLOCK_TOKENS] = token
    lengths = torch.tensor([18, 30])
    starts = torch.tensor([32, 16])
    key, value = torch.empty(48, 1, 8), torch.empty(48, 1, 8)
    if is_wrong:
        table[1, 2] = 2
    paged_cache.npu_paged_cache_load(
        cache, cache * 2, table, lengths, seq_starts=starts, key=key, value=value
    )
    expected = torch.cat((tokens[0, 32:50], tokens[1, 16:46]))
    assert equal(key, expected) is not is_wrong and equal(value, expected * 2) is not is_wrong


def test_a_band_has_as_many_keys_as_the_window() -> None:
    hidden = attention.Mask(attention.BAND, 20, 0).hidden(2, 40)
    assert hidden is not None and (~hidden).sum(1).tolist() == [20, 20]


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
    given = {
        "num_heads": HEADS,
        "input_layout": "TND",
        "scale": 0.2,
        "actual_seq_lengths": [len(query)],
        "actual_seq_lengths_kv": [len(key)],
        "softmax_lse_flag": True,
        **options,
    }
    found = attention.npu_fused_infer_attention_score(query, key, value, **given)
    call = SimpleNamespace(query=query, value=value, options=given)
    assert [(one.shape, one.dtype) for one in found] == attention.attention_outputs(call)
    return found


def test_parts_of_the_keys_join_to_all_of_them() -> None:
    query, key, value = (torch.randn(9, HEADS, SIZE) for _ in range(3))
    ends = [(0, 9), (0, 4), (4, 9), (3, 3)]  # all keys, and parts of them; the last part is empty
    found = [attend(query, key[first:end], value[first:end]) for first, end in ends]
    outputs = [one.flatten(0, 1) for one, _ in found]
    sums = [one.flatten() for _, one in found]
    joined, total = latent_attention.npu_attention_update(sums[1:], outputs[1:], 1)
    assert total is not None and equal(joined, outputs[0]) and equal(total, sums[0])
    other, _ = latent_attention.npu_attention_update(sums[1:2], outputs[1:2], 0)
    assert not equal(other, outputs[0])


def test_heads_come_first_where_the_layout_says_so() -> None:
    query, key, value = (torch.randn(9, HEADS, SIZE) for _ in range(3))
    found, expected = (
        attend(query, key, value, input_layout=layout, **CAUSAL)[0] for layout in ("TND_NTD", "TND")
    )
    assert torch.equal(found, expected.transpose(0, 1))


def test_heads_are_multiplied_with_their_own_matrices() -> None:
    heads = torch.randn(5, HEADS, 32)
    weights = torch.randn(HEADS, 32, 16)
    expected = torch.einsum("mbk,bkn->mbn", heads, weights)
    found = matrices.npu_transpose_batchmatmul(heads, weights, perm_x1=(1, 0, 2))
    assert equal(found, expected, 1e-4)


@pytest.mark.parametrize(("has_k", "has_p"), [(True, True), (True, False), (False, True)])
def test_the_best_logits_are_left(has_k: bool, has_p: bool) -> None:
    logits = torch.randn(4, 50)
    k = torch.tensor([1, 5, 50, 20])
    p = torch.tensor([0.9, 0.5, 0.3, 1.0])
    expected = torch.full_like(logits, float("-inf"))
    for row in range(4):
        best = logits[row].argsort(descending=True)[: int(k[row]) if has_k else 50]
        shares = logits[row, best].softmax(-1)
        before = shares.cumsum(-1) - shares
        left = best[before < p[row]] if has_p else best
        expected[row, left] = logits[row, left]
    found = sampling.npu_top_k_top_p(logits, p=p if has_p else None, k=k if has_k else None)
    assert torch.equal(found, expected) and not torch.equal(found, logits)


# Linear attention


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    lengths: tuple[int, ...],
    blocks: torch.Tensor,
    is_continued: torch.Tensor | None,
) -> torch.Tensor:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return gated_delta_rule.convolve(x, weight, None, states, starts, blocks, is_continued, "silu")


@pytest.mark.parametrize("is_cut", [False, True], ids=["states go on", "states are lost"])
def test_parts_of_sequences_are_convolved_as_the_whole(is_cut: bool) -> None:
    """Three prompts in two steps, then one decode step for each. Blocks have any order."""
    weight = torch.randn(WIDTH, CHANNELS)
    whole = [torch.randn(length, CHANNELS) for length in (9, 40, 3)]
    expected = [
        modeling_qwen3_next.causal_conv1d_fn(
            one.t().unsqueeze(0), weight.t().contiguous(), None, activation="silu"
        )[0].t()
        for one in whole
    ]
    states = torch.full((BLOCKS, WIDTH - 1, CHANNELS), float("nan"))  # must not be read
    blocks = torch.tensor([5, 2, 6])
    found: list[list[torch.Tensor]] = [[], [], []]
    ends = [(0, 0, 0), (5, 38, 1), (8, 39, 2), (9, 40, 3)]  # two prompt steps and a decode step
    for step, (first, end) in enumerate(itertools.pairwise(ends)):
        parts = [one[a:b] for one, a, b in zip(whole, first, end, strict=True)]
        is_continued = torch.tensor([step > 0 and not is_cut] * 3) if step < 2 else None
        lengths = tuple(map(len, parts))
        # vLLM-Ascend passes a table of blocks, and the first of each row counts.
        table = blocks.unsqueeze(1).repeat(1, 2)
        output = convolve(torch.cat(parts), weight, states, lengths, table, is_continued)
        for mine, part in zip(found, output.split(lengths), strict=True):
            mine.append(part)
    pairs = zip(found, expected, strict=True)
    assert all(equal(torch.cat(mine), theirs) for mine, theirs in pairs) is not is_cut
    untouched = [block for block in range(BLOCKS) if block not in (5, 2, 6)]
    assert states[untouched].isnan().all()


def test_padding_is_not_convolved() -> None:
    states = torch.randn(BLOCKS, WIDTH - 1, CHANNELS)
    before = states.clone()
    x = torch.randn(2, CHANNELS)
    weight = torch.randn(WIDTH, CHANNELS)
    output = convolve(x, weight, states, (1, 1), torch.tensor([3, -1]), None)
    assert output[1].isnan().all() and not output[0].isnan().any()
    assert torch.equal(states[-1], before[-1]) and not torch.equal(states[3], before[3])


def decode(lengths: list[int], blocks: list[int], states: torch.Tensor) -> torch.Tensor:
    """Run a decode step. ``states`` has shape ``[blocks, heads, size, size]``."""
    query, key = torch.randn(2, 2, 2, 8)
    value = torch.randn(2, HEADS, 8)
    beta = torch.rand(2, HEADS)
    g = -torch.rand(2, HEADS)
    return gated_delta_rule.npu_recurrent_gated_delta_rule(
        query,
        key,
        value,
        states,
        beta=beta,
        g=g,
        actual_seq_lengths=torch.tensor(lengths),
        ssm_state_indices=torch.tensor(blocks),
    )


def test_padding_is_not_decoded() -> None:
    states = torch.randn(BLOCKS, HEADS, 8, 8)
    before = states.clone()
    found = decode([0, 1, 1], [3, -1], states)
    assert (found[1] == 0).all() and not (found[0] == 0).any()
    assert [int(block) for block in (states != before).flatten(1).any(1).nonzero()] == [3]


# The rest


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: norms.npu_rms_norm(torch.ones(2), torch.ones(2), eps=1), "npu_rms_norm.*'eps'"),
        (lambda: rotary.npu_rotary_mul(*[torch.ones(2)] * 3, "quarter"), "rotary_mode 'quarter'"),
        (lambda: attend(*torch.ones(3, 2, 4, 8), sparse_mode=3), "needs a 2048 x 2048 atten_mask"),
        (lambda: attend(*torch.ones(3, 2, 4, 8), input_layout="SBH"), "input_layout SBH"),
        (lambda: attend(*torch.ones(3, 2, 4, 8), pse_shift=torch.ones(1)), "'pse_shift'"),
        # Drafts would need these states.
        (
            lambda: decode([0, 2], [1, 2], torch.ones(BLOCKS, HEADS, 8, 8)),
            "one token of a sequence",
        ),
    ],
)
def test_what_is_not_emulated_is_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises((TypeError, NotImplementedError, RuntimeError), match=message):
        call()


def kda_inputs(num_tokens: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Queries, keys, values, gates and corrections; and the gates' parameters."""
    q, k, v, g = torch.randn(4, 1, num_tokens, HEADS, SIZE)
    beta = torch.rand(1, num_tokens, HEADS)
    return [q, k, v, g, beta], {
        "A_log": torch.randn(HEADS) * 0.3,
        "dt_bias": torch.randn(HEADS * SIZE) - 3,
        "scale": SIZE**-0.5,
        "lower_bound": -5.0,
    }


def kda_by_definition(
    inputs: list[torch.Tensor], state: torch.Tensor, parameters: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Kimi delta attention of one sequence and state ``[heads, value_size, key_size]``, by head.

    A state is kept as a map from keys to values: first each channel of the key fades, and then the
    value of the token's own key is moved towards the token's value.
    """
    q, k, v, g, beta = (one[0].double() for one in inputs)
    state = state.double().clone()
    answers = torch.zeros_like(v)
    for token, head in itertools.product(range(len(v)), range(HEADS)):
        bias = parameters["dt_bias"].double()[head * SIZE : (head + 1) * SIZE]
        steepness = parameters["A_log"].double()[head].exp()
        fading = torch.exp(-5 / (1 + torch.exp(-steepness * (g[token, head] + bias))))
        key = k[token, head] / k[token, head].norm()
        query = q[token, head] / q[token, head].norm() * parameters["scale"]
        kept = state[head] @ torch.diag(fading)
        wanted = beta[token, head] * v[token, head] + (1 - beta[token, head]) * (kept @ key)
        state[head] = kept + torch.outer(wanted - kept @ key, key)
        answers[token, head] = state[head] @ query
    return answers.unsqueeze(0), state


def test_prompts_of_kimi_delta_attention_follow_its_definition() -> None:
    inputs, parameters = kda_inputs(7)
    states = torch.randn(2, HEADS, SIZE, SIZE)
    q, k = (kimi_delta_attention.unit_length(one) for one in inputs[:2])
    found, last = kimi_delta_attention.prefill(
        q, k, *inputs[2:], initial_state=states, cu_seqlens=(0, 3, 7), **parameters
    )
    for number, part in enumerate((slice(0, 3), slice(3, 7))):
        own = [one[:, part] for one in inputs]
        expected, state = kda_by_definition(own, states[number], parameters)
        assert equal(found[:, part], expected.float())
        assert equal(last[number], state.float())


def test_drafts_of_kimi_delta_attention_begin_at_the_accepted_state() -> None:
    inputs, parameters = kda_inputs(5)
    states = torch.randn(BLOCKS, HEADS, SIZE, SIZE)
    before = states.clone()
    blocks = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 0, 0]], dtype=torch.int32)
    found = kimi_delta_attention.decode(
        *inputs,
        states,
        cu_seqlens=torch.tensor([0, 3, 4, 5]),
        ssm_state_indices=blocks,
        num_accepted_tokens=torch.tensor([2, 1, 1]),
        **parameters,
    )
    first = [one[:, :3] for one in inputs]
    expected, last = kda_by_definition(first, before[2], parameters)
    assert equal(found[:, :3], expected.float()) and equal(states[3], last.float())
    second = [one[:, 3:4] for one in inputs]
    expected, last = kda_by_definition(second, before[4], parameters)
    assert equal(found[:, 3:4], expected.float()) and equal(states[4], last.float())
    assert not found[:, 4].any(), "block 0 holds nothing"
    for untouched in (0, 5, 6):
        assert torch.equal(states[untouched], before[untouched])
    with pytest.raises(RuntimeError, match="expected one token"):
        kimi_delta_attention.decode(
            *inputs,
            states,
            cu_seqlens=torch.tensor([0, 3, 4, 5]),
            ssm_state_indices=blocks[:, 0],
            **parameters,
        )


def test_residuals_are_mixed_by_what_earlier_layers_left() -> None:
    prefix, addend = torch.randn(2, 5, SIZE)
    bank, before = torch.randn(2, 5, 3, SIZE)
    before.copy_(bank)
    proj, norm = torch.randn(1, SIZE), torch.rand(SIZE) + 0.5
    found, total, mixture = attention_residuals.attn_res_fwd(
        prefix, addend, bank, proj, norm, 1e-6, 2, norm, 1e-6, 2, True
    )
    assert torch.equal(total, prefix + addend)
    assert torch.equal(bank[:, 2], total) and torch.equal(bank[:, :2], before[:, :2])
    for row in range(5):
        sources = [before[row, 0], before[row, 1], total[row]]
        scores = [
            float((one / (one.square().mean() + 1e-6).sqrt() * norm) @ proj[0]) for one in sources
        ]
        weights = torch.tensor(scores).exp() / torch.tensor(scores).exp().sum()
        expected = sum(weight * one for weight, one in zip(weights, sources, strict=True))
        assert equal(mixture[row], expected, 1e-4)
        assert equal(found[row], expected / expected.square().mean().sqrt() * norm, 1e-4)
    alone, _, _ = attention_residuals.attn_res_fwd(
        prefix, None, bank, proj, norm, 1e-6, 2, mix=False
    )
    assert torch.equal(alone, prefix)
