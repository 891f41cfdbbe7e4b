# SPDX-License-Identifier: Apache-2.0
"""Blocks counted in tokens, as LMCache takes ``block_size`` of every spec.

vLLM-Ascend's compressed groups count rows: a block of theirs stands for ``block_size *
compress_ratio`` tokens (see `vllm_ascend_kvext.groups.tokens_per_page`). LMCache 0.5.6 reads
``block_size`` (``get_tokens_per_block`` in ``lmcache/integration/vllm/kv_cache_groups.py``), and
would pair a stretch of tokens with the wrong pages, or find too few of them to store anything.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from vllm_ascend_kvext.groups.spec_attributes import tokens_per_page_of
from vllm_ascend_kvext.groups.specs import scheduler_spec
from vllm_ascend_kvext.lmcache.errors import LMCacheError

_OF_A_PAGE = ("page_size_bytes", "real_page_size_bytes", "storage_block_size")
"""What a spec derives from ``block_size``; LMCache compares it with the tensors."""


def counted_in_tokens(kv_cache_config: Any) -> Any:
    """A config whose specs have tokens per block in ``block_size``; itself where all do.

    Everything else is as it was: the config, groups and specs that are handed in stay untouched.

    Raises:
        GroupError: If ``block_size`` contradicts the size of a page.
    """
    groups = [_group_in_tokens(group) for group in kv_cache_config.kv_cache_groups]
    if all(new is old for new, old in zip(groups, kv_cache_config.kv_cache_groups, strict=True)):
        return kv_cache_config
    return dataclasses.replace(kv_cache_config, kv_cache_groups=groups)


def tokens_per_block(kv_cache_config: Any, context_parallel_size: int) -> tuple[int, ...]:
    """Tokens that one block id of each group stands for; 0 for scratch groups, which LMCache skips.

    Args:
        kv_cache_config: Of either side, as vLLM or `counted_in_tokens` has it.
        context_parallel_size: Decode context parallelism: blocks of attention are split over so
            many workers, states are not.
    """
    found = []
    for group in counted_in_tokens(kv_cache_config).kv_cache_groups:
        spec = scheduler_spec(group.kv_cache_spec)
        bases = {base.__name__ for base in type(spec).__mro__}
        factor = context_parallel_size if "AttentionSpec" in bases else 1
        is_scratch = not getattr(spec, "prefix_cacheable", True)
        found.append(0 if is_scratch else int(spec.block_size) * factor)
    return tuple(found)


def has_states(kv_cache_config: Any) -> bool:
    """Whether a group has recurrent states, of which LMCache stores some and not others."""
    return any(
        base.__name__ == "MambaSpec"
        for group in kv_cache_config.kv_cache_groups
        for base in type(scheduler_spec(group.kv_cache_spec)).__mro__
    )


def require_chunks_of_whole_blocks(
    server_chunk_tokens: int, group_tokens: Sequence[int], server: str
) -> None:
    """Refuse a chunk size of the server that cuts blocks.

    Args:
        server_chunk_tokens: As the server has it.
        group_tokens: Per group, see `tokens_per_block`.
        server: Its address, for the message.

    Raises:
        LMCacheError: If the chunk is not a multiple of every group's tokens per block.
    """
    spans = [tokens for tokens in group_tokens if tokens]
    unit_tokens = math.lcm(*spans)
    if server_chunk_tokens % unit_tokens == 0:
        return
    possible_tokens = -(-server_chunk_tokens // unit_tokens) * unit_tokens
    raise LMCacheError(
        f"LMCache's server at {server} has chunks of {server_chunk_tokens} tokens. The blocks of "
        f"this engine's KV cache groups stand for {_texts(group_tokens)} tokens, and a chunk has "
        f"to be a multiple of all of them, so of {unit_tokens}. Start the server with --chunk-size "
        f"{possible_tokens}, or the engine with a smaller --block-size"
    )


def _texts(group_tokens: Sequence[int]) -> str:
    return ", ".join(map(str, group_tokens))


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
    if isinstance(spec, _InTokens):
        return spec
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


class _InTokens:
    """Marks a spec whose ``block_size`` has been turned into tokens."""


@functools.cache
def _in_tokens(spec_type: Any, of_a_page: tuple[tuple[str, Any], ...]) -> type:
    """A spec's class with the sizes of a page as they were; LMCache tells specs by class names."""
    return type(spec_type.__name__, (spec_type, _InTokens), dict(of_a_page))
