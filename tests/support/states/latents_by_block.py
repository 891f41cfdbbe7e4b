# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Latents beside states, in vLLM-Ascend 0.30.0rc2: the parts of a block lie in its page.

Latent attention and states of a Kimi-K3 share memory. vLLM-Ascend gives a state the page of its
block. But the two parts of latents (without and with positions) become two planes of all blocks, so
a state overwrites latents of other blocks, and is overwritten by them. This package does not change
that: only a device can tell whether its operators take latents whose blocks do not follow each
other without a gap. Tests of this package move the latents, so that what they find is its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def install() -> None:
    """Let both parts of a block of latents lie in the page of the block."""
    import torch
    from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    reshape = NPUModelRunner._reshape_kv_cache_tensors

    def by_block(
        runner: Any, config: Any, raw: Mapping[str, torch.Tensor], *args: Any
    ) -> dict[str, Any]:
        caches: dict[str, Any] = reshape(runner, config, raw, *args)
        for group in config.kv_cache_groups:
            if isinstance(group.kv_cache_spec, AscendMLAAttentionSpec):
                for name in group.layer_names:
                    caches[name] = _in_pages(caches[name], raw[name], group.kv_cache_spec)
        return caches

    NPUModelRunner._reshape_kv_cache_tensors = by_block


def _in_pages(planes: Any, raw: Any, spec: Any) -> tuple[Any, ...]:
    import torch

    typed = raw.view(spec.dtype)
    page_elements = spec.page_size_bytes // typed.element_size()
    start = typed.storage_offset()
    moved = []
    for plane in planes:
        strides = (page_elements, *plane.stride()[1:])
        moved.append(torch.as_strided(typed, plane.shape, strides, start))
        start += plane[0].numel()
    return tuple(moved)
