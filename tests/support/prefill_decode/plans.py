# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Plans of nodes: which connectors they have, and in which order."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from support.scenarios.processes import Plan, connector

CONNECTORS = "support.prefill_decode.connectors"
"""The module with Mooncake's connectors."""

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


class Deployment(NamedTuple):
    """A prefill node and a decode node.

    Attributes:
        mooncake: The name of Mooncake's connector.
        order: The connectors of a node, by ``mooncake`` and ``kvext``.
        num_devices: The tensor-parallel size of both nodes.
        host_memory_gib: Of each node.
        load_if_slower: Whether KvextConnector ignores what its loads and stores cost.
    """

    mooncake: str = "MooncakeConnectorV1"
    order: tuple[str, ...] = ("mooncake", "kvext")
    num_devices: int = 1
    host_memory_gib: float = 0.25
    load_if_slower: bool = True

    def plan(
        self,
        kind: str,
        model: Path | Callable[[], Path],
        engine: Mapping[str, Any],
    ) -> Plan:
        """The plan of a ``prefill`` or ``decode`` node."""
        workers: dict[str, Any] = {}
        if self.num_devices > 1:
            workers = {
                "tensor_parallel_size": self.num_devices,
                "distributed_executor_backend": "mp",
            }
        arguments = {
            "enable_prefix_caching": True,
            # vLLM's logger of a MultiConnector cannot read in this process what connectors report.
            "disable_log_stats": True,
            "kv_transfer_config": self._transfer_config(ROLES[kind]),
            **workers,
            **engine,
        }
        return Plan(model, (), engine=arguments)

    def _transfer_config(self, role: str) -> dict[str, Any]:
        sizes = {name: {"dp_size": 1, "tp_size": self.num_devices} for name in ROLES}
        node = {"kv_role": role, "kv_port": free_port(), "kv_load_failure_policy": "recompute"}
        own = connector(
            host_memory_gib=self.host_memory_gib,
            store_policy="all",
            load_if_slower=self.load_if_slower,
        )
        of = {
            "kvext": own["kv_transfer_config"],
            "mooncake": {
                **node,
                "kv_connector": self.mooncake,
                "kv_connector_module_path": CONNECTORS,
                "kv_connector_extra_config": sizes,
            },
        }
        connectors = [of[name] for name in self.order]
        if len(connectors) == 1:
            return connectors[0]
        extra = {"connectors": connectors, **sizes}
        return {**node, "kv_connector": "MultiConnector", "kv_connector_extra_config": extra}


def free_port() -> int:
    """A port that is free, with free ones behind it: each rank of a node has one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
