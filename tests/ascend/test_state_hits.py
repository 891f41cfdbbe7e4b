# SPDX-License-Identifier: Apache-2.0
"""The load-balancing scheduler of vLLM-Ascend 0.30 offers hits without states as vLLM's does.

It starts with several ranks of a decode node only: here its lookup is called, on true managers.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.installed import installed
from support.scheduler.block_manager import BlockManager, Layout, full, mamba

pytestmark = pytest.mark.vllm(">=0.30")

BLOCK_TOKENS = 16
TURNS_TOKENS = (5 * BLOCK_TOKENS + 3, 4 * BLOCK_TOKENS + 3)


def hits(brings_states: bool) -> tuple[int, int]:
    """Tokens that the scheduler offers its connector, and those that all groups hit."""
    from vllm_ascend.core.dyntra_lb_scheduler import DyntraLBScheduler

    world = BlockManager(Layout((full(BLOCK_TOKENS), mamba(BLOCK_TOKENS))), 0)
    longer, shorter = (world.request(range(tokens)) for tokens in TURNS_TOKENS)
    world.prefill(longer, 1024)
    world.finish(longer)
    scheduler = object.__new__(DyntraLBScheduler)
    scheduler.kv_cache_manager = world.manager
    scheduler.connector = SimpleNamespace(supports_divergent_local_hybrid_hits=brings_states)
    _, offered_tokens, *_ = scheduler._get_connector_computed_blocks(shorter)
    return offered_tokens, world.manager.get_computed_blocks(shorter)[1]


def test_stock_offers_every_connector_a_hit_without_its_state() -> None:
    for brings_states in (True, False):
        offered_tokens, of_all_tokens = hits(brings_states)
        assert offered_tokens == 4 * BLOCK_TOKENS > of_all_tokens


@pytest.mark.parametrize("brings_states", [True, False])
def test_only_a_connector_that_brings_states_is_offered_one(brings_states: bool) -> None:
    with installed("state-hits"):
        offered_tokens, of_all_tokens = hits(brings_states)
    assert (offered_tokens > of_all_tokens) is brings_states
