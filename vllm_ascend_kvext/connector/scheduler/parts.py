# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The objects that the parts of a scheduler side share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vllm_ascend_kvext.connector.common.block_references import BlockReferences
from vllm_ascend_kvext.connector.common.counters import ConnectorCounters
from vllm_ascend_kvext.connector.common.host_layout import HostLayout
from vllm_ascend_kvext.connector.common.scheduler_view import SchedulerView
from vllm_ascend_kvext.connector.scheduler.worker_jobs import WorkerJobs
from vllm_ascend_kvext.holes.hole_queue import HoleQueue
from vllm_ascend_kvext.store.tier import HostTier


class SchedulerParts(NamedTuple):
    """The parts of a scheduler side that loads, stores, a secondary tier and an extension share.

    Attributes:
        computes_holes: Whether holes may be computed. If not, a load stops at the first hole.
        clock: Seconds that only grow.
    """

    view: SchedulerView
    layout: HostLayout
    tier: HostTier
    references: BlockReferences
    jobs: WorkerJobs
    holes: HoleQueue
    computes_holes: bool
    counters: ConnectorCounters
    clock: Callable[[], float]
