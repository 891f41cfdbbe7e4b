# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The name under which an engine's objects lie in LMCache: the model, and the layout of its KV.

LMCache 0.5.6 keys an object by the hash of its tokens, the model's name, the rank and a salt
(``ObjectKey`` in ``lmcache/v1/distributed/api.py``). Engines that lay out the same model in
different ways have the same keys, and read each other's objects.

The scheduler's side looks up what the workers have stored. So the layout fingerprint uses only what
both sides know before tensors exist: the config, and the specs of the groups.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from vllm_ascend_kvext.errors import LMCacheError
from vllm_ascend_kvext.groups.specs import scheduler_spec

FORMAT = 1
"""The version of descriptions. Raise it when the same description comes to mean other bytes."""

_MARK = "##kvext-"
"""LMCache marks its own addition to a model's name with ``##``, too."""

_DIGITS = 16
_CONV_STATE_LAYOUT_VARIABLE = "VLLM_SSM_CONV_STATE_LAYOUT"
_STAGES_VARIABLE = "VLLM_PP_LAYER_PARTITION"


def object_name(model_name: str, fingerprint: str) -> str:
    """The model's name with the layout of its KV."""
    return f"{model_name}{_MARK}{fingerprint[:_DIGITS]}"


def config_fingerprint(
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    versions: Mapping[str, str | None],
    instruction_set: str,
    environ: Mapping[str, str],
) -> str:
    """SHA-256 as 64 hexadecimal digits; equal for the scheduler and all workers of an engine.

    Args:
        versions: The versions of packages whose releases may lay out tensors of equal specs in
            different ways.
        instruction_set: The CPU's instruction set, on which kernels base the order of a page; empty
            on devices.

    Raises:
        LMCacheError: If a spec has a value of an unknown type.
    """
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    num_stages = int(parallel.pipeline_parallel_size)
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    skipped_layers = getattr(vllm_config.cache_config, "kv_cache_dtype_skip_layers", None) or ()
    model_facts = {
        "dtype": getattr(model, "dtype", None),
        "revision": getattr(model, "revision", None),
        "quantization": getattr(model, "quantization", None),
        # The layers of a draft model have pages, too.
        "draft": getattr(getattr(vllm_config, "speculative_config", None), "model", None),
    }
    description = {
        "format": FORMAT,
        "versions": dict(versions),
        "device_type": str(vllm_config.device_config.device_type),
        "instruction_set": instruction_set,
        "conv_state_layout": environ.get(_CONV_STATE_LAYOUT_VARIABLE, ""),
        # Specs say how wide a number is. A worker's cache_dtype may name the format more precisely
        # than the scheduler's. So the description has only what the user has chosen and what specs
        # do not say.
        "is_e5m2": "e5m2" in cache_dtype,
        # With several stages, specs are left out below, and with them the width of numbers.
        "is_8_bit": num_stages > 1 and "8" in cache_dtype,
        "unquantised_layers": sorted(map(str, skipped_layers)),
        "model": {
            name: None if value is None else str(value) for name, value in model_facts.items()
        },
        "parallel": {
            "tensor": int(parallel.tensor_parallel_size),
            "pipeline": num_stages,
            "stages": environ.get(_STAGES_VARIABLE, ""),
            "decode_context": int(getattr(parallel, "decode_context_parallel_size", 1)),
            "prefill_context": int(getattr(parallel, "prefill_context_parallel_size", 1)),
        },
        "groups": [_describe_group(group, num_stages) for group in kv_cache_config.kv_cache_groups],
    }
    text = json.dumps(description, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _describe_group(group: Any, num_stages: int) -> dict[str, Any]:
    """The facts of a group that are the same in all stages.

    The scheduler has the layers of the first stage. If specs of a group differ, each stage has
    another first layer, and so another spec.
    """
    if num_stages > 1:
        return {"block_size": int(group.kv_cache_spec.block_size)}
    spec = scheduler_spec(group.kv_cache_spec)
    fields = {field.name: _plain(getattr(spec, field.name)) for field in dataclasses.fields(spec)}
    return {"spec": {"type": type(spec).__name__} | fields, "layers": list(group.layer_names)}


def _plain(value: Any) -> Any:
    """A value in a form for JSON that is the same in every process."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if str(value).startswith("torch."):  # a dtype
        return str(value)
    raise LMCacheError(
        "KV cache specs of numbers, texts, dtypes and sequences of them, which tell layouts apart",
        f"a {type(value).__name__} ({value!r})",
        "Report the model and the vLLM version",
    )
