# SPDX-License-Identifier: Apache-2.0
"""Linear attention by the gated delta rule: convolution, gates, and decode steps.

A state is one matrix for each value head. Each token scales the state down, corrects the value that
the state has for the token's key, and reads the state with the token's query. A group of value
heads shares one key head.
"""

from __future__ import annotations

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
) -> Tensor:
    """Convolves each channel over a sequence's tokens, which follow the tokens in its state.

    Args:
        x: shape ``[tokens, channels]``, one sequence after the other.
        weight: shape ``[width, channels]``; the last row belongs to the token itself.
        bias: shape ``[channels]``.
        conv_states: the last ``width - 1`` tokens of each sequence, shape
            ``[blocks, width - 1, channels]``; written.
        query_start_loc: first token of each sequence, shape ``[sequences + 1]``.
        cache_indices: block of each sequence, shape ``[sequences]``; or a table of shape
            ``[sequences, blocks]``, whose first column counts. Sequences with ``pad_slot_id`` or
            ``null_block_id`` are skipped.
        has_initial_state: whether a sequence continues from its state, shape ``[sequences]``.
            Without it, all sequences do.
        activation: "silu", or None.

    Returns:
        A tensor of the shape of ``x``, with NaN for sequences that are skipped.
    """
    if query_start_loc is None or cache_indices is None:
        raise RuntimeError("convolution: expected starts and blocks of sequences")
    kept = weight.shape[0] - 1
    if conv_states.shape[1] != kept or activation not in ("silu", None):
        raise RuntimeError(f"convolution: {conv_states.shape} for {kept} tokens, {activation=}")
    kernel = weight.float().t().unsqueeze(1)
    bias = None if bias is None else bias.float()
    starts = query_start_loc.tolist()
    blocks = cache_indices.reshape(len(cache_indices), -1)[:, 0].tolist()
    is_continued = [True] * len(blocks)
    if has_initial_state is not None:
        is_continued = has_initial_state.bool().tolist()
    output = torch.full_like(x, float("nan"))
    for number, block in enumerate(blocks):
        first, end = starts[number], starts[number + 1]
        if block in (pad_slot_id, null_block_id) or first == end:
            continue
        before = conv_states[block].float()
        if not is_continued[number]:
            before = torch.zeros_like(before)
        tokens = torch.cat((before, x[first:end].float()))
        found = functional.conv1d(tokens.t(), kernel, bias, groups=x.shape[1]).t()
        output[first:end] = functional.silu(found) if activation else found
        conv_states[block] = tokens[len(tokens) - kept :]
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
    if num_accepted_tokens is not None or max_query_len != 1:
        raise NotImplementedError("causal_conv1d_update: drafts are not emulated")
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
    if num_accepted_tokens_opt is not None:
        raise NotImplementedError("npu_causal_conv1d_custom: drafts are not emulated")
    sequences = (query_start_loc_opt, cache_indices_opt, initial_state_mode_opt)
    activation = "silu" if activation_mode else None
    output.copy_(_convolution(x, weight, bias_opt, conv_state, *sequences, activation, pad_slot_id))
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
        g: logarithm of the part of a state that is kept, shape ``[tokens, heads]``.
        beta: part of the correction that is made, shape of ``g``.
        state: shape ``[heads, value_size, key_size]``.
        scale: factor of queries.

    Returns:
        The output, of the shape of ``value``, and the last state.
    """
    group = value.shape[1] // key.shape[1]
    query = query.float().repeat_interleave(group, 1).unsqueeze(-1) * scale
    key = key.float().repeat_interleave(group, 1).unsqueeze(-1)
    value = value.float().unsqueeze(-1)
    left = g.float().exp()[..., None, None]
    beta = beta.float()[..., None, None]
    state = state.float()
    answers = []
    for token in range(len(value)):
        state = state * left[token]
        correction = (value[token] - state @ key[token]) * beta[token]
        state = state + correction @ key[token].transpose(-1, -2)
        answers.append((state @ query[token]).squeeze(-1))
    return torch.stack(answers) if answers else value.squeeze(-1), state


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
        ssm_state_indices: block of each token, shape ``[tokens]``. A sequence of several tokens
            would leave one state per token. Drafts need that; it is not emulated.
        g: as ``beta``.
    """
    name = "npu_recurrent_gated_delta_rule"
    if num_accepted_tokens is not None or gk is not None:
        raise NotImplementedError(f"{name}: drafts and gates of keys are not emulated")
    if g is None or beta is None or actual_seq_lengths is None or ssm_state_indices is None:
        raise RuntimeError(f"{name}: expected g, beta, lengths and blocks of sequences")
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    found = torch.zeros_like(value)
    first, *lengths = actual_seq_lengths.tolist()
    for length in lengths:
        if length > 1:
            raise NotImplementedError(f"{name}: {length} tokens of a sequence are not emulated")
        if length == 0:
            continue
        one = slice(first, first + 1)
        block = int(ssm_state_indices[first])
        first += 1
        if block < 0:
            continue
        answers, last = run_gated_delta_rule(
            query[one], key[one], value[one], g[one], beta[one], state[block], scale
        )
        found[one], state[block] = answers, last
    return found


recurrent_gated_delta_rule = kernel(
    "recurrent_gated_delta_rule", npu_recurrent_gated_delta_rule, like("value")
)
"""Functions of the library ``fla_npu``, by name."""
