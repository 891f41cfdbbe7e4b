# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The shared tier as the secondary tier of a connector. It makes the parts of both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_ascend_kvext.connector.common.events import TierEvents
from vllm_ascend_kvext.connector.common.messages import WorkerLayout
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.connector.scheduler.parts import SchedulerParts
from vllm_ascend_kvext.connector.scheduler.transfer_cost import TransferCost
from vllm_ascend_kvext.connector.secondary_tier import SecondaryTier
from vllm_ascend_kvext.shared_tier.engine_identity import identity_of
from vllm_ascend_kvext.shared_tier.scheduler.shared_side import SharedSide
from vllm_ascend_kvext.shared_tier.worker.shared_worker import SharedWorker


class SharedSecondaryTier(SecondaryTier):
    """The shared tier that the options of one connector name."""

    def __init__(self, vllm_config: Any, options: ConnectorOptions) -> None:
        self._vllm_config = vllm_config
        self._options = options

    def scheduler_side(
        self,
        parts: SchedulerParts,
        workers: Sequence[WorkerLayout],
        cost: TransferCost,
        events: TierEvents,
    ) -> SharedSide:
        of_workers = [worker.secondary for worker in workers]
        hosts = {each.sharing.ranks_of_host for each in workers if each.sharing is not None}
        identity = identity_of(self._vllm_config, parts.layout, of_workers, sorted(hosts))
        return SharedSide(parts, self._options, identity, cost, events)

    def worker_side(self, kv_cache_config: Any) -> SharedWorker:
        return SharedWorker(self._vllm_config, kv_cache_config, self._options)
