# SPDX-License-Identifier: Apache-2.0
"""A blank retention interval is an unset one when a block manager is built, too."""

from __future__ import annotations

import pytest
from support.installed import retention_installed
from support.retention.checkpoints import adaptive_retention
from support.scheduler.block_manager import BlockManager, Layout, full, window

from vllm_ascend_kvext.patches.retention.kv_cache_coordinator import retention_of

LAYOUT = Layout((full(4), window(4, 9)))
blank = pytest.mark.parametrize("text", ["", "  "])


@blank
def test_without_adaptive_retention_nothing_is_retained(text: str) -> None:
    with retention_installed():
        coordinator = BlockManager(LAYOUT, text).manager.coordinator
        assert retention_of(coordinator) is None
        assert coordinator.retention_interval is None


@blank
def test_with_adaptive_retention_it_adds_no_grid(text: str) -> None:
    with adaptive_retention():
        coordinator = BlockManager(LAYOUT, text).manager.coordinator
        retention = retention_of(coordinator)
        assert retention is not None
        assert retention.policy.interval_tokens == 0
        assert coordinator.retention_interval is None
