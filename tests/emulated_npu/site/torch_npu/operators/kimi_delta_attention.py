# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Kimi delta attention (KDA): the gated delta rule with a gate for each channel of a key.

A state is one matrix for each head. Each token scales the rows of the state down, a channel of the
key by its own gate. The rest is the gated delta rule of `gated_delta_rule`. The two kernels belong
to the library ``fla_npu``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torch_npu.kernels import kernel, like, require
from torch_npu.operators.gated_delta_rule import run_gated_delta_rule, run_sequences


def channel_gates(raw: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """The logarithms of the parts of a state that are kept, in float32.

    Args:
        raw: shape ``[tokens, heads, key_size]``.
        a_log: shape ``[heads]``.
        dt_bias: shape ``[heads * key_size]``.
        lower_bound: the smallest logarithm. Without it, a gate has no bound.
    """
    shifted = raw.float() + dt_bias.float().view(raw.shape[1:])
    slope = a_log.float().exp().view(-1, 1)
    if lower_bound is None:
        return -slope * functional.softplus(shifted)
    return lower_bound * (slope * shifted).sigmoid()


def unit_length(x: Tensor) -> Tensor:
    """``x`` in float32, with its last dimension scaled to length 1."""
    long = x.float()
    return long * (long.square().sum(-1, True) + 1e-6).rsqrt()


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    *,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    A_log: Tensor,  # noqa: N803  # the library's name
    dt_bias: Tensor,
    scale: float,
    num_accepted_tokens: Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
) -> Tensor:
    """Decode steps: sequences continue from their states, and leave one state per token.

    Args:
        q: shape ``[1, tokens, heads, key_size]``, one sequence after the other.
        k: as ``q``.
        v: shape ``[1, tokens, heads, value_size]``.
        g: gates before `channel_gates`, as ``q``.
        beta: the part of a correction that is made, shape ``[1, tokens, heads]``.
        initial_state: shape ``[blocks, heads, value_size, key_size]``; written.
        cu_seqlens: the first token of each sequence, shape ``[sequences + 1]``.
        ssm_state_indices: the block of each sequence, shape ``[sequences]``; or the block of each
            token of a sequence, shape ``[sequences, tokens]``. Block 0 holds nothing: a sequence
            that would continue from it gets zeros, and a state for it is not written.
        num_accepted_tokens: the token of the last step after which each sequence continues, counted
            from 1, shape ``[sequences]``. Without it, sequences have one token.
        use_beta_sigmoid_in_kernel: whether ``beta`` still needs a sigmoid.
    """
    gates = channel_gates(g[0], A_log, dt_bias, lower_bound)
    parts = beta[0].float().sigmoid() if use_beta_sigmoid_in_kernel else beta[0]
    queries, keys = unit_length(q[0]), unit_length(k[0])
    blocks = ssm_state_indices.reshape(len(ssm_state_indices), -1).tolist()
    starts = cu_seqlens.tolist()
    accepted = None if num_accepted_tokens is None else num_accepted_tokens.tolist()
    found = torch.zeros_like(v)
    for number, row in enumerate(blocks[: len(starts) - 1]):
        first, end = starts[number], starts[number + 1]
        if end - first > 1 and accepted is None:
            raise RuntimeError(f"recurrent_kda: expected one token, found {end - first}")
        if end == first:
            continue
        before = row[0 if accepted is None else accepted[number] - 1]
        if before <= 0:
            continue
        last = initial_state[before]
        for token in range(first, end):
            one = slice(token, token + 1)
            found[0, one], last = run_gated_delta_rule(
                queries[one], keys[one], v[0, one], gates[one], parts[one], last, scale
            )
            if row[token - first] > 0:
                initial_state[row[token - first]] = last
    return found


_decode = kernel("recurrent_kda", decode, like("v"))


def recurrent_kda(
    *tensors: Tensor,
    layout: str,
    output_final_state: bool,
    inplace_final_state: bool,
    state_v_first: bool,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    allow_neg_eigval: bool,
    safe_gate: bool,
    lower_bound: float,
    **options: Any,
) -> tuple[Tensor, None]:
    """`decode`, as the library ``fla_npu`` has it. States are written in place only.

    Args:
        safe_gate: Whether ``lower_bound`` counts.
    """
    require("recurrent_kda", layout == "BSND", f"layout {layout} is not emulated")
    switches = (inplace_final_state, state_v_first, use_qk_l2norm_in_kernel, use_gate_in_kernel)
    require("recurrent_kda", all(switches), "expected states in place, norms and gates")
    require("recurrent_kda", not (output_final_state or allow_neg_eigval), "not emulated")
    return _decode(*tensors, lower_bound=lower_bound if safe_gate else None, **options), None


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor,
    cu_seqlens: Sequence[int],
    A_log: Tensor,  # noqa: N803
    dt_bias: Tensor,
    lower_bound: float | None,
) -> tuple[Tensor, Tensor]:
    """Parts of prompts, token by token. Queries and keys have length 1.

    Args:
        q: shape ``[1, tokens, heads, key_size]``, one sequence after the other.
        k: as ``q``.
        v: shape ``[1, tokens, heads, value_size]``.
        g: gates before `channel_gates`, as ``q``.
        beta: shape ``[1, tokens, heads]``.
        initial_state: shape ``[sequences, heads, value_size, key_size]``.
        cu_seqlens: the first token of each sequence, ``sequences + 1`` numbers.

    Returns:
        The output, of the shape and type of ``v``, and the last states, as ``initial_state``.
    """
    gates = channel_gates(g[0], A_log, dt_bias, lower_bound)
    answers, states = run_sequences(
        (q[0], k[0], v[0], gates, beta[0]), initial_state, cu_seqlens, scale
    )
    return answers.unsqueeze(0), states


_prefill = kernel(
    "chunk_kda_fwd",
    prefill,
    lambda call: [(one.shape, one.dtype) for one in (call.v, call.initial_state)],
)


def chunk_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    chunk_size: int,
    *,
    layout: str,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Sequence[int],
    chunk_indices: Sequence[int],
    safe_gate: bool,
    lower_bound: float,
    use_gate_in_kernel: bool,
    A_log: Tensor,  # noqa: N803
    dt_bias: Tensor,
    disable_recompute: bool,
    return_intermediate_states: bool,
    state_v_first: bool,
) -> tuple[Tensor, Tensor]:
    """`prefill`, as the library ``fla_npu`` has it.

    Args:
        chunk_size: The tokens of the device's chunks. Here a token follows the other.
        chunk_indices: The sequence and number of each chunk.
        safe_gate: Whether ``lower_bound`` counts.
        disable_recompute: This matters to training only.
    """
    lengths = [end - start for start, end in itertools.pairwise(cu_seqlens)]
    chunks = [range(-(-length // chunk_size)) for length in lengths]
    indices = [number for one, of_one in enumerate(chunks) for at in of_one for number in (one, at)]
    require("chunk_kda_fwd", list(chunk_indices) == indices, f"{chunk_indices} for {cu_seqlens}")
    require("chunk_kda_fwd", layout == "BSND", f"layout {layout} is not emulated")
    switches = (output_final_state, use_gate_in_kernel, state_v_first)
    require("chunk_kda_fwd", all(switches), "expected last states, gates and values first")
    require("chunk_kda_fwd", not return_intermediate_states, "one state per sequence is emulated")
    bound = lower_bound if safe_gate else None
    answers, states = _prefill(
        q, k, v, g, beta, scale, initial_state, cu_seqlens, A_log, dt_bias, bound
    )
    return answers, states
