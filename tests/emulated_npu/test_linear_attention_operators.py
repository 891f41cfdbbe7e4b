# SPDX-License-Identifier: Apache-2.0
"""Linear attention's operators compute what transformers' Qwen3-Next does.

Prompts are compared with its algorithm in chunks of 64 tokens, and steps of decoding with chunks
that go on. A negative control calls the operator with something wrong, and has to differ.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional
from torch_npu.custom_operators import gated_delta_rule
from torch_npu.stand_ins import linear_attention
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next

KEY_HEADS, HEADS, KEY_SIZE, VALUE_SIZE = 2, 4, 16, 24
CHANNELS, WIDTH, BLOCKS = 12, 4, 7
LENGTHS = (1, 63, 64, 65, 2, 200)
"""Around the chunks of the device, and shorter than the convolution."""

Rule = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def equal(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> bool:
    return found.shape == expected.shape and torch.allclose(
        found.float(), expected.float(), rtol=tolerance, atol=tolerance
    )


def starts_of(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def normed(x: torch.Tensor) -> torch.Tensor:
    return functional.normalize(x, dim=-1)


def inputs(num_tokens: int) -> Rule:
    """Queries, keys, values, what is left of states, parts of corrections; ``[1, tokens, ...]``."""
    query, key = (normed(torch.randn(1, num_tokens, KEY_HEADS, KEY_SIZE)) for _ in range(2))
    value = torch.randn(1, num_tokens, HEADS, VALUE_SIZE)
    g = -0.1 * torch.rand(1, num_tokens, HEADS)
    return query, key, value, g, torch.rand(1, num_tokens, HEADS)


def in_chunks(rule: Rule, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' answers to one sequence; ``state`` has shape ``[heads, key, value]``."""
    query, key, *rest = rule
    query, key = (one.repeat_interleave(HEADS // KEY_HEADS, 2) for one in (query, key))
    value, g, beta = rest
    answers, last = modeling_qwen3_next.torch_chunk_gated_delta_rule(
        query, key, value, g, beta, initial_state=state.unsqueeze(0), output_final_state=True
    )
    return answers, last[0]


# The convolution


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    lengths: tuple[int, ...],
    blocks: torch.Tensor,
    is_continued: torch.Tensor | None,
) -> torch.Tensor:
    output = torch.full_like(x, float("nan"))
    gated_delta_rule.npu_causal_conv1d_custom(
        *(output, x, weight, states, None, starts_of(lengths), blocks, is_continued, None, 1, -1),
        0 if is_continued is not None else 1,
    )
    return output


@pytest.mark.parametrize("is_cut", [False, True], ids=["states go on", "states are lost"])
def test_parts_of_sequences_are_convolved_as_the_whole(is_cut: bool) -> None:
    """Three prompts in two steps, beside a step of decoding each; blocks in any order."""
    weight = torch.randn(WIDTH, CHANNELS)
    whole = [torch.randn(length, CHANNELS) for length in (9, 40, 3)]
    expected = [
        modeling_qwen3_next.causal_conv1d_fn(
            one.t().unsqueeze(0), weight.t().contiguous(), None, activation="silu"
        )[0].t()
        for one in whole
    ]
    states = torch.full((BLOCKS, WIDTH - 1, CHANNELS), float("nan"))  # what nobody may read
    blocks = torch.tensor([5, 2, 6])
    found: list[list[torch.Tensor]] = [[], [], []]
    ends = [(0, 0, 0), (5, 38, 1), (8, 39, 2), (9, 40, 3)]  # two steps of prompts, one of decoding
    for step, (first, end) in enumerate(itertools.pairwise(ends)):
        parts = [one[a:b] for one, a, b in zip(whole, first, end, strict=True)]
        is_continued = torch.tensor([step > 0 and not is_cut] * 3) if step < 2 else None
        lengths = tuple(map(len, parts))
        # A table of blocks, as vLLM-Ascend gives it: the first of each counts.
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
    x, weight = torch.randn(2, CHANNELS), torch.randn(WIDTH, CHANNELS)
    output = convolve(x, weight, states, (1, 1), torch.tensor([3, -1]), None)
    assert output[1].isnan().all() and not output[0].isnan().any()
    assert torch.equal(states[-1], before[-1]) and not torch.equal(states[3], before[3])


# Gates, norms, order of heads


def test_gates_are_those_of_transformers() -> None:
    a, b = torch.randn(5, HEADS) * 20, torch.randn(5, HEADS).bfloat16()
    a_log, dt_bias = torch.randn(HEADS), torch.randn(HEADS)
    g, beta = gated_delta_rule.npu_fused_gdn_gating(a_log, a, b, dt_bias)
    assert equal(g[0], -a_log.exp() * (1 + (a + dt_bias).double().exp()).log())
    assert g.dtype == torch.float32 and beta.dtype == torch.bfloat16
    assert equal(beta[0], b.sigmoid())
    assert not equal(gated_delta_rule.npu_fused_gdn_gating(a_log, a, b, -dt_bias)[0], g)


def test_heads_are_sorted_as_transformers_sorts_them() -> None:
    config = Qwen3NextConfig(
        hidden_size=32,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=KEY_SIZE,
        linear_value_head_dim=VALUE_SIZE,
    )
    layer = modeling_qwen3_next.Qwen3NextGatedDeltaNet(config, layer_idx=0)
    qkvz = torch.randn(5, KEY_HEADS * 2 * KEY_SIZE + HEADS * 2 * VALUE_SIZE)
    ba = torch.randn(5, 2 * HEADS)
    query, key, value, gate, b, a = layer.fix_query_key_value_ordering(qkvz[None], ba[None])
    expected = torch.cat([one[0].flatten(1) for one in (query, key, value)], -1)
    sizes = (KEY_HEADS, HEADS, KEY_SIZE, VALUE_SIZE)
    found = linear_attention.split_heads(qkvz, ba, *sizes)
    for mine, theirs in zip(found, (expected, gate[0], b[0], a[0]), strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(linear_attention.split_heads(qkvz.flip(1), ba, *sizes)[0], expected)


def test_norms_are_those_of_transformers() -> None:
    x, z = torch.randn(7, 32), torch.randn(7, 32)
    norm = modeling_qwen3_next.Qwen3NextRMSNormGated(32, eps=1e-5)
    norm.weight.data = torch.randn(32)
    weight = norm.weight.data
    found, mean, inverse = linear_attention.gated_norm(x, weight, None, 1e-5, z=z, is_rms_norm=True)
    assert equal(found, norm(x, z)) and mean is None
    assert equal(inverse, x.square().mean(-1).add(1e-5).rsqrt())
    before = linear_attention.gated_norm(
        x, weight, None, 1e-5, z=z, norm_before_gate=False, is_rms_norm=True
    )[0]
    assert not equal(before, found)
    plain = functional.rms_norm(x * functional.silu(z), (32,), weight, 1e-5)
    assert equal(before, plain)
    halves = linear_attention.gated_norm(x, weight, None, 1e-5, group_size=16, is_rms_norm=True)[0]
    assert equal(halves[:, 16:], functional.rms_norm(x[:, 16:], (16,), weight[16:], 1e-5))
    assert equal(linear_attention.l2_norm(x), modeling_qwen3_next.l2norm(x))
    assert linear_attention.l2_norm(x.bfloat16()).dtype == torch.bfloat16
    assert not equal(linear_attention.l2_norm(x, eps=1.0), modeling_qwen3_next.l2norm(x))


# States


def test_new_sequences_begin_with_empty_states() -> None:
    states = torch.randn(3, HEADS, KEY_SIZE, VALUE_SIZE)
    states[1] = float("nan")
    kept = states.clone()
    linear_attention.clear_states(states, torch.tensor([True, False, True]))
    assert torch.equal(states[[0, 2]], kept[[0, 2]]) and (states[1] == 0).all()


def test_states_are_copied_by_their_addresses() -> None:
    source, target = torch.randn(3, 8), torch.zeros(3, 8)
    rows = [(0, 2), (2, 0)]
    linear_attention.copy_memory(
        torch.tensor([source[one].data_ptr() for one, _ in rows]),
        torch.tensor([target[one].data_ptr() for _, one in rows]),
        torch.tensor([8 * 4, 6 * 4], dtype=torch.int32),
        BLOCK_SIZE=1024,
    )
    assert torch.equal(target[2], source[0]) and (target[1] == 0).all()
    assert torch.equal(target[0, :6], source[2, :6]) and (target[0, 6:] == 0).all()


@pytest.mark.parametrize("is_wrong", [False, True], ids=["their states", "each other's states"])
def test_prompts_go_on_from_their_states(is_wrong: bool) -> None:
    rule = inputs(sum(LENGTHS))
    states = torch.randn(len(LENGTHS), HEADS, KEY_SIZE, VALUE_SIZE)
    parts = zip(*(one.split(LENGTHS, 1) for one in rule), strict=True)
    expected = [in_chunks(part, state) for part, state in zip(parts, states, strict=True)]
    scale = KEY_SIZE**-0.5
    given = states.flip(0) if is_wrong else states
    answers, last = linear_attention.prefill(*rule, given, starts_of(LENGTHS), scale)
    for number, (answer, state) in enumerate(expected):
        mine = answers.split(LENGTHS, 1)[number]
        assert equal(mine, answer) is not is_wrong
        # A long sequence replaces what its state said.
        assert is_wrong or equal(last[number], state)


@pytest.mark.parametrize("is_wrong", [False, True], ids=["its block", "another block"])
def test_steps_of_decoding_go_on_from_prompts(is_wrong: bool) -> None:
    """Beside other sequences; the last of the batch is padding."""
    prompts, steps = (70, 3, 64), 5
    rules = [inputs(tokens + steps) for tokens in prompts]
    empty = torch.zeros(HEADS, KEY_SIZE, VALUE_SIZE)
    expected = [in_chunks(rule, empty) for rule in rules]
    state = torch.full((BLOCKS, HEADS, VALUE_SIZE, KEY_SIZE), float("nan"))
    blocks = torch.tensor([4, 1, 6, -1])
    for block, rule, tokens in zip(blocks, rules, prompts, strict=False):
        part: Rule = tuple(one[:, :tokens] for one in rule)  # type: ignore[assignment]
        state[block] = in_chunks(part, empty)[1].transpose(-1, -2)
    if is_wrong:
        blocks = torch.tensor([1, 6, 4, -1])
    for step in range(steps):
        tokens = [
            torch.cat([one[0, at + step : at + step + 1] for one, at in zip(ones, prompts)])  # noqa: B905
            for ones in zip(*rules, strict=True)
        ]
        query, key, value, g, beta = (torch.cat((one, one[:1])) for one in tokens)
        found = gated_delta_rule.npu_recurrent_gated_delta_rule(
            *(query, key, value, state),
            beta=beta,
            g=g,
            scale=KEY_SIZE**-0.5,
            actual_seq_lengths=torch.tensor([0, 1, 1, 1, 1], dtype=torch.int32),
            ssm_state_indices=blocks,
        )
        for number, (answers, _) in enumerate(expected):
            assert equal(found[number], answers[0, prompts[number] + step]) is not is_wrong
        assert (found[-1] == 0).all()
    if not is_wrong:
        for block, (_, last) in zip(blocks, expected, strict=False):
            assert equal(state[block], last.transpose(-1, -2))
    assert state[[0, 2, 3, 5]].isnan().all()


def test_what_drafts_need_is_refused() -> None:
    query, key, value, g, beta = (one[0] for one in inputs(2))
    state = torch.zeros(BLOCKS, HEADS, VALUE_SIZE, KEY_SIZE)
    with pytest.raises(NotImplementedError, match="2 tokens of a sequence"):
        gated_delta_rule.npu_recurrent_gated_delta_rule(
            *(query, key, value, state),
            beta=beta,
            g=g,
            actual_seq_lengths=torch.tensor([0, 2]),
            ssm_state_indices=torch.tensor([1, 2]),
        )
