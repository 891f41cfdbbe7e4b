# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Operators of compressed sparse attention, hyper connections and hash routing, on CPU tensors.

The references are transformers' modules, and plain torch where there is none.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch_npu.operators import (
    compressor,
    experts,
    hyper_connections,
    lightning_indexer,
    matrices,
    paged_cache,
    rotary,
    sparse_attention,
)
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as reference

HIDDEN = 128
CONFIG = DeepseekV4Config(
    hidden_size=HIDDEN,
    num_hidden_layers=2,
    layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
    num_hash_layers=1,
    vocab_size=64,
    n_routed_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=32,
    num_attention_heads=8,
    q_lora_rank=32,
    max_position_embeddings=4096,
)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def scaled(module: torch.nn.Module) -> torch.nn.Module:
    """Set the weights of a module to random numbers of scale 0.2."""
    for parameter in itertools.chain(module.parameters(), module.buffers()):
        if parameter.is_floating_point():
            parameter.data = parameter.data.new_empty(parameter.shape).normal_() * 0.2
    return module


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("iterations", [1, 20])
def test_hyper_connections_collapse_and_mix_as_the_reference_does(iterations: int) -> None:
    module = scaled(reference.DeepseekV4HyperConnection(CONFIG))
    module.hc_sinkhorn_iters = iterations
    streams = torch.randn(1, 9, 4, HIDDEN)
    answer = torch.randn(1, 9, HIDDEN)
    post, comb, collapsed = module(streams)
    weights = (module.fn, module.scale, module.base)
    sizes = (4, iterations)
    epsilons = CONFIG.rms_norm_eps, CONFIG.hc_eps
    found = hyper_connections.hc_pre(streams[0], *weights, *sizes, *epsilons)
    for one, other in zip(found, (collapsed[0], post[0], comb[0]), strict=True):
        close(one, other)
    mixed = post.unsqueeze(-1) * answer.unsqueeze(-2) + torch.matmul(
        comb.transpose(-1, -2), streams
    )
    close(hyper_connections.hc_post(answer, streams, post, comb), mixed)


