# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/distributed/kv_transfer/kv_connector/factory.py``: the connector has a name."""

from __future__ import annotations

from collections.abc import Callable

from vllm_ascend_kvext.connector.common.extension_registry import (
    register_extension,
    register_secondary_tier,
)
from vllm_ascend_kvext.patching.declaration import Kind, Patch

NAME = "KvextConnector"
_MODULE = "vllm_ascend_kvext.connector.kvext_connector"


def register_connector() -> Callable[[], None]:
    """Make the connector known to vLLM, and the packages above it known to the connector.

    All of them are imported only when they are used.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    register_extension("segments", "vllm_ascend_kvext.segments.extension", "SegmentsExtension")
    register_secondary_tier("vllm_ascend_kvext.shared_tier.secondary_tier", "SharedSecondaryTier")
    registry = KVConnectorFactory._registry
    if NAME not in registry:
        KVConnectorFactory.register_connector(NAME, _MODULE, NAME)
    loader = registry[NAME]

    def forget() -> None:
        if registry.get(NAME) is loader:
            del registry[NAME]

    return forget


PATCHES = (
    Patch(
        id="KVX-401",
        target="vllm.distributed.kv_transfer.kv_connector.factory:"
        "KVConnectorFactory.register_connector",
        kind=Kind.HOOK,
        feature="connector",
        install=register_connector,
        why="`kv_connector` names a connector that vLLM has to know.",
        retire_when="never: this is the official way",
    ),
)
