# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/kv_cache_interface.py``: two names of vLLM 0.23.0 that LMCache's connector imports.

``lmcache/integration/vllm/kv_cache_group_edits.py`` of LMCache 0.5.6 asks of what kind a spec is.
"""

from __future__ import annotations

import enum
from types import ModuleType
from typing import Any

_KINDS = "KVCacheSpecKind"
_KIND_OF = "get_kv_cache_spec_kind"


class KVCacheSpecKind(str, enum.Enum):
    """The kinds of vLLM 0.23.0."""

    FULL_ATTENTION = "full_attention"
    MLA_ATTENTION = "mla_attention"
    SLIDING_WINDOW = "sliding_window"
    SLIDING_WINDOW_MLA = "sliding_window_mla"
    MAMBA = "mamba"
    CHUNKED_LOCAL_ATTENTION = "chunked_local_attention"
    SINK_FULL_ATTENTION = "sink_full_attention"
    ENCODER_ONLY_ATTENTION = "encoder_only_attention"
    CROSS_ATTENTION = "cross_attention"
    UNKNOWN = "unknown"


_BY_CLASS = {
    "SlidingWindowMLASpec": KVCacheSpecKind.SLIDING_WINDOW_MLA,
    "SlidingWindowSpec": KVCacheSpecKind.SLIDING_WINDOW,
    "MLAAttentionSpec": KVCacheSpecKind.MLA_ATTENTION,
    "SinkFullAttentionSpec": KVCacheSpecKind.SINK_FULL_ATTENTION,
    "FullAttentionSpec": KVCacheSpecKind.FULL_ATTENTION,
    "ChunkedLocalAttentionSpec": KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION,
    "MambaSpec": KVCacheSpecKind.MAMBA,
    "EncoderOnlyAttentionSpec": KVCacheSpecKind.ENCODER_ONLY_ATTENTION,
    "CrossAttentionSpec": KVCacheSpecKind.CROSS_ATTENTION,
}


def kind_of(spec: Any) -> KVCacheSpecKind:
    """The kind of a spec, or of all layers of a bundle if they are of one."""
    bundle = getattr(spec, "kv_cache_specs", None)
    if bundle:
        kinds = {kind_of(each) for each in bundle.values()}
        return kinds.pop() if len(kinds) == 1 else KVCacheSpecKind.UNKNOWN
    names = (base.__name__ for base in type(spec).__mro__)
    return next((_BY_CLASS[name] for name in names if name in _BY_CLASS), KVCacheSpecKind.UNKNOWN)


def add_missing_names(module: ModuleType) -> None:
    """Give vLLM's module what it lacks."""
    for name, value in ((_KINDS, KVCacheSpecKind), (_KIND_OF, kind_of)):
        if not hasattr(module, name):
            setattr(module, name, value)


def remove_names(module: ModuleType) -> None:
    """Take back what `add_missing_names` has added."""
    for name, value in ((_KINDS, KVCacheSpecKind), (_KIND_OF, kind_of)):
        if getattr(module, name, None) is value:
            delattr(module, name)
