# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/kv_cache_manager.py``: stores give way to a request that lacks blocks.

A store that has not begun holds blocks that no worker reads yet. While there are such stores, the
block manager of the scheduler has another ``allocate_slots``. If vLLM's own function finds too few
blocks, a store gives way, and the function is called again. So a request is admitted in the same
step, and a running request is not preempted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from vllm_ascend_kvext.connector.scheduler.connector_scheduler import ConnectorScheduler
    from vllm_ascend_kvext.patching.instance_methods import InstanceMethods


class GivingWay:
    """The block manager of one scheduler.

    Args:
        methods: The methods that the patch has replaced.
        side_of: Returns the scheduler side of the connector.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        methods: InstanceMethods,
        side_of: Callable[[], ConnectorScheduler | None],
    ) -> None:
        self._scheduler = scheduler
        self._methods = methods
        self._side_of = side_of
        self._take_off: Callable[[], None] | None = None

    def note_waiting_stores(self, are_waiting: bool) -> None:
        """Replace ``allocate_slots`` while stores wait; see ``SchedulerView``."""
        if are_waiting and self._take_off is None:
            manager = self._scheduler.kv_cache_manager
            self._take_off = self._methods.replace(manager, self.allocate_slots)
        elif not are_waiting and self._take_off is not None:
            take_off, self._take_off = self._take_off, None
            take_off()

    def allocate_slots(
        self,
        wrapped: Callable[..., KVCacheBlocks | None],
        request: Request,
        *args: Any,
        **kwargs: Any,
    ) -> KVCacheBlocks | None:
        """Allocate blocks for a request, if necessary the blocks of stores."""
        allocated = wrapped(request, *args, **kwargs)
        while allocated is None and self._give_way(request):
            allocated = wrapped(request, *args, **kwargs)
        return allocated

    def _give_way(self, request: Request) -> bool:
        from vllm.v1.request import RequestStatus

        side = self._side_of()
        return side is not None and side.give_way(request.status == RequestStatus.RUNNING)