def keys_of(module: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """The keys of one prompt that the reference computes, shape ``[keys, head_size]``."""
    positions = torch.arange(len(hidden_states))[None]
    if hasattr(module, "indexer"):
        module.indexer.forward = lambda *_: torch.zeros(1, len(hidden_states), 1).long()
    keys, _ = module(hidden_states[None], None, positions, None, 0)
    return keys[0, 0]


@pytest.mark.parametrize(("ratio", "block_size"), [(4, 8), (4, 2), (128, 32)])
def test_a_compressor_fed_in_steps_returns_the_keys_of_the_whole_prompt(
    ratio: int, block_size: int
) -> None:
    rng = random.Random(ratio + block_size)
    kind = reference.DeepseekV4CSACompressor if ratio == 4 else reference.DeepseekV4HCACompressor
    module = scaled(kind(CONFIG))
    coff = 2 if ratio == 4 else 1
    width = coff * CONFIG.head_dim
    lengths = (3 * ratio + 2, 2 * ratio, ratio - 1)
    prompts = [torch.randn(length, HIDDEN) for length in lengths]
    expected = [keys_of(module, prompt) for prompt in prompts]
    pages = iter(rng.sample(range(1, 1000), 900))
    table = torch.tensor(
        [[next(pages) for _ in range(-(-max(lengths) // block_size))] for _ in prompts]
    )
    state = torch.randn(1000, block_size, 2 * width) * 50  # numbers that earlier requests have left
    angles = torch.arange(4096)[:, None] * module.rotary_emb.compress_inv_freq
    cos, sin = (function(angles).repeat_interleave(2, -1) for function in (torch.cos, torch.sin))
    cache = torch.full((40, 16, CONFIG.head_dim), 7.0)
    key_table = torch.arange(1, 37, dtype=torch.int32).view(3, 12)
    done = [0] * len(prompts)
    while any(n < len(prompt) for n, prompt in zip(done, prompts, strict=True)):
        step = [
            min(rng.choice((0, 1, 3, ratio, ratio + 1)), len(p) - n)
            for n, p in zip(done, prompts, strict=True)
        ]
        x = torch.cat([p[n : n + more] for p, n, more in zip(prompts, done, step, strict=True)])
        bounds = torch.tensor([0, *itertools.accumulate(step)])
        start = torch.tensor(done)
        if not len(x):
            continue
        rows = min(len(x), len(x) // ratio + len(prompts))
        form = compressor.BLOCK_AND_OFFSET
        arguments = (cos, sin, bounds, start, key_table, 16, form, ratio, rows, len(prompts))
        one_cos, one_sin, slots = compressor.compressor_metadata(*arguments)
        call = SimpleNamespace(num_compressed_tokens=rows, rope_cos=cos)
        shapes = compressor.compressor_metadata_outputs(call)
        assert [(tuple(t.shape), t.dtype) for t in (one_cos, one_sin, slots)] == shapes
        keys = compressor.compressor(
            x,
            module.kv_proj.weight,
            module.gate_proj.weight,
            state,
            module.position_bias,
            module.kv_norm.weight,
            *(one.view(rows, -1) for one in (one_sin, one_cos)),
            table,
            bounds,
            None,
            start,
            64,
            ratio,
            coff,
            CONFIG.rms_norm_eps,
            2,
            1,
        )
        paged_cache.scatter_nd_update(cache, slots, keys)
        done = [n + more for n, more in zip(done, step, strict=True)]
    for request, keys in enumerate(expected):
        written = cache[key_table[request].long()].flatten(0, 1)
        close(written[: len(keys)], keys)
        assert written[len(keys) :].eq(7).all()
    assert cache[0].eq(7).all()
    assert cache[-3:].eq(7).all(), "slots of -1 are left out"


def test_states_of_page_0_are_not_stored() -> None:
    state = torch.zeros(2, 8, 4 * 128)
    arguments = [torch.randn(8, HIDDEN), torch.randn(256, HIDDEN), torch.randn(256, HIDDEN), state]
    tail = [torch.randn(4, 256), torch.ones(128), torch.zeros(3, 64), torch.ones(3, 64)]
    where = torch.tensor([[0]]), torch.tensor([0, 8]), None, torch.tensor([0])
    compressor.compressor(*arguments, *tail, *where, 64, 4, 2, 1e-6, 2, 1)
    assert not state.any()


def test_keys_of_several_requests_get_their_slots_and_the_rest_gets_none() -> None:
    cos = torch.arange(2048 * 4, dtype=torch.float32).view(2048, 4)
    bounds = torch.tensor([0, 131, 151, 158])
    start = torch.tensor([0, 125, 640])
    table = torch.tensor([[10, 11], [20, 21], [30, 31]])
    one, other, slots = compressor.compressor_metadata(
        cos, -cos, bounds, start, table, 128, compressor.BLOCK_AND_OFFSET, 4, 42, 3
    )
    expected = [[10, row] for row in range(32)]  # 131 tokens from the first on: 32 windows end
    expected += [[20, row] for row in range(31, 36)]  # 125..144: the 32nd window to the 36th
    expected += [[31, 32]]  # 640..646: the 161st
    expected += [[-1, 127]] * 4
    assert slots.tolist() == expected
    assert one[31, 0, 0, 0] == cos[124, 0] and one[37, 0, 0, 0] == cos[640, 0]
    assert one[38:].eq(1).all() and other[38:].eq(0).all()


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_attention_reads_the_window_the_chosen_keys_and_the_sink(ratio: int) -> None:
    heads = 8
    size = 32
    window = 16
    lengths = (300, 9, 130)
    steps = (140, 1, 130)
    bounds = torch.tensor([0, *itertools.accumulate(steps)])
    q = torch.randn(sum(steps), heads, size)
    sinks = torch.randn(heads)
    swa = torch.randn(200, 16, 1, size)
    table = torch.randperm(199)[: 3 * 20].view(3, 20) + 1
    compressed = torch.randn(60, 16, 1, size) if ratio else None
    cmp_table = torch.randperm(59)[: 3 * 5].view(3, 5) + 1
    chosen = None
    expected = []
    for request, (length, step) in enumerate(zip(lengths, steps, strict=True)):
        keys = swa[table[request]].flatten(0, 1)[:length, 0]
        more = (
            compressed[cmp_table[request]].flatten(0, 1)[: length // ratio, 0]
            if ratio
            else keys[:0]
        )
        position = torch.arange(length - step, length)
        seen = position[:, None] - torch.arange(length)
        seen = (seen >= 0) & (seen < window)
        may = torch.arange(len(more)) < (((position + 1) // ratio)[:, None] if ratio else 0)
        if ratio == 4:
            may &= torch.rand(may.shape) < 0.5
            picks = torch.where(may, torch.arange(len(more)), -1)
            picks = torch.nn.functional.pad(picks, (0, 80 - picks.shape[1]), value=-1)
            chosen = picks if chosen is None else torch.cat((chosen, picks))
        mask = torch.where(torch.cat((seen, may), 1), 0.0, float("-inf"))[None, None]
        module = torch.nn.Module()
        module.num_key_value_groups = heads
        module.sinks = sinks
        module.training = False
        both = torch.cat((keys, more))[None, None]
        query = q[bounds[request] : bounds[request + 1]].transpose(0, 1)[None]
        expected.append(
            reference.eager_attention_forward(module, query, both, both, mask, size**-0.5)[0][0]
        )
    found, _ = sparse_attention.sparse_attention(
        q,
        ori_kv=swa,
        cmp_kv=compressed,
        cmp_sparse_indices=chosen[:, None].int() if ratio == 4 else None,
        ori_block_table=table,
        cmp_block_table=cmp_table,
        cu_seqlens_q=bounds,
        seqused_kv=torch.tensor(lengths),
        sinks=sinks,
        metadata=torch.zeros(1024),
        softmax_scale=size**-0.5,
        cmp_ratio=max(ratio, 1),
        ori_win_left=window - 1,
        layout_q="TND",
    )
    close(found, torch.cat(expected))


def test_the_indexer_chooses_the_best_keys_whose_windows_have_ended() -> None:
    lengths = (900, 130, 3)
    steps = (70, 1, 3)
    count = 64
    bounds = list(itertools.accumulate(steps))
    query = torch.randint(-127, 128, (sum(steps), 64, 128), dtype=torch.int8)
    weights = torch.randn(sum(steps), 64).half()
    query_scale = torch.rand(sum(steps), 64).half()
    key = torch.randint(-127, 128, (40, 16, 1, 128), dtype=torch.int8)
    key_scale = torch.rand(40, 16, 1).half()
    table = torch.randperm(39).view(3, 13)
    table = torch.nn.functional.pad(table, (0, 3)) + 1
    table[0, 13:] = torch.tensor([1, 2, 3])
    found, _ = lightning_indexer.quant_lightning_indexer(
        query,
        key,
        weights,
        query_scale,
        key_scale,
        actual_seq_lengths_query=torch.tensor(bounds),
        actual_seq_lengths_key=torch.tensor(lengths),
        block_table=table,
        metadata=torch.zeros(1024),
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=count,
        cmp_ratio=4,
    )
    for request, (length, step) in enumerate(zip(lengths, steps, strict=True)):
        rows = key[table[request]].flatten(0, 1)[:, 0].double()
        scales = key_scale[table[request]].flatten().double()
        for token in range(step):
            row = bounds[request] - step + token
            visible = (length - step + token + 1) // 4
            heads = (rows[:visible] @ query[row].double().T).relu() * scales[:visible, None]
            scores = (heads * (weights[row] * query_scale[row]).double()).sum(1)
            best = scores.topk(min(count, visible)).values
            chosen = [one for one in found[row, 0].tolist() if one >= 0]
            assert len(set(chosen)) == len(chosen) == len(best)
            torch.testing.assert_close(
                scores[chosen].sort(descending=True).values, best, rtol=1e-5, atol=0
            )


def test_a_token_goes_to_the_experts_of_its_id_or_to_those_that_score_best() -> None:
    by_id = scaled(reference.DeepseekV4HashRouter(CONFIG))
    by_score = scaled(reference.DeepseekV4TopKRouter(CONFIG))
    by_id.tid2eid = torch.stack([torch.randperm(16)[:4] for _ in range(64)])
    ids = torch.randint(64, (1, 30))
    hidden = torch.randn(1, 30, HIDDEN)
    for module, extra in ((by_id, (ids,)), (by_score, ())):
        logits, weights, chosen = module(hidden, *extra)
        found = experts.moe_gating_top_k_hash(
            logits,
            4,
            getattr(module, "e_score_correction_bias", None),
            *((ids, module.tid2eid) if extra else ()),
            routed_scaling_factor=CONFIG.routed_scaling_factor,
            group_select_mode=1,
            norm_type=2,
        )
        dense = torch.zeros(30, 16)
        other = torch.zeros(30, 16)
        dense.scatter_(1, chosen, weights)
        other.scatter_(1, found[1].long(), found[0])
        close(other, dense)


def test_a_part_of_each_head_is_turned_in_place_and_back() -> None:
    x = torch.randn(7, 3, 96)
    angles = torch.rand(7, 16)
    cos = angles.cos().repeat_interleave(2, -1)
    sin = angles.sin().repeat_interleave(2, -1)
    expected = reference.apply_rotary_pos_emb(
        x[None], angles.cos()[None], angles.sin()[None], unsqueeze_dim=2
    )[0]
    found = x.clone()
    for sign, result in ((1, expected), (-1, x)):
        rotary.inplace_partial_rotary_mul(
            found.unsqueeze(1),
            cos[:, None, None],
            sign * sin[:, None, None],
            "interleave",
            [64, 96],
        )
        close(found, result)


def test_integers_with_scales_stand_for_what_they_were_made_of() -> None:
    x = torch.randn(5, 3, 64)
    x[2, 1] = 0
    quantized, scale = matrices.npu_dynamic_quant(x)
    assert quantized.dtype == torch.int8
    assert quantized.abs().amax(-1).flatten().tolist() == [127] * 7 + [0] + [127] * 7
    assert ((quantized * scale.unsqueeze(-1) - x).abs() <= scale.unsqueeze(-1) / 2 + 1e-7).all()
