# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Linear attention by the gated delta rule: convolution, gates, and decode steps.

A state is one matrix for each value head. Each token scales the state down, corrects the value that
the state has for the token's key, and reads the state with the token's query. A group of value
heads shares one key head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torch_npu.kernels import kernel, kernel_operator, like, operator


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor | None,
    cache_indices: Tensor | None,
    has_initial_state: Tensor | None = None,
    activation: str | None = None,
    pad_slot_id: int = -1,
    null_block_id: int | None = None,
    num_accepted_tokens: Tensor | None = None,
) -> Tensor:
    """Convolves each channel over a sequence's tokens, which follow the tokens in its state.

    Args:
        x: shape ``[tokens, channels]``, one sequence after the other.
        weight: shape ``[width, channels]``; the last row belongs to the token itself.
        bias: shape ``[channels]``.
        conv_states: the last tokens of each sequence, ``width - 1`` and one per draft, shape
            ``[blocks, width - 1 + drafts, channels]``; written.
        query_start_loc: first token of each sequence, shape ``[sequences + 1]``.
        cache_indices: block of each sequence, shape ``[sequences]``; or a table of shape
            ``[sequences, blocks]``, whose first column counts. Sequences with ``pad_slot_id`` or
            ``null_block_id`` are skipped.
        has_initial_state: whether a sequence continues from its state, shape ``[sequences]``.
            Without it, all sequences do.
        activation: "silu", or None.
        num_accepted_tokens: how many of its tokens of the last step each sequence keeps, shape
            ``[sequences]``. Without it, a sequence has no drafts, and keeps all.

    Returns:
        A tensor of the shape of ``x``, with NaN for sequences that are skipped.
    """
    if query_start_loc is None or cache_indices is None:
        raise RuntimeError("convolution: expected starts and blocks of sequences")
    kept = weight.shape[0] - 1
    if conv_states.shape[1] < kept or activation not in ("silu", None):
        raise RuntimeError(f"convolution: {conv_states.shape} for {kept} tokens, {activation=}")
    kernel = weight.float().t().unsqueeze(1)
    bias = None if bias is None else bias.float()
    starts = query_start_loc.tolist()
    blocks = cache_indices.reshape(len(cache_indices), -1)[:, 0].tolist()
    is_continued = [True] * len(blocks)
    if has_initial_state is not None:
        is_continued = has_initial_state.bool().tolist()
    accepted = None if num_accepted_tokens is None else num_accepted_tokens.tolist()
    output = torch.full_like(x, float("nan"))
    for number, block in enumerate(blocks):
        first, end = starts[number], starts[number + 1]
        if block in (pad_slot_id, null_block_id) or first == end:
            continue
        rejected_from = 0 if accepted is None else accepted[number] - 1
        before = conv_states[block, rejected_from : rejected_from + kept].float()
        if not is_continued[number]:
            before = torch.zeros_like(before)
        tokens = torch.cat((before, x[first:end].float()))
        found = functional.conv1d(tokens.t(), kernel, bias, groups=x.shape[1]).t()
        output[first:end] = functional.silu(found) if activation else found
        # The first of the tokens of a sequence with drafts is always kept.
        last = tokens[len(tokens) - kept :] if accepted is None else tokens[1:]
        conv_states[block, : len(last)] = last
    return output


_convolution = kernel("convolution", convolve, like("x"))


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    **options: Any,
) -> Tensor:
    """``convolve`` for prompts, as the library ``fla_npu`` has it."""
    return _convolution(x, weight, bias, conv_states, query_start_loc, **options)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int,
    null_block_id: int,
    out: Tensor,
) -> Tensor:
    """``convolve`` for decoding, as the library ``fla_npu`` has it; writes to ``out``."""
    if num_accepted_tokens is None and max_query_len != 1:
        raise NotImplementedError("causal_conv1d_update: expected counts of accepted tokens")
    out.copy_(
        _convolution(
            x,
            weight,
            bias,
            conv_state,
            query_start_loc,
            conv_state_indices,
            activation=activation,
            null_block_id=null_block_id,
            num_accepted_tokens=num_accepted_tokens,
        )
    )
    return out


@operator(
    "_C_ascend.npu_causal_conv1d_custom(Tensor output, Tensor x, Tensor weight, Tensor conv_state,"
    " Tensor? bias_opt, Tensor? query_start_loc_opt, Tensor? cache_indices_opt,"
    " Tensor? initial_state_mode_opt, Tensor? num_accepted_tokens_opt, int activation_mode,"
    " int pad_slot_id, int run_mode) -> Tensor output"
)
def npu_causal_conv1d_custom(
    output: Tensor,
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    bias_opt: Tensor | None,
    query_start_loc_opt: Tensor | None,
    cache_indices_opt: Tensor | None,
    initial_state_mode_opt: Tensor | None,
    num_accepted_tokens_opt: Tensor | None,
    activation_mode: int,
    pad_slot_id: int,
    run_mode: int,
) -> Tensor:
    """``convolve``, as vLLM-Ascend 0.23.0 has it; writes to ``output``.

    Args:
        activation_mode: 1 for SiLU, 0 for none.
        run_mode: 0 for prompts, 1 for decoding. Here both are the same.
    """
    sequences = (query_start_loc_opt, cache_indices_opt, initial_state_mode_opt)
    activation = "silu" if activation_mode else None
    output.copy_(
        _convolution(
            x,
            weight,
            bias_opt,
            conv_state,
            *sequences,
            activation,
            pad_slot_id,
            num_accepted_tokens=num_accepted_tokens_opt,
        )
    )
    return output


