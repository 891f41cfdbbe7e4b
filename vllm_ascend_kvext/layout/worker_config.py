# SPDX-License-Identifier: Apache-2.0
"""What the layout has to know of a worker beside its KV cache config and tensors.

Neither says how many tokens a block id stands for under context parallelism, nor in which order
kernels write the rows of a page. Reads vLLM's and vLLM-Ascend's configuration by its attributes;
imports neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_ascend_kvext.layout.errors import LayoutError


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """A worker whose layout can be built.

    Attributes:
        context_parallel_size: Decode times prefill context parallelism. vLLM then spreads the
            tokens of a block over the ranks, which is not supported: see `require_supported`.
        all_pages_are_nz: Whether MLA kernels tile the pages of all layers (``enable_kv_nz``).
        nz_layers: Layers whose pages kernels tile, if not all (``fa_quant``, C8).
    """

    context_parallel_size: int = 1
    all_pages_are_nz: bool = False
    nz_layers: frozenset[str] = frozenset()

    def has_nz_pages(self, layer_name: str) -> bool:
        """Whether rows of this layer's pages lie in tiles, where the shape does not say."""
        return self.all_pages_are_nz or layer_name in self.nz_layers

    def require_supported(self) -> None:
        """Refuse what would be planned wrong.

        Raises:
            LayoutError: With context parallelism.
        """
        if self.context_parallel_size != 1:
            raise LayoutError(
                "context parallelism: found a size of "
                f"{self.context_parallel_size} (decode_context_parallel_size times "
                "prefill_context_parallel_size), expected 1: vLLM spreads the tokens of a block "
                "over the ranks, which offloading does not support; start without it"
            )


def read_worker_config(vllm_config: Any, kv_caches: Mapping[str, Any]) -> WorkerConfig:
    """What a vLLM config says of a worker.

    Layers under ``fa_quant`` and C8 (8-bit integers) count as tiled on every device and in every
    release, though not all of them tile: their pages are then moved whole, which is right for both.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_caches: By layer name, as registered.
    """
    parallel = vllm_config.parallel_config
    additional: Mapping[str, Any] = getattr(vllm_config, "additional_config", None) or {}
    quantization: Any = getattr(vllm_config, "quant_config", None)
    nz_layers: set[str] = set()
    if getattr(quantization, "enable_fa_quant", False):
        nz_layers.update(filter(quantization.is_fa_quant_layer, kv_caches))
    if getattr(quantization, "enable_c8_quant", False):
        # ``_nz_5d_view`` in ``vllm_ascend/attention/attention_v1.py``.
        nz_layers.update(filter(quantization.is_c8_quant_layer, kv_caches))
    return WorkerConfig(
        context_parallel_size=int(getattr(parallel, "decode_context_parallel_size", 1))
        * int(getattr(parallel, "prefill_context_parallel_size", 1)),
        all_pages_are_nz=bool(additional.get("enable_kv_nz", False)),
        nz_layers=frozenset(nz_layers),
    )
