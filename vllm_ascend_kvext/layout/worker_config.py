# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Reads what the layout needs from a worker's configuration.

The KV cache config and the tensors do not say whether other workers have other layers or tokens.
They also do not say in which order kernels write the rows of a page. The module reads the
configuration of vLLM and vLLM-Ascend by its attributes, and imports neither of them.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from vllm_ascend_kvext.errors import LayoutError


def read_nz_layers(vllm_config: Any, kv_caches: Mapping[str, Any]) -> frozenset[str]:
    """The layers whose kernels tile pages, so that rows do not lie as the shape says.

    With ``enable_kv_nz`` all layers are tiled. Layers with ``fa_quant`` or C8 (8-bit integers)
    count as tiled on every device and in every release, although not all of them are. Their pages
    are moved as a whole, which is also correct for a layer that is not tiled.

    Raises:
        LayoutError: See `require_supported`.
    """
    require_supported(vllm_config)
    if _additional(vllm_config).get("enable_kv_nz", False):
        return frozenset(kv_caches)
    quantization: Any = getattr(vllm_config, "quant_config", None)
    layers: set[str] = set()
    if getattr(quantization, "enable_fa_quant", False):
        layers.update(filter(quantization.is_fa_quant_layer, kv_caches))
    if getattr(quantization, "enable_c8_quant", False):
        # ``_nz_5d_view`` in ``vllm_ascend/attention/attention_v1.py``.
        layers.update(filter(quantization.is_c8_quant_layer, kv_caches))
    return frozenset(layers)


def require_supported(vllm_config: Any) -> None:
    """Refuse a configuration whose pages cannot be laid out.

    Raises:
        LayoutError: If the engine uses pipeline or context parallelism, if pages have an unknown
            format or lie elsewhere, if states are kept for all blocks of running requests, or if
            the attention does not read what was loaded.
    """
    require_one_layout(vllm_config.parallel_config)
    cache_config = getattr(vllm_config, "cache_config", None)
    if getattr(cache_config, "mamba_cache_mode", None) == "all":
        raise LayoutError(
            "mamba_cache_mode: found all, expected align: states that are kept for all blocks have "
            "never been stored or loaded in a test, and on a CPU vLLM itself ends in this mode; "
            "leave --mamba-cache-mode out, or start without offloading"
        )
    cache_dtype = getattr(cache_config, "cache_dtype", None)
    if str(cache_dtype).startswith(("mxfp8", "turboquant")):
        raise LayoutError(
            f"cache dtype: found {cache_dtype}, whose pages have rows packed with their scales, a "
            "form that this package does not know; use another --kv-cache-dtype, or leave "
            "KvextConnector out of --kv-transfer-config"
        )
    sparse = _additional(vllm_config).get("sparse_kv_offload_config")
    if isinstance(sparse, Mapping) and sparse.get("enabled") is True:
        raise LayoutError(
            "additional_config: found sparse_kv_offload_config, by which vLLM-Ascend keeps latents "
            "in host memory of its own (``vllm_ascend/attention/sfa_kv_offload.py``); leave it "
            "out, or leave KvextConnector out of --kv-transfer-config"
        )
    if str(cache_dtype).endswith("per_token_head"):
        raise LayoutError(
            f"cache dtype: found {cache_dtype}: the first forward of each layer sets the scales in "
            "all pages (``vllm/v1/attention/backends/triton_attn.py``), also in pages that were "
            "loaded before it; use another --kv-cache-dtype, or leave KvextConnector out of "
            "--kv-transfer-config"
        )
    if _computes_only_whole_prompts(vllm_config):
        _require_prefill_with_context(vllm_config)


def _additional(vllm_config: Any) -> Mapping[str, Any]:
    """The options of vLLM-Ascend. Other platforms may have an object of another kind there."""
    given = getattr(vllm_config, "additional_config", None)
    return given if isinstance(given, Mapping) else {}


def _computes_only_whole_prompts(vllm_config: Any) -> bool:
    """Whether latent attention on a CPU never computes a part of a prompt by itself.

    vLLM 0.30 sees to it where the prefill reads no other part (``vllm/platforms/cpu.py``). Users
    may also have asked for it.
    """
    device = getattr(getattr(vllm_config, "device_config", None), "device_type", None)
    scheduler = getattr(vllm_config, "scheduler_config", None)
    return (
        device == "cpu"
        and bool(getattr(getattr(vllm_config, "model_config", None), "use_mla", False))
        and not getattr(scheduler, "enable_chunked_prefill", True)
        and not getattr(vllm_config.cache_config, "enable_prefix_caching", True)
    )


def _require_prefill_with_context(vllm_config: Any) -> None:
    """Refuse latent attention on a CPU unless its prefill reads what is cached before it.

    The conditions are those of ``CpuPlatform`` in ``vllm/platforms/cpu.py``.

    Raises:
        LayoutError: If it does not.
    """
    leave_out = "or leave KvextConnector out of --kv-transfer-config"
    expected = (
        "attention: expected a prefill that reads the tokens that are cached before it, found"
    )
    if not _has_amx():
        raise LayoutError(
            f"{expected} latent attention (MLA) on a CPU without AMX, for which vLLM has none "
            "(``vllm/v1/attention/backends/mla/cpu_mla.py``), so that it turns chunked prefill and "
            f"prefix caching off; serve the model on a CPU with AMX, {leave_out}"
        )
    hf_config = getattr(vllm_config.model_config, "hf_config", None)
    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    is_chosen = getattr(backend, "name", None) == "CPU_MLA"
    if is_chosen and getattr(hf_config, "model_type", None) != "deepseek_v4":
        raise LayoutError(
            f"{expected} that of the attention backend CPU_MLA, which reads none of them "
            "(``vllm/v1/attention/backends/mla/cpu_mla.py``); leave --attention-backend out, so "
            f"that vLLM takes AMX_MLA, {leave_out}"
        )


def _has_amx() -> bool:
    """Whether vLLM takes this CPU for one with AMX."""
    try:
        import torch
    except ImportError:
        return False
    is_x86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
    return is_x86 and bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


def require_one_layout(parallel: Any) -> None:
    """Refuse sizes of parallelism with which the workers' pages have different layouts.

    Args:
        parallel: vLLM's ``ParallelConfig``, or its ``EngineArgs``, which has the same attributes.

    Raises:
        LayoutError: If the engine uses pipeline or context parallelism.
    """
    num_stages = int(getattr(parallel, "pipeline_parallel_size", 1))
    if num_stages != 1:
        raise LayoutError(
            f"pipeline parallelism: found pipeline_parallel_size {num_stages}, expected 1: the "
            "workers of different stages hold different layers, and one layout is planned for all "
            "of them; use tensor parallelism instead, or leave KvextConnector out of "
            "--kv-transfer-config"
        )
    size = int(getattr(parallel, "decode_context_parallel_size", 1))
    size *= int(getattr(parallel, "prefill_context_parallel_size", 1))
    if size != 1:
        raise LayoutError(
            f"context parallelism: found a size of {size} (decode_context_parallel_size times "
            "prefill_context_parallel_size), expected 1: vLLM spreads the tokens of a block over "
            "the ranks, which offloading does not support; set both sizes to 1, or leave "
            "KvextConnector out of --kv-transfer-config"
        )
