# SPDX-License-Identifier: Apache-2.0
"""What decides the meaning of an engine's KV bytes: the identity behind its name space.

What is left out may differ between engines that share KV: places, sizes of pools, batches. Reads
vLLM's configuration by its attributes; only `hash_canary` imports vLLM.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from importlib import metadata
from typing import Any

from vllm_ascend_kvext.connector.common.host_layout import HostLayout
from vllm_ascend_kvext.connector.common.messages import WorkerLayout
from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.layout.model import LayoutGroup
from vllm_ascend_kvext.shared_tier.names import Identity, weights_identity

_ARRANGEMENT = 1
"""Of rows in an entry: ``layout.host_arrangement``. Another number for another order of bytes."""

_CANARY_TOKENS = tuple(range(16))


def hash_canary(vllm_config: Any) -> str:
    """The hash of a fixed block: engines with other hash functions or seeds have another.

    Raises:
        SettingsError: If hashes are other ones in every process.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    name = vllm_config.cache_config.prefix_caching_hash_algo
    hash_function = get_hash_fn_by_name(name)
    canaries = set()
    for _ in range(2):  # The engine does the same once more, after its scheduler is made.
        kv_cache_utils.init_none_hash(hash_function)
        canaries.add(kv_cache_utils.hash_block_tokens(hash_function, None, _CANARY_TOKENS))
    if len(canaries) > 1:
        raise SettingsError(
            "shared_tier: expected block hashes that are the same in every process, found some "
            f"({name}) with a random seed: nothing could be found again. Set PYTHONHASHSEED to 0 "
            "for all engines that share, or leave shared_tier out."
        )
    return canaries.pop().hex()


def engine_identity(
    vllm_config: Any, layout: HostLayout, workers: list[WorkerLayout], canary: str
) -> Identity:
    """Of one engine, whose workers have registered their pages; plain data.

    Raises:
        SettingsError: If its weights cannot be told from others.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    geometry = layout.geometry
    return {
        "versions": {name: _version(name) for name in ("vllm", "vllm-ascend")},
        "arrangement": _ARRANGEMENT,
        "groups": [_group(group) for group in layout.all_groups],
        "chunk tokens": geometry.chunk_tokens,
        "unit tokens": geometry.unit_tokens,
        "device": [platform.machine(), *sorted({worker.device for worker in workers})],
        "dtype": str(model.dtype),
        "cache dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "attention backend": str(
            getattr(getattr(vllm_config, "attention_config", None), "backend", None)
        ),
        "weights": [_weights(each) for each in _models(vllm_config)],
        "model configuration": [_configuration(each) for each in _models(vllm_config)],
        "tensor parallel size": parallel.tensor_parallel_size,
        "workers": len(workers),
        "block hashes": [cache.prefix_caching_hash_algo, canary],
    }


def _version(distribution: str) -> str:
    names = [distribution, f"{distribution}-cpu"] if distribution == "vllm" else [distribution]
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _group(group: LayoutGroup) -> list[Any]:
    planes = [
        [plane.layer_name, plane.row_bytes, plane.dtype, plane.is_packed, plane.axes]
        for plane in group.planes
    ]
    facts = [
        group.kv_cache_group_id,
        group.kind.value,
        group.tokens_per_row,
        group.window_tokens,
        group.restart_tokens,
        group.compress_ratio,
        group.holds_states,
    ]
    return json.loads(json.dumps([*facts, planes]))  # type: ignore[no-any-return]


def _models(vllm_config: Any) -> list[Any]:
    """The model, and one that drafts for it: its layers have KV, too."""
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    return [vllm_config.model_config, *([draft] if draft is not None else [])]


def _weights(model: Any) -> str:
    folder = str(model.model)
    if not os.path.isdir(folder):
        try:
            from huggingface_hub import snapshot_download

            folder = snapshot_download(folder, revision=model.revision, local_files_only=True)
        except Exception as error:
            raise SettingsError(
                f"shared_tier: expected a folder with the weights of {model.model}, by whose "
                f"content its KV is known, found none ({error}). Serve the model from a folder, "
                "or leave shared_tier out."
            ) from error
    return weights_identity(folder)


def _configuration(model: Any) -> str:
    """Of what is computed with the weights: positions, norms, overrides."""
    values = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        values.pop(name, None)
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