@operator("_C_ascend.npu_fused_gdn_gating")
def npu_fused_gdn_gating(
    A_log: Tensor,  # noqa: N803  # the schema's name
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[Tensor, Tensor]:
    """The two gates: the part of a state that is kept, and the part of a correction that is made.

    Args:
        A_log: shape ``[heads]``.
        a: shape ``[tokens, heads]``.
        b: as ``a``.
        dt_bias: as ``A_log``.
        beta: parameter of softplus.
        threshold: value from which softplus is linear.

    Returns:
        The logarithm of the kept part in float32, and the part of the correction in the type of
        ``b``. Both are ``[1, tokens, heads]``.
    """
    step = functional.softplus(a.float() + dt_bias.float(), beta, threshold)
    return (-A_log.float().exp() * step).unsqueeze(0), b.float().sigmoid().to(b.dtype).unsqueeze(0)


def run_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Computes one sequence token by token in float32.

    Args:
        query: shape ``[tokens, key_heads, key_size]``.
        key: as ``query``.
        value: shape ``[tokens, heads, value_size]``.
        g: logarithm of the part of a state that is kept, shape ``[tokens, heads]``, or
            ``[tokens, heads, key_size]`` if each channel of a key has its own.
        beta: part of the correction that is made, shape ``[tokens, heads]``.
        state: shape ``[heads, value_size, key_size]``.
        scale: factor of queries.

    Returns:
        The output, of the shape of ``value``, and the last state.
    """
    group = value.shape[1] // key.shape[1]
    query = query.float().repeat_interleave(group, 1).unsqueeze(-1) * scale
    key = key.float().repeat_interleave(group, 1).unsqueeze(-1)
    value = value.float().unsqueeze(-1)
    left = g.float().exp().view(*value.shape[:2], 1, -1)
    beta = beta.float()[..., None, None]
    state = state.float()
    answers = []
    for token in range(len(value)):
        state = state * left[token]
        correction = (value[token] - state @ key[token]) * beta[token]
        state = state + correction @ key[token].transpose(-1, -2)
        answers.append((state @ query[token]).squeeze(-1))
    return torch.stack(answers) if answers else value.squeeze(-1), state


def run_sequences(
    inputs: Sequence[Tensor], initial_state: Tensor, starts: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Computes parts of prompts, one sequence after the other.

    Args:
        inputs: what `run_gated_delta_rule` reads before the state, each with the tokens of all
            sequences in its first dimension.
        initial_state: shape ``[sequences, heads, value_size, key_size]``.
        starts: the first token of each sequence, ``sequences + 1`` numbers.

    Returns:
        The output, of the shape and type of the values, and the last states, as ``initial_state``.
    """
    answers = torch.zeros_like(inputs[2])
    states = torch.empty_like(initial_state)
    for number, state in enumerate(initial_state):
        part = slice(starts[number], starts[number + 1])
        query, key, value, g, beta = (one[part] for one in inputs)
        answers[part], states[number] = run_gated_delta_rule(
            query, key, value, g, beta, state, scale
        )
    return answers, states


@kernel_operator("_C_ascend.npu_recurrent_gated_delta_rule", like("value"))
def npu_recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    *,
    beta: Tensor | None = None,
    scale: float | None = None,
    actual_seq_lengths: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    g: Tensor | None = None,
    gk: Tensor | None = None,
) -> Tensor:
    """Decode steps: sequences continue from their states.

    Args:
        query: normed, shape ``[tokens, key_heads, key_size]``.
        key: as ``query``.
        value: shape ``[tokens, heads, value_size]``.
        state: shape ``[blocks, heads, value_size, key_size]``; written.
        beta: shape ``[tokens, heads]``.
        scale: factor of queries; ``key_size ** -0.5`` if None.
        actual_seq_lengths: the first token of the first sequence, and the number of tokens of each
            sequence, shape ``[1 + sequences]``.
        ssm_state_indices: block of each token, shape ``[tokens]``. A sequence with drafts leaves
            one state per token.
        num_accepted_tokens: the token of the last step after which each sequence continues, counted
            from 1, shape ``[sequences]``. Without it, sequences have one token.
        g: as ``beta``.
    """
    name = "npu_recurrent_gated_delta_rule"
    if gk is not None:
        raise NotImplementedError(f"{name}: gates of keys are not emulated")
    if g is None or beta is None or actual_seq_lengths is None or ssm_state_indices is None:
        raise RuntimeError(f"{name}: expected g, beta, lengths and blocks of sequences")
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    found = torch.zeros_like(value)
    first, *lengths = actual_seq_lengths.tolist()
    blocks = ssm_state_indices.flatten().tolist()
    accepted = [1] * len(lengths) if num_accepted_tokens is None else num_accepted_tokens.tolist()
    for number, length in enumerate(lengths):
        if length > 1 and num_accepted_tokens is None:
            raise RuntimeError(f"{name}: expected one token of a sequence, found {length}")
        if length == 0:
            continue
        before = blocks[first + accepted[number] - 1]
        last = state[before] if before >= 0 else None
        for token in range(first, first + length):
            if last is not None:
                one = slice(token, token + 1)
                found[one], last = run_gated_delta_rule(
                    query[one], key[one], value[one], g[one], beta[one], last, scale
                )
                state[blocks[token]] = last
        first += length
    return found


recurrent_gated_delta_rule = kernel(
    "recurrent_gated_delta_rule", npu_recurrent_gated_delta_rule, like("value")
)
"""Functions of the library ``fla_npu``, by name."""
