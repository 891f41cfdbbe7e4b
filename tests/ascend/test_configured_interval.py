# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""vLLM-Ascend 0.30 overlooks the configured retention interval; with the repair it is obeyed.

An interval of 0 is vLLM's default, and no user's choice, so it is left as vLLM-Ascend has it. The
tests use DeepSeek-V4's true layout. A test named ``test_stock_...`` shows vLLM-Ascend on its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from ascend_geometry import HIT_UNIT_TOKENS, planned_layout
from support.installed import installed, retention_installed
from support.scheduler import layouts
from support.scheduler.block_manager import (
    BlockManager,
    Layout,
    full,
    mamba,
    retention_interval,
    window,
)
from vllm import envs
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.kv_cache_interface import SlidingWindowSpec

pytestmark = pytest.mark.vllm(">=0.30")

UNIT_TOKENS = HIT_UNIT_TOKENS[128]
NUM_UNITS = 5
NUM_TOKENS = NUM_UNITS * UNIT_TOKENS + 3000


@pytest.fixture
def repaired() -> Iterator[None]:
    with installed("configured-interval"):
        yield


def served(interval: int | None) -> tuple[int, int]:
    """The window blocks that one prompt leaves in the cache, and its hit when it comes again."""
    layout = planned_layout(128)
    world = BlockManager(layout, interval, num_blocks=16000)
    request = world.request(range(NUM_TOKENS))
    world.prefill(request, 2048)
    world.finish(request)
    kept = Counter(get_group_id(each.block_hash) for each in world.pool.blocks if each.block_hash)
    windows = [i for i, spec in enumerate(layout.specs) if isinstance(spec, SlidingWindowSpec)]
    hit_tokens = world.hit_tokens(world.request(range(NUM_TOKENS)))
    return sum(kept[group_id] for group_id in windows), hit_tokens


def test_stock_caches_as_if_no_interval_were_configured() -> None:
    assert served(2 * UNIT_TOKENS) == served(None)


@pytest.mark.usefixtures("repaired")
def test_an_interval_keeps_the_tails_of_its_multiples_and_of_the_last_boundary() -> None:
    dense_blocks, dense_tokens = served(None)
    kept_blocks, hit_tokens = served(2 * UNIT_TOKENS)
    assert hit_tokens == dense_tokens == NUM_UNITS * UNIT_TOKENS
    assert 0 < NUM_UNITS * kept_blocks == 3 * dense_blocks, "of units 2, 4 and 5"


@pytest.mark.usefixtures("repaired")
def test_the_default_keeps_what_stock_keeps() -> None:
    assert served(0) == served(None)


@pytest.mark.usefixtures("repaired")
def test_an_interval_that_is_no_multiple_is_refused() -> None:
    with pytest.raises(ValueError, match="prefix_cache_retention_interval"):
        served(UNIT_TOKENS + 1)


def test_a_wrong_variable_is_refused_with_the_unit_of_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM-Ascend reads the variable, and must not check it: its unit may differ from ours."""
    configured = {"prefix_cache_retention_interval": 0}
    monkeypatch.setattr(layouts, "retention_fields", lambda: configured)
    expected = f"RETENTION_INTERVAL='{UNIT_TOKENS + 1}' is not a multiple of {UNIT_TOKENS}"
    with retention_installed(), pytest.raises(ValueError, match=expected):
        served(UNIT_TOKENS + 1)


def test_the_variable_decides_and_vllm_ascend_finds_it_unset() -> None:
    with retention_installed(), retention_interval(UNIT_TOKENS):
        assert envs.VLLM_PREFIX_CACHE_RETENTION_INTERVAL is None
        _, hit_tokens = served(UNIT_TOKENS)
    assert hit_tokens == NUM_UNITS * UNIT_TOKENS


DRAFTING = {
    "window": Layout((full(16), window(4, 5)), frozenset({1})),
    "state": Layout((full(16), mamba(16)), frozenset({0})),
}
"""Layouts with MTP. Without a connector, lookups of vLLM-Ascend drop no block nevertheless."""


INTERVALS = (None, 96)
"""Dense caching, and an interval beyond the prompts, which keeps the places to resume them."""


@pytest.mark.usefixtures("repaired")
@pytest.mark.parametrize("name", DRAFTING)
def test_prompt_with_drafts_hits_as_far_as_with_dense_caching(name: str) -> None:
    found = [hit_of_next(DRAFTING[name], interval, 50, 50) for interval in INTERVALS]
    assert found == [48, 48]


@pytest.mark.usefixtures("repaired")
def test_the_end_of_a_prompt_of_whole_blocks_is_kept_where_its_state_is() -> None:
    layout = Layout((full(16), mamba(16)))
    assert [hit_of_next(layout, interval, 48, 60) for interval in INTERVALS] == [48, 48]


def hit_of_next(layout: Layout, interval: int | None, num_tokens: int, next_tokens: int) -> int:
    """The tokens hit by a prompt that begins like one of ``num_tokens``, in steps of 48."""
    world = BlockManager(layout, interval)
    request = world.request(range(num_tokens))
    world.prefill(request, 48)
    world.finish(request)
    return world.hit_tokens(world.request(range(next_tokens)))
