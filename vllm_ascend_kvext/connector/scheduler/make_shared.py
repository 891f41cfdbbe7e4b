# SPDX-License-Identifier: Apache-2.0
"""The shared tier of an engine, made once its workers are known; the log says with whom it shares.

It is imported only where the option is set.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.connector.scheduler.shared_side import SharedSide
from vllm_ascend_kvext.connector.scheduler.transfer_cost import TransferCost
from vllm_ascend_kvext.connector.segments.no_segments import SchedulerParts
from vllm_ascend_kvext.shared_tier.files import VERSION_FOLDER
from vllm_ascend_kvext.shared_tier.names import (
    Identity,
    describe_engine,
    differences,
    engines_below,
    namespace_of,
)
from vllm_ascend_kvext.shared_tier.protocol import folder_of, tier_of
from vllm_ascend_kvext.store.store_policy import StorePolicy

if TYPE_CHECKING:
    from vllm_ascend_kvext.connector.common.events import TierEvents

logger = logging.getLogger("vllm.ascend_kvext.shared_tier")


def make_shared(
    parts: SchedulerParts,
    options: ConnectorOptions,
    identity: Identity,
    num_workers: int,
    cost: TransferCost,
    events: TierEvents,
    clock: Callable[[], float],
) -> SharedSide:
    """The scheduler's part of the tier that the options name.

    Raises:
        SettingsError: If it cannot be used.
    """
    assert options.shared_tier is not None
    namespace = namespace_of(identity)
    tier = tier_of(options.shared_tier, options.shared_tier_bytes, namespace, 0)
    root = os.path.join(folder_of(options.shared_tier), VERSION_FOLDER)
    others = {name: each for name, each in engines_below(root).items() if name != namespace}
    is_known = os.path.exists(os.path.join(root, namespace, "engine.json"))
    describe_engine(root, namespace, identity)
    logger.info(
        "Shared tier %s: name space %s, %s.",
        options.shared_tier,
        namespace,
        "which engines like this one have used" if is_known else "which is new",
    )
    if others and not is_known:
        nearest = min((differences(identity, each) for each in others.values()), key=len)
        logger.warning(
            "Shared tier %s: what is there was put by other engines, and is not read. The nearest "
            "of %d differs in: %s. `python -m vllm_ascend_kvext status --shared-tier %s` lists "
            "them.",
            options.shared_tier,
            len(others),
            "; ".join(nearest),
            options.shared_tier,
        )
    puts_all = options.store_policy is StorePolicy.ALL
    return SharedSide(parts, tier, namespace, num_workers, cost, events, puts_all, clock)
