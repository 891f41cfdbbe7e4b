# SPDX-License-Identifier: Apache-2.0
"""The log names the shortest prompt that hits, and one token less hits nothing."""

from __future__ import annotations

import pytest
from support.scheduler.block_manager import BlockManager, Layout, full, mamba, window
from support.scheduler.least_prompt import hit_tokens_of_second, printed_tokens

LAYOUTS = {
    "full": (Layout((full(16),)), 17),
    "full, EAGLE": (Layout((full(16),), frozenset({0})), 33),
    "windows": (Layout((full(16), window(16, 64), window(16, 64, 2))), 17),
    "two block sizes": (Layout((full(16), window(64, 128))), 65),
    "windows, EAGLE": (Layout((full(16), window(16, 64)), frozenset({0})), 33),
    "EAGLE in the window": (Layout((full(16), window(16, 64)), frozenset({1})), 33),
    "states": (Layout((full(16), mamba(16))), 17),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_printed_length_hits_and_one_token_less_does_not(name: str) -> None:
    layout, least_tokens = LAYOUTS[name]
    block_manager = BlockManager(layout)
    printed, unit_tokens = printed_tokens(block_manager)
    hits = [
        hit_tokens_of_second(block_manager, num_tokens, unit_tokens)
        for num_tokens in (printed - 1, printed)
    ]
    assert (hits[0], hits[1] > 0, printed) == (0, True, least_tokens)
    assert hits[1] % unit_tokens == 0
