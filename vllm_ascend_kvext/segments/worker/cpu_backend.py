# SPDX-License-Identifier: Apache-2.0
"""How vLLM's CPU attention takes a registered tensor apart, and its op that writes keys and values.

The one place that knows both; what is imported of vLLM is imported when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.errors import BlendingError

if TYPE_CHECKING:
    import torch

BACKEND = "CPU_ATTN"
"""What vLLM calls it."""


class CpuBackend:
    """vLLM's CPU attention, as one worker is configured by its ``VllmConfig``."""

    def __init__(self, vllm_config: Any) -> None:
        self._vllm_config = vllm_config

    def caches_of(self, layer_name: str, registered: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The pages of keys and those of values of one layer, as `write_rows` takes them.

        Raises:
            BlendingError: The tensor is not one of this backend.
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
            "without blending."
        )

    def write_rows(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Write rows of tokens; see `cpu_token_pages.WriteRows`."""
        from vllm import _custom_ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        # As ``CPUAttentionMetadataBuilder`` asks: for the configured block size, whatever a group's
        # own is.
        instruction_set = _get_attn_isa(
            self._vllm_config.model_config.dtype,
            self._vllm_config.cache_config.block_size,
            keys.shape[2],
        )
        _custom_ops.cpu_attn_reshape_and_cache(
            keys, values, key_cache, value_cache, slots, instruction_set
        )
