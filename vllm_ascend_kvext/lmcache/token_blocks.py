# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Counts the ``block_size`` of every spec in tokens, as LMCache reads it.

Compressed groups of vLLM-Ascend 0.23 count rows. One block of such a group stands for ``block_size
* compress_ratio`` tokens (see `vllm_ascend_kvext.groups.spec_attributes`). LMCache 0.5.6 takes
``block_size`` for tokens (``get_tokens_per_block`` in
``lmcache/integration/vllm/kv_cache_groups.py``). LMCache would pair tokens with the wrong pages, or
find too few tokens to store anything.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

from vllm_ascend_kvext.groups.spec_attributes import tokens_per_page_of
from vllm_ascend_kvext.groups.specs import scheduler_spec

_OF_A_PAGE = ("page_size_bytes", "real_page_size_bytes", "storage_block_size")
"""The attributes that a spec derives from ``block_size``. LMCache compares them with tensors."""


def counted_in_tokens(kv_cache_config: Any) -> Any:
    """A config whose ``block_size`` counts tokens in every spec. It may be the given config.

    The config, groups and specs that are handed in stay untouched.

    Raises:
        GroupError: If ``block_size`` contradicts the size of a page.
    """
    groups = [_group_in_tokens(group) for group in kv_cache_config.kv_cache_groups]
    if all(new is old for new, old in zip(groups, kv_cache_config.kv_cache_groups, strict=True)):
        return kv_cache_config
    return dataclasses.replace(kv_cache_config, kv_cache_groups=groups)


def _group_in_tokens(group: Any) -> Any:
    bundle = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if bundle:
        specs = {name: _spec_in_tokens(spec) for name, spec in bundle.items()}
        if all(specs[name] is spec for name, spec in bundle.items()):
            return group
        spec = copy.copy(group.kv_cache_spec)
        object.__setattr__(spec, "kv_cache_specs", specs)
        object.__setattr__(spec, "block_size", scheduler_spec(spec).block_size)
    else:
        spec = _spec_in_tokens(group.kv_cache_spec)
        if spec is group.kv_cache_spec:
            return group
    return dataclasses.replace(group, kv_cache_spec=spec)


def _spec_in_tokens(spec: Any) -> Any:
    tokens = tokens_per_page_of(spec)
    if tokens == spec.block_size:
        return spec
    spec_type: Any = type(spec)
    of_a_page = tuple((name, getattr(spec, name)) for name in _OF_A_PAGE if hasattr(spec, name))
    new_spec = copy.copy(spec)
    # Specs are frozen, and what they derive from block_size must not change with it.
    object.__setattr__(new_spec, "block_size", tokens)
    object.__setattr__(new_spec, "__class__", _in_tokens(spec_type, of_a_page))
    return new_spec


@functools.cache
def _in_tokens(spec_type: Any, of_a_page: tuple[tuple[str, Any], ...]) -> type:
    """A subclass with the former sizes of a page. It keeps the class name, which LMCache reads."""
    return type(spec_type.__name__, (spec_type,), dict(of_a_page))
