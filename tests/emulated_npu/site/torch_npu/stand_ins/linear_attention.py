# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Linear attention by the gated delta rule, apart from operators of the device.

Prompts are computed token by token. The device computes chunks of 64 tokens in bfloat16, which
would hide differences here. So vLLM-Ascend's host code for these chunks does not run.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torch_npu.kernels import kernel
from torch_npu.operators import gated_delta_rule, kimi_delta_attention
from torch_npu.operators.gated_delta_rule import run_sequences
from torch_npu.operators.norms import npu_rms_norm
from torch_npu.stand_ins import Launched


def split_heads(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort the results of a projection, which are grouped by key head, by kind.

    Args:
        mixed_qkvz: for each key head its query, its key, its values and their gates, shape
            ``[tokens, key_heads * (2 * key_size + 2 * group * value_size)]``.
        mixed_ba: for each key head ``b`` and ``a`` of its values, ``[tokens, 2 * heads]``.

    Returns:
        Queries, keys and values, ``[tokens, 2 * key_heads * key_size + heads * value_size]``;
        gates, ``[tokens, heads, value_size]``; ``b`` and ``a``, ``[tokens, heads]``.
    """
    group = num_heads_v // num_heads_qk
    by_head = mixed_qkvz.unflatten(-1, (num_heads_qk, -1))
    sizes = [head_qk, head_qk, group * head_v, group * head_v]
    query, key, value, gate = by_head.split(sizes, -1)
    b, a = mixed_ba.unflatten(-1, (num_heads_qk, 2, group)).unbind(-2)
    qkv = torch.cat([one.flatten(1) for one in (query, key, value)], -1)
    gates = gate.flatten(1).unflatten(-1, (num_heads_v, head_v)).contiguous()
    return qkv, gates, b.flatten(1).contiguous(), a.flatten(1).contiguous()


def l2_norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """``x`` with its last dimension scaled to length 1, in the type of ``x`` or a given type."""
    long = x.float()
    normed = long * (long.square().sum(-1, True) + eps).rsqrt()
    return normed.to(output_dtype or x.dtype)


def clear_states(ssm_states: Tensor, has_initial_state: Tensor) -> None:
    """Set the states of new sequences to zero; shape ``[sequences, ...]``.

    Such states may hold anything. A product with zero is not enough, as zero times NaN is NaN.
    """
    is_new = ~has_initial_state.to(ssm_states.device).bool()
    ssm_states.masked_fill_(is_new.view(-1, *[1] * (ssm_states.dim() - 1)), 0)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule for parts of prompts.

    Args:
        q: shape ``[1, tokens, key_heads, key_size]``, one sequence after the other.
        k: as ``q``.
        v: shape ``[1, tokens, heads, value_size]``.
        g: shape ``[1, tokens, heads]``.
        beta: as ``g``.
        initial_state: shape ``[sequences, heads, key_size, value_size]``.
        cu_seqlens: first token of each sequence, shape ``[sequences + 1]``.

    Returns:
        The output, of the shape and type of ``v``, and the last states, shaped as
        ``initial_state``.
    """
    answers, states = run_sequences(
        (q[0], k[0], v[0], g[0], beta[0]),
        initial_state.transpose(-1, -2),
        cu_seqlens.tolist(),
        scale,
    )
    return answers.unsqueeze(0), states.transpose(-1, -2)


_prefill = kernel(
    "chunk_gated_delta_rule",
    prefill,
    lambda call: [(one.shape, one.dtype) for one in (call.v, call.initial_state)],
)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    prebuilt_meta: Any = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """``prefill`` after an optional norm of queries and keys. ``prebuilt_meta`` is not needed."""
    if initial_state is None or cu_seqlens is None or not output_final_state or head_first:
        raise NotImplementedError("chunk_gated_delta_rule: expected states and starts of sequences")
    if use_qk_l2norm_in_kernel:
        q, k = l2_norm(q), l2_norm(k)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    return _prefill(q, k, v, g, beta, initial_state, cu_seqlens, scale)


def gated_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    z: Tensor | None = None,
    out: Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> tuple[Tensor, None, Tensor]:
    """Root mean square norm multiplied by a gate ``silu(z)``.

    Args:
        x: shape ``[rows, size]``.
        weight: shape ``[size]``.
        z: as ``x``.

    Returns:
        The norm in the type of ``x``; None in the place of a mean; and ``1 / rms`` in float32,
        ``[rows]``.
    """
    given = (bias, out, z is None, norm_before_gate, is_rms_norm)
    if given != (None, None, False, True, True) or group_size not in (None, x.shape[-1]):
        raise NotImplementedError("layer_norm_fwd_npu: anything but the norm of a row, with a gate")
    found, inverse = npu_rms_norm(x.float(), weight, eps)
    return (found * functional.silu(z.float())).to(x.dtype), None, inverse.flatten()


def sigmoid_gated_norm(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
    out: Tensor | None = None,
) -> Tensor:
    """Root mean square norm multiplied by a gate ``sigmoid(g)``.

    Args:
        x: shape ``[..., size]``.
        g: as many elements as ``x``.
        weight: shape ``[size]``.
        out: written, if given. It may be ``x``.
    """
    if (bias, activation, residual, prenorm) != (None, "sigmoid", None, False):
        raise NotImplementedError("rms_norm_gated: anything but a norm with a sigmoid")
    normed, _ = npu_rms_norm(x.float(), weight, eps)
    found = (normed * g.float().sigmoid().view(x.shape)).to(x.dtype)
    return found if out is None else out.copy_(found)


def copy_memory(
    src_ptrs: Tensor,
    dst_ptrs: Tensor,
    sizes: Tensor,
    *,
    BLOCK_SIZE: int = 0,  # noqa: N803
) -> None:
    """Copy within the device. Addresses and sizes are on the device, too.

    Args:
        src_ptrs: addresses, shape ``[copies]``.
        dst_ptrs: as ``src_ptrs``.
        sizes: bytes, as ``src_ptrs``.
        BLOCK_SIZE: the size of the kernel's tiles. A second launch of compiled code has none.
    """
    for source, target, num_bytes in zip(
        src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist(), strict=True
    ):
        ctypes.memmove(target, source, num_bytes)


_FLA = "vllm_ascend.ops.triton.fla"
STAND_INS = {
    (f"{_FLA}.fused_qkvzba_split_reshape", "fused_qkvzba_split_reshape_cat"): split_heads,
    ("vllm.model_executor.layers.fla.ops.l2norm", "l2norm_fwd"): l2_norm,  # 0.23.0
    ("vllm.third_party.flash_linear_attention.ops.l2norm", "l2norm_fwd"): l2_norm,
    ("vllm_ascend.ops.triton.fused_gdn_gating", "fused_gdn_gating_patch"): (
        gated_delta_rule.npu_fused_gdn_gating
    ),
    (f"{_FLA}.utils", "clear_ssm_states"): clear_states,
    (f"{_FLA}.chunk", "chunk_gated_delta_rule"): chunk_gated_delta_rule,
    ("vllm_ascend.ops.triton.layernorm_gated", "layer_norm_fwd_npu"): gated_norm,
    ("vllm_ascend.ops.triton.kda.kda", "rms_norm_gated"): sigmoid_gated_norm,
    ("vllm_ascend.ops.triton.batch_memcpy", "batch_memcpy_kernel"): Launched(
        kernel("batch_memcpy_kernel", copy_memory)
    ),
}

_FLA_NPU = {
    "causal_conv1d_fn": gated_delta_rule.causal_conv1d_fn,
    "causal_conv1d_update": gated_delta_rule.causal_conv1d_update,
    "recurrent_gated_delta_rule": gated_delta_rule.recurrent_gated_delta_rule,
    "chunk_kda_fwd": kimi_delta_attention.chunk_kda_fwd,
    "recurrent_kda": kimi_delta_attention.recurrent_kda,
}
WHOLE_MODULES: dict[str, dict[str, Any]] = {
    "fla_npu": {},
    "fla_npu.ops": {},
    "fla_npu.ops.ascendc": _FLA_NPU,
}
"""A library for devices. Without its kernel for prompts of the gated delta rule, vLLM-Ascend takes
its own kernel."""
