# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The contenders: vLLM's options for each, and the server that the contender needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

TapName = Literal["none", "kvext", "lmcache", "offloading"]


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to keep KV in host memory.

    Attributes:
        tap: How the seconds of its transfers are measured, see `taps.py`.
        kv_transfer_config: The connector's configuration for vLLM; None for no connector.
        server_options: The options of the LMCache server that it needs; None for no server.
        serves_groups: Whether it serves a model with several KV cache groups.
    """

    name: str
    tap: TapName
    kv_transfer_config: Mapping[str, Any] | None = None
    server_options: tuple[str, ...] | None = None
    serves_groups: bool = True

    @property
    def environ(self) -> Mapping[str, str]:
        """The environment variables. Other contenders run without this package's patches."""
        return {} if self.tap == "kvext" else {"VLLM_ASCEND_KVEXT_MODE": "off"}


OURS = "KvextConnector"
ALONE = "no connector"
LMCACHE_DRIVEN = "LMCache, lmcache_driven"
LMCACHE_SHARED = "LMCache, engine_driven, shared memory"
BESIDE_COPIES = "no connector, a copy on another CPU"
"""An engine without a connector beside a thread that copies memory. No transfer can avoid this
cost."""


def kvext_contender(options: Mapping[str, Any]) -> Contender:
    """KvextConnector, which stores all that is computed.

    Args:
        options: Further options in ``kv_connector_extra_config``.
    """
    return Contender(
        OURS,
        "kvext",
        {
            "kv_connector": "KvextConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "vllm_ascend_kvext.connector",
            "kv_connector_extra_config": {"store_policy": "all", **options},
        },
    )


def contenders(host_gib: float, ports: Sequence[int], shm_name: str) -> tuple[Contender, ...]:
    """All contenders, ours first.

    Args:
        shm_name: The name of the segment that the second server shares.
    """
    driven_port, shared_port = ports
    return (
        kvext_contender({"host_memory_gib": host_gib}),
        Contender(
            LMCACHE_DRIVEN,
            "lmcache",
            _lmcache(driven_port, "lmcache_driven"),
            ("--port", str(driven_port), "--l1-size-gb", str(host_gib)),
        ),
        Contender(
            LMCACHE_SHARED,
            "lmcache",
            _lmcache(shared_port, "engine_driven"),
            (
                "--port",
                str(shared_port),
                "--l1-size-gb",
                str(host_gib),
                "--supported-transfer-mode",
                "auto",
                "--shm-name",
                shm_name,
            ),
            # LMCache: "engine-driven transfer does not support multiple KV transfer groups now".
            serves_groups=False,
        ),
        Contender(ALONE, "none"),
    )


def _lmcache(port: int, mode: str) -> dict[str, Any]:
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": port,
            "lmcache.mp.mp_transfer_mode": mode,
        },
    }
