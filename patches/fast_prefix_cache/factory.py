# SPDX-License-Identifier: Apache-2.0
"""``vllm/distributed/kv_transfer/kv_connector/factory.py``: whether someone else sees the keys.

A KV connector may be given the block pool and read the keys of its blocks. The scheduler builds
its connector before its block manager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_ascend_kvext.patching.declaration import Kind, Patch

_connectors_built = 0


def has_connector() -> bool:
    """Whether a KV connector was ever built in this process."""
    return _connectors_built > 0


def note_connector(
    wrapped: Callable[..., Any], factory: type[Any], *args: Any, **kwargs: Any
) -> Any:
    """Remember that there is a connector."""
    global _connectors_built
    _connectors_built += 1
    return wrapped(*args, **kwargs)


PATCHES = (
    Patch(
        id="KVX-241",
        target="vllm.distributed.kv_transfer.kv_connector.factory:"
        "KVConnectorFactory.create_connector",
        kind=Kind.WRAP,
        feature="fast-prefix-cache",
        vllm=("==0.20.2.*", "==0.23.0.*"),
        wrapper=note_connector,
        why="Upstream joins up to 64 hashes into a key of 2 KB, where the last one says the same; "
        "a connector may read keys, and must find upstream's.",
        retire_when="vLLM >= 0.32, whose keys are the last hash",
    ),
)
