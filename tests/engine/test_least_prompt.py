# SPDX-License-Identifier: Apache-2.0
"""The log names the shortest prompt that hits, and one token less hits nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pytest_mock import MockerFixture
from support import family
from support.scheduler.block_manager import BlockManager, Layout, full, mamba, window

from vllm_ascend_kvext.patches.retention.kv_cache_coordinator import log_least_prompt

LAYOUTS = {
    "full": (Layout((full(16),)), 17),
    "full, EAGLE": (Layout((full(16),), frozenset({0})), 33),
    "windows": (Layout((full(16), window(16, 64), window(16, 64, 2))), 17),
    "two block sizes": (Layout((full(16), window(64, 128))), 65),
    "windows, EAGLE": (Layout((full(16), window(16, 64)), frozenset({0})), 33),
    "EAGLE in the window": (Layout((full(16), window(16, 64)), frozenset({1})), 33),
    "states": (Layout((full(16), mamba(16))), 17),
}
if family.IS_ASCEND:
    from ascend_geometry import HIT_UNIT_TOKENS, planned_layout, small_layout

    LAYOUTS = {
        **{f"{size}": (planned_layout(size), unit + 1) for size, unit in HIT_UNIT_TOKENS.items()},
        "small": (small_layout(), 33),
        "small, EAGLE": (replace(small_layout(frozenset({0})), has_connector=True), 49),
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_printed_length_hits_and_one_token_less_does_not(
    name: str, mocker: MockerFixture
) -> None:
    layout, min_tokens = LAYOUTS[name]
    world = BlockManager(layout, num_blocks=16384)
    info = mocker.patch("vllm.logger.init_logger").return_value.info
    log_least_prompt(world.manager.coordinator)
    _, printed_tokens, unit_tokens = info.call_args.args
    hits = []
    for num_tokens in (printed_tokens - 1, printed_tokens):
        world.reset()
        first = world.request(range(num_tokens))
        world.prefill(first, unit_tokens)
        world.decode(first, (1, 2))
        world.finish(first)
        hits.append(world.hit_tokens(world.request(range(num_tokens))))
    assert (hits[0], hits[1] > 0, printed_tokens) == (0, True, min_tokens)
    assert hits[1] % unit_tokens == 0
