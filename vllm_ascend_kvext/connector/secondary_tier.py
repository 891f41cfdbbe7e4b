# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A tier behind host memory, which makes a part of each side of a connector.

The connector itself knows no such tier. A package above it registers one by name, see
``extension_registry``. The tier is imported only if the option ``shared_tier`` asks for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from vllm_ascend_kvext.connector.common.extension_registry import registered_secondary_tier
from vllm_ascend_kvext.connector.common.messages import WorkerLayout
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.connector.scheduler.secondary_tier import SecondaryTierScheduler
from vllm_ascend_kvext.connector.worker.secondary_tier import SecondaryTierWorker
from vllm_ascend_kvext.errors import ConnectorError

if TYPE_CHECKING:
    from vllm_ascend_kvext.connector.common.events import TierEvents
    from vllm_ascend_kvext.connector.scheduler.parts import SchedulerParts
    from vllm_ascend_kvext.connector.scheduler.transfer_cost import TransferCost


class SecondaryTier(ABC):
    """The secondary tier that the options of one connector ask for.

    Args:
        vllm_config: vLLM's ``VllmConfig``, as the process has it.
    """

    @abstractmethod
    def __init__(self, vllm_config: Any, options: ConnectorOptions) -> None: ...

    @abstractmethod
    def scheduler_side(
        self,
        parts: SchedulerParts,
        workers: Sequence[WorkerLayout],
        cost: TransferCost,
        events: TierEvents,
    ) -> SecondaryTierScheduler:
        """Make its part of a scheduler side.

        Args:
            workers: The layouts of the workers, by rank.

        Raises:
            SettingsError: If the tier of the options cannot be used.
        """

    @abstractmethod
    def worker_side(self, kv_cache_config: Any) -> SecondaryTierWorker:
        """Make its part of a worker side.

        Args:
            kv_cache_config: vLLM's ``KVCacheConfig``, as the worker has it.
        """


def secondary_tier_of(vllm_config: Any, options: ConnectorOptions) -> SecondaryTier | None:
    """Make the secondary tier that the options ask for; None if they ask for none.

    Args:
        vllm_config: vLLM's ``VllmConfig``, as the process has it.

    Raises:
        ConnectorError: If none is registered.
    """
    if not options.shared_tier:
        return None
    place = registered_secondary_tier()
    if place is None:
        raise ConnectorError(
            "shared_tier: expected a tier that vllm-ascend-kvext has registered, found none; do "
            "not leave its plugin out of VLLM_PLUGINS, and see `python -m vllm_ascend_kvext status`"
        )
    tier = cast("type[SecondaryTier]", getattr(import_module(place.module), place.name))
    return tier(vllm_config, options)
