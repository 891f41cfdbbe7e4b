# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The groups of a model from a file that a user writes, where vLLM cannot make the model.

    {"groups": [
      {"kind": "full", "tokens_per_block": 16, "layers": 10, "bytes_per_token": 8192},
      {"kind": "window", "tokens_per_block": 16, "window_tokens": 1024, "layers": 10,
       "bytes_per_token": 8192, "number": 5},
      {"kind": "state", "tokens_per_block": 512, "layers": 12, "bytes_per_state": 1073152}]}

``bytes_per_token`` and ``bytes_per_state`` are those of one layer on one worker. ``number`` is how
many such groups there are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.errors import DOCS_URL, ReplayError
from vllm_ascend_kvext.replay.geometry.model_config import PlannedModel, vllm_config_of
from vllm_ascend_kvext.replay.geometry.pages import pages_of

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec

_KINDS = {
    "full": ("bytes_per_token",),
    "window": ("bytes_per_token", "window_tokens"),
    "state": ("bytes_per_state",),
}
"""By kind: the fields that a group has besides those of every kind."""

_EVERY_KIND = ("tokens_per_block", "layers")

_ANY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}
"""The config of a model that stands in for the one that is described. A scheduler reads nothing of
it but the number of tokens."""


def describe_model(
    path: Path, serve_arguments: list[str], num_blocks: int, max_model_tokens: int
) -> PlannedModel:
    """Make a model of the groups in a file.

    Args:
        path: The file.
        serve_arguments: Further arguments of ``vllm serve``.
        num_blocks: The size of the pool.
        max_model_tokens: The length of the longest request.

    Raises:
        ReplayError: The file or the arguments are wrong.
    """
    described = _read(path)
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    groups: list[KVCacheGroupSpec] = []
    for fields in described:
        spec = _spec_of(fields)
        for _ in range(fields.get("number", 1)):
            names = [f"group {len(groups)} layer {layer}" for layer in range(fields["layers"])]
            groups.append(KVCacheGroupSpec(names, spec))
    config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    vllm_config, num_workers = vllm_config_of(_ANY_MODEL, serve_arguments, max_model_tokens)
    sizes = [group.kv_cache_spec.block_size for group in groups]
    cache = vllm_config.cache_config
    cache.block_size = min(sizes)
    if any(fields["kind"] == "state" for fields in described):
        cache.mamba_cache_mode = "align"
        cache.block_size = cache.mamba_block_size = max(sizes)
    cache.num_gpu_blocks = num_blocks
    pages = pages_of(config)
    return PlannedModel(vllm_config, config, pages, num_workers, math.lcm(*sizes), math.gcd(*sizes))


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReplayError(
            f"--groups: expected a JSON file, found: {error}. See {DOCS_URL}replay.md."
        ) from error
    groups = content.get("groups") if isinstance(content, dict) else None
    if not isinstance(groups, list) or not groups:
        raise ReplayError(
            f"{path}: expected an object with a list of groups, found none. See "
            f"{DOCS_URL}replay.md."
        )
    for number, fields in enumerate(groups):
        _check(fields, f"{path}, group {number}")
    return groups


def _check(fields: Any, where: str) -> None:
    kind = fields.get("kind") if isinstance(fields, dict) else None
    if kind not in _KINDS:
        raise ReplayError(
            f"{where}: expected a kind of {', '.join(_KINDS)}, found {kind!r}. Compressed layers "
            f"count as full; see {DOCS_URL}replay.md."
        )
    needed = (*_EVERY_KIND, *_KINDS[kind])
    for name in needed:
        _check_number(fields, name, where)
    if fields.get("bytes_per_token", 2) % 2:
        raise ReplayError(
            f"{where}: bytes_per_token: expected an even number, for a key and a value, found "
            f"{fields['bytes_per_token']}. Add one."
        )
    if "number" in fields:
        _check_number(fields, "number", where)
    if unknown := sorted(set(fields) - {"kind", "number", *needed}):
        raise ReplayError(
            f"{where}: expected {', '.join(needed)} for the kind {kind}, found {unknown[0]} "
            "besides. Correct its name, or leave it out."
        )


def _check_number(fields: Mapping[str, Any], name: str, where: str) -> None:
    value = fields.get(name)
    if type(value) is not int or value < 1:
        raise ReplayError(
            f"{where}: {name}: expected a whole number of 1 or more, found {value!r}. See "
            f"{DOCS_URL}replay.md."
        )


def _spec_of(fields: Mapping[str, Any]) -> KVCacheSpec:
    """A spec of bytes. One token of an attention layer has a key and a value of equal sizes."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    block_tokens = fields["tokens_per_block"]
    if fields["kind"] == "state":
        return MambaSpec(
            block_size=block_tokens,
            shapes=((fields["bytes_per_state"],),),
            dtypes=(torch.uint8,),
            mamba_cache_mode="align",
        )
    token_bytes = fields["bytes_per_token"]
    sizes = {"block_size": block_tokens, "num_kv_heads": 1, "dtype": torch.uint8}
    sizes |= {"head_size": token_bytes // 2}
    if fields["kind"] == "window":
        return SlidingWindowSpec(sliding_window=fields["window_tokens"], **sizes)
    return FullAttentionSpec(**sizes)
