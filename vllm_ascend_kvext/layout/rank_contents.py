# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""How many different contents the tensor-parallel ranks have for the pages of a layer.

Only what the configuration proves counts: latents, and KV heads that vLLM gives to several ranks.
Everything else counts as different on every rank. The module reads vLLM's configuration by
attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_ascend_kvext.groups.kinds import holds_latents, kind_of, spec_of_layer
from vllm_ascend_kvext.groups.model import GroupKind


def read_rank_contents(vllm_config: Any, kv_cache_config: Any) -> Mapping[str, int]:
    """The number of different contents of each layer, by its name.

    Of fewer KV heads than ranks, each rank has one, and ranks that follow each other have the same
    (``QKVParallelLinear`` in ``vllm/model_executor/layers/linear.py``). A drafter with another
    number of KV heads makes it unknown which layers have how many.
    """
    num_ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    num_heads = _num_kv_heads(vllm_config)
    contents = {}
    for group in kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            spec = spec_of_layer(group.kv_cache_spec, name)
            contents[name] = _num_contents(spec, num_heads, num_ranks)
    return contents


def _num_contents(spec: Any, num_heads: int | None, num_ranks: int) -> int:
    if holds_latents(spec):
        return 1
    has_heads = kind_of(spec) is not GroupKind.STATE and getattr(spec, "num_kv_heads", 0) == 1
    if has_heads and num_heads and num_ranks % num_heads == 0:
        return min(num_heads, num_ranks)
    return num_ranks


def _num_kv_heads(vllm_config: Any) -> int | None:
    """The KV heads of a layer on all ranks together; None if models of the engine differ."""
    models = [vllm_config.model_config]
    drafter = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    if drafter is not None:
        models.append(drafter)
    found = {int(model.get_total_num_kv_heads()) for model in models}
    return found.pop() if len(found) == 1 else None
