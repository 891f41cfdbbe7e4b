# SPDX-License-Identifier: Apache-2.0
"""One text for everything that decides what stored bytes mean; part of the key of stored KV.

Two workers with equal fingerprints can load each other's chunks. What a restart may change without
changing stored bytes is left out: addresses, page strides, the number of pages. Beside the shapes
of tensors it is the page format that decides: pages of equal shape and dtype may hold their bytes
in another order, or in another number format. Reads vLLM's configuration by its attributes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from vllm_ascend_kvext.layout.model import KVLayout, LayoutGroup, StatePolicy
from vllm_ascend_kvext.transfer.schema import HOST_ALIGNMENT_BYTES

FORMAT = 3
"""Raise when chunks are arranged differently: ``rows``, ``row_map``, ``host_arrangement``."""

_CONV_STATE_LAYOUT_VARIABLE = "VLLM_SSM_CONV_STATE_LAYOUT"
_CONV_STATE_LAYOUT_DEFAULT = "SD"
"""``get_conv_state_layout`` in ``vllm/model_executor/layers/mamba/mamba_utils.py``."""


def worker_fingerprint(
    vllm_config: Any,
    layout: KVLayout,
    *,
    layer_names: Collection[str],
    has_nz_pages: bool,
    device_type: str,
    instruction_set: str,
    states: StatePolicy,
    environ: Mapping[str, str],
) -> str:
    """The fingerprint of what one worker stores, as 64 hexadecimal digits.

    ``instruction_set`` is that for which CPU kernels order a page, and empty on devices. The
    variables of ``environ`` are read once vLLM's platform has set its defaults.
    """
    model = vllm_config.model_config
    speculative = getattr(vllm_config, "speculative_config", None)
    parallel = vllm_config.parallel_config
    tensor_parallel_size = int(parallel.tensor_parallel_size)
    # The number format by name: tensors of either fp8 are plain bytes.
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if cache_dtype == "auto":
        cache_dtype = str(model.dtype).removeprefix("torch.")
    # As ``get_current_attn_backends`` of vLLM's connectors; what is not listed there is left out.
    layers = vllm_config.compilation_config.static_forward_context
    return layout_fingerprint(
        layout,
        model={
            "name": str(model.model),
            "revision": _text_or_none(getattr(model, "revision", None)),
            "quantization": _text_or_none(getattr(model, "quantization", None)),
            # Its layers have pages too.
            "draft": _text_or_none(getattr(speculative, "model", None)),
        },
        parallel={
            "tensor_parallel_size": tensor_parallel_size,
            # With one stage the ranks of an engine are those of tensor parallelism. Data parallel
            # engines are equal.
            "tensor_parallel_rank": int(parallel.rank) % tensor_parallel_size,
        },
        page_format={
            "device_type": device_type,
            "attention_backends": sorted(
                {
                    str(layers[name].get_attn_backend().get_name())
                    for name in layer_names
                    if name in layers
                }
            ),
            "instruction_set": instruction_set,
            "cache_dtype": cache_dtype,
            # Which axis of a convolution's state comes first.
            "conv_state_layout": environ.get(_CONV_STATE_LAYOUT_VARIABLE)
            or _CONV_STATE_LAYOUT_DEFAULT,
            "row_order": "NZ" if has_nz_pages else "ND",
        },
        states=states,
    )


def layout_fingerprint(
    layout: KVLayout,
    *,
    model: Mapping[str, Any],
    parallel: Mapping[str, Any],
    page_format: Mapping[str, Any],
    states: StatePolicy = StatePolicy.EXACT,
) -> str:
    """SHA-256 as 64 hexadecimal digits; equal across processes and orders of mappings."""
    description = {
        "format": FORMAT,
        "host_alignment_bytes": HOST_ALIGNMENT_BYTES,
        "groups": [_describe(group) for group in layout.groups],
        "model": model,
        "parallel": parallel,
        "states": states.value,
        "page_format": page_format,
    }
    text = json.dumps(description, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _describe(group: LayoutGroup) -> dict[str, Any]:
    return {
        "scheduler_group": group.kv_cache_group_id,
        "kind": group.kind.value,
        "holds_states": group.holds_states,
        "compress_ratio": group.compress_ratio,
        "tokens_per_page": group.tokens_per_page,
        "tokens_per_row": group.tokens_per_row,
        "window_tokens": group.window_tokens,
        "restart_tokens": group.restart_tokens,
        "planes": [
            [
                plane.layer_name,
                plane.row_bytes,
                plane.dtype,
                plane.is_packed,
                plane.is_replicated,
                plane.axes,
            ]
            for plane in group.planes
        ],
    }


def _text_or_none(value: object) -> str | None:
    return None if value is None else str(value)
