# SPDX-License-Identifier: Apache-2.0
"""Which tokens the layers of a KV cache spec read, by its attributes and class names.

For the scheduler's side, whose groups have one spec each, this is mostly all that is needed.
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
"""By the name of a base class."""

_OWN_RULES = {"RSWASpec"}
"""Base classes whose layers read other tokens than the class they derive from says: of a prompt all
tokens, of an output the last."""


def kind_of(spec: Any) -> GroupKind:
    """Which tokens a layer of this spec reads.

    ``OTHER`` as well where pages are scratch memory of one request (``prefix_cacheable`` is False),
    whatever class the spec derives from: a page does not stand for its tokens there.
    """
    bases = _bases(spec)
    if not stands_for_tokens(spec) or not _OWN_RULES.isdisjoint(bases):
        return GroupKind.OTHER
    return next((kind for name, kind in _KINDS.items() if name in bases), GroupKind.OTHER)


def window_tokens_of(spec: Any) -> int:
    """Sliding window or attention chunk; 0 where there is none.

    ``FullAttentionSpec`` has a ``sliding_window`` too, which only says that the hybrid manager is
    off: all its blocks are kept. What drafts keep besides (``extra_retained_tokens``) is not read
    from a boundary on.
    """
    match kind_of(spec):
        case GroupKind.WINDOW:
            return int(spec.sliding_window)
        case GroupKind.CHUNKED:
            return int(spec.attention_chunk_size)
        case _:
            return 0


def is_all_full_attention(kv_cache_config: Any) -> bool:
    """Whether all layers are full attention in one group, so that any prefix can be resumed."""
    groups = kv_cache_config.kv_cache_groups
    specs = [
        spec_of_layer(group.kv_cache_spec, name) for group in groups for name in group.layer_names
    ]
    return len(groups) <= 1 and all(kind_of(spec) is GroupKind.FULL for spec in specs)


def spec_of_layer(spec: Any, layer_name: str) -> Any:
    """The spec of one layer of a group: of a bundle, that of the layer."""
    bundle = getattr(spec, "kv_cache_specs", None)
    return spec if bundle is None else bundle[layer_name]


def stands_for_tokens(spec: Any) -> bool:
    """Whether a page holds what was computed of its tokens, and is no scratch memory."""
    return bool(getattr(spec, "prefix_cacheable", True))


def _bases(spec: Any) -> set[str]:
    return {base.__name__ for base in type(spec).__mro__}
