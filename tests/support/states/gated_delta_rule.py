# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The attention of gated delta rule layers (GDN) on a CPU, in float32, with and without drafts.

vLLM's CPU kernels for these layers take bfloat16 only, whose noise hides a wrong state. Release
0.23 refuses drafts as well. Here the layer follows its definition, one token after the other: a
short convolution over the last tokens, and then one matrix per head, which decays, forgets what it
has under a key, and takes a new value.

Where states are, the metadata of vLLM's backend says (``GDNAttentionMetadata``). Without drafts, a
sequence has one slot. With drafts, the state after each token has its own slot, and the sequence
resumes from the slot of the last accepted token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

NULL_SLOT = 0
"""The slot of sequences that only fill up a batch."""


@dataclass(frozen=True)
class Span:
    """Tokens of one sequence, and its states.

    Attributes:
        tokens: The indices of its tokens in the batch.
        conv_slot: The slot of the last tokens before the span.
        conv_offset: Where these tokens begin in the slot. Rejected drafts are behind them.
        from_slot: The slot with the matrices before the span. None if the sequence begins here.
        to_slots: The slot for the matrices after each token, or one slot for the matrices at the
            end.
    """

    tokens: torch.Tensor
    conv_slot: int
    conv_offset: int
    from_slot: int | None
    to_slots: list[int]


def spans(metadata: Any) -> Iterator[Span]:
    """The sequences of a batch."""
    yield from _plain_spans(metadata)
    if metadata.spec_sequence_masks is None:
        return
    bounds = metadata.spec_query_start_loc.tolist()
    slots = metadata.spec_state_indices_tensor.tolist()
    accepted = metadata.num_accepted_tokens.tolist()
    tokens = metadata.spec_token_indx.long()
    for number in range(metadata.num_spec_decodes):
        first, end = bounds[number], bounds[number + 1]
        if end > first:
            before = accepted[number] - 1
            of_sequence = slots[number]
            yield Span(
                tokens[first:end],
                of_sequence[0],
                before,
                of_sequence[before],
                of_sequence[: end - first],
            )


def _plain_spans(metadata: Any) -> Iterator[Span]:
    """The sequences without drafts."""
    if not metadata.num_decodes + metadata.num_prefills:
        return
    bounds = metadata.non_spec_query_start_loc.tolist()
    slots = metadata.non_spec_state_indices_tensor.tolist()
    chosen = None
    if metadata.spec_sequence_masks is not None:
        chosen = metadata.non_spec_token_indx.long()
    resumes = metadata.has_initial_state
    for number, slot in enumerate(slots[: metadata.num_decodes + metadata.num_prefills]):
        first, end = bounds[number], bounds[number + 1]
        if end == first or slot == NULL_SLOT:
            continue
        tokens = torch.arange(first, end) if chosen is None else chosen[first:end]
        begins = number >= metadata.num_decodes and not bool(resumes[number])
        yield Span(tokens, slot, 0, None if begins else slot, [slot])


def convolve(layer: Any, span: Span, inputs: torch.Tensor) -> torch.Tensor:
    """The convolution of a span's inputs. The slot gets the last tokens.

    Shapes: inputs and result ``[tokens, channels]``; a slot ``[tokens, channels]``.
    """
    weight = layer.conv1d.weight.view(inputs.shape[1], 1, -1)
    history_tokens = weight.shape[-1] - 1
    last = layer.kv_cache[0][span.conv_slot]
    history = last[span.conv_offset :][:history_tokens]
    if span.from_slot is None:
        history = torch.zeros_like(history)
    joined = torch.cat([history, inputs])
    # The next span begins behind the token of one of the slots.
    kept = joined[-(history_tokens + len(span.to_slots) - 1) :]
    last[: len(kept)] = kept
    found = functional.conv1d(joined.T[None], weight, layer.conv1d.bias, groups=inputs.shape[1])
    if layer.activation not in ("silu", "swish"):
        raise NotImplementedError(f"expected silu, found {layer.activation}")
    return functional.silu(found[0].T)


def recur(layer: Any, span: Span, qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    """What the tokens of a span read from the matrices. The slots get the matrices.

    Shapes: qkv ``[tokens, channels]``; a and b ``[tokens, heads]``; a matrix ``[heads, values,
    keys]``; the result ``[tokens, heads, values]``.
    """
    queries, keys, values = (each.squeeze(0) for each in layer.rearrange_mixed_qkv(qkv))
    heads_per_key = values.shape[1] // keys.shape[1]
    queries = _unit(queries).repeat_interleave(heads_per_key, 1) * queries.shape[-1] ** -0.5
    keys = _unit(keys).repeat_interleave(heads_per_key, 1)
    decays = (-layer.A_log.exp() * functional.softplus(a + layer.dt_bias)).exp()
    rates = b.sigmoid()
    matrices = layer.kv_cache[1]
    if span.from_slot is None:
        matrix = torch.zeros_like(matrices[0])
    else:
        matrix = matrices[span.from_slot].clone()
    found = torch.empty_like(values)
    for index in range(len(values)):
        key = keys[index, :, :, None]
        matrix *= decays[index, :, None, None]
        change = values[index, :, :, None] - matrix @ key
        matrix += (change * rates[index, :, None, None]) @ key.transpose(1, 2)
        found[index] = (matrix @ queries[index, :, :, None])[..., 0]
        if len(span.to_slots) == len(values):
            matrices[span.to_slots[index]] = matrix
    matrices[span.to_slots[-1]] = matrix
    return found


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)


def attend(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: Any,
) -> None:
    """The operator of vLLM's layer. It has the names of vLLM's parameters."""
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return  # The engine measures its memory.
    for span in spans(context.attn_metadata[layer.prefix]):
        convolved = convolve(layer, span, mixed_qkv[span.tokens])
        core_attn_out[span.tokens] = recur(layer, span, convolved, a[span.tokens], b[span.tokens])


def install() -> None:
    """Let layers that are made from now on attend like this."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.utils.torch_utils import LayerNameType

    attend.__annotations__["layer_name"] = LayerNameType  # torch reads it.
    gdn_attention.cpu_gdn_attention_core = attend
