# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Says which tokens the layers of a KV cache spec read, by the spec's attributes and class names.

The scheduler side has one spec per group, and mostly needs nothing else.
"""

from __future__ import annotations

from typing import Any

from vllm_ascend_kvext.groups.model import GroupKind

_KINDS = {
    "MambaSpec": GroupKind.STATE,
    "SlidingWindowSpec": GroupKind.WINDOW,
    "ChunkedLocalAttentionSpec": GroupKind.CHUNKED,
    "FullAttentionSpec": GroupKind.FULL,
}
"""The kind of a spec, by the name of one of its base classes. The first match counts."""

_LATENTS = {"MLAAttentionSpec", "SlidingWindowMLASpec"}
"""Base classes whose layers keep latents: no head has a part of its own."""

_OWN_RULES = {"RSWASpec"}
"""Base classes whose layers read other tokens than their parent class says: all tokens of a prompt,
and the last tokens of an output."""


def kind_of(spec: Any) -> GroupKind:
    """Which tokens a layer of this spec reads.

    A spec whose pages are scratch memory of one request (``prefix_cacheable`` is False) is
    ``OTHER``, whatever its class is, because such a page does not stand for tokens.
    """
    bases = _bases(spec)
    if not stands_for_tokens(spec) or not _OWN_RULES.isdisjoint(bases):
        return GroupKind.OTHER
    return next((kind for name, kind in _KINDS.items() if name in bases), GroupKind.OTHER)


def window_tokens_of(spec: Any) -> int:
    """The sliding window or attention chunk in tokens; 0 for specs that have neither.

    ``FullAttentionSpec`` has a ``sliding_window``, too. There, the window only says that the hybrid
    manager is off, and all blocks of the group are kept. Blocks that drafts keep in addition
    (``extra_retained_tokens``) do not count, because a request that resumes at a boundary does not
    read them.
    """
    match kind_of(spec):
        case GroupKind.WINDOW:
            return int(spec.sliding_window)
        case GroupKind.CHUNKED:
            return int(spec.attention_chunk_size)
        case _:
            return 0


def is_all_full_attention(kv_cache_config: Any) -> bool:
    """Whether all layers are full attention in one group. A request can resume anywhere then."""
    groups = kv_cache_config.kv_cache_groups
    specs = [
        spec_of_layer(group.kv_cache_spec, name) for group in groups for name in group.layer_names
    ]
    return len(groups) <= 1 and all(kind_of(spec) is GroupKind.FULL for spec in specs)


def spec_of_layer(spec: Any, layer_name: str) -> Any:
    """The spec of one layer of a group; in a bundle, each layer has its own spec."""
    bundle = getattr(spec, "kv_cache_specs", None)
    return spec if bundle is None else bundle[layer_name]


def holds_latents(spec: Any) -> bool:
    """Whether the rows of a layer are latents, or what is computed from latents.

    Each tensor-parallel rank computes them from all hidden states with all weights.
    """
    return not _LATENTS.isdisjoint(_bases(spec))


def stands_for_tokens(spec: Any) -> bool:
    """Whether a page holds what was computed for its tokens, and is not scratch memory."""
    return bool(getattr(spec, "prefix_cacheable", True))


def _bases(spec: Any) -> set[str]:
    return {base.__name__ for base in type(spec).__mro__}
