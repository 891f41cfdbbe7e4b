# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Splits a registered tensor as vLLM's CPU attention does, and calls its op that writes rows.

No other module knows this split or this op. The functions import vLLM when they are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.errors import BlendingError

if TYPE_CHECKING:
    import torch

BACKEND = "CPU_ATTN"
"""The name of the CPU attention backend in vLLM."""


class CpuBackend:
    """vLLM's CPU attention in one worker, which has this ``VllmConfig``."""

    def __init__(self, vllm_config: Any) -> None:
        self._vllm_config = vllm_config

    def caches_of(self, layer_name: str, registered: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The pages of keys and the pages of values of one layer, in the form of `write_rows`.

        Raises:
            BlendingError: The tensor does not belong to this backend.
        """
        import torch

        layers = self._vllm_config.compilation_config.static_forward_context
        name = layers[layer_name].get_attn_backend().get_name()
        shape = list(registered.shape) if isinstance(registered, torch.Tensor) else []
        if name == BACKEND and len(shape) == 4:
            num_pages, num_heads, num_tokens, _ = shape
            joined = registered.view(num_pages, num_heads, 2 * num_tokens, -1)
            key_cache, value_cache = joined.chunk(2, dim=2)
            return key_cache, value_cache
        raise BlendingError(
            f"layer {layer_name}: expected pages of {BACKEND} in one tensor of four axes, "
            f"found {name} with shape {shape or type(registered).__qualname__}. Serve this model "
            "without segments."
        )

    def write_rows(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Write the rows of tokens into pages; see `cpu_token_pages.WriteRows`."""
        from vllm import _custom_ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        # ``CPUAttentionMetadataBuilder`` also asks with the configured block size, and not with the
        # block size of a group.
        instruction_set = _get_attn_isa(
            self._vllm_config.model_config.dtype,
            self._vllm_config.cache_config.block_size,
            keys.shape[2],
        )
        _custom_ops.cpu_attn_reshape_and_cache(
            keys, values, key_cache, value_cache, slots, instruction_set
        )
