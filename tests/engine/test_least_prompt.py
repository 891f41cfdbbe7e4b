# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The log names the shortest prompt that hits, and one token less hits nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pytest_mock import MockerFixture
from support import family
from support.scheduler import layouts
from support.scheduler.block_manager import BlockManager, Layout, full, mamba, window
from support.scheduler.engine import SchedulerEngine
from support.scheduler.layouts import Attention, Group
from support.scheduler.options import Drafter, EngineOptions
from support.scheduler.workload import RequestPlan

from vllm_ascend_kvext.patches.hit_geometry import log_least_prompt

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


STATES = (Group(Attention.FULL, 128), Group(Attention.MAMBA, 128), Group(Attention.MAMBA, 128))
WIDE_STATES = (Group(Attention.FULL, 512), Group(Attention.MAMBA, 512))
WITH_WINDOW = (*STATES, Group(Attention.WINDOW, 128, 128))


@pytest.mark.vllm(">=0.30")
@pytest.mark.parametrize(
    ("groups", "unit_tokens", "has_drafts", "min_tokens"),
    [
        pytest.param(STATES, 32, False, 33, id="block 128, unit 32"),
        pytest.param(STATES, 64, False, 65, id="block 128, unit 64"),
        pytest.param(WIDE_STATES, 64, False, 65, id="block 512, unit 64"),
        pytest.param(STATES, 32, True, 65, id="block 128, unit 32, drafts"),
        pytest.param(WIDE_STATES, 64, True, 129, id="block 512, unit 64, drafts"),
        pytest.param(STATES, 128, False, 129, id="the unit is the block"),
        pytest.param(WITH_WINDOW, 32, False, 129, id="a window hits whole blocks only"),
    ],
)
def test_no_shorter_prompt_hits_with_a_match_unit(
    groups: tuple[Group, ...],
    unit_tokens: int,
    has_drafts: bool,
    min_tokens: int,
    mocker: MockerFixture,
) -> None:
    if has_drafts and family.IS_ASCEND:
        # Without a connector, vLLM-Ascend's lookups drop no tokens.
        min_tokens -= unit_tokens
    engine = SchedulerEngine(
        layouts.Layout("states", groups),
        EngineOptions(
            num_blocks=64,
            max_num_batched_tokens=2048,
            max_model_len=4096,
            match_unit_tokens=unit_tokens,
            drafter=Drafter.EAGLE if has_drafts else None,
        ),
    )
    info = mocker.patch("vllm.logger.init_logger").return_value.info
    log_least_prompt(engine.scheduler.kv_cache_manager.coordinator)
    _, printed_tokens, printed_unit_tokens = info.call_args.args
    hits = [hit_of_second_request(engine, num_tokens) for num_tokens in range(1, min_tokens + 1)]
    assert [hits[:-1], hits[-1] > 0, printed_tokens] == [[0] * (min_tokens - 1), True, min_tokens]
    assert hits[-1] % printed_unit_tokens == 0
    engine.shutdown()


@pytest.mark.vllm(">=0.30")
@pytest.mark.parametrize("unit_tokens", [16, 64])
def test_where_only_attention_drops_a_block_states_are_hit_at_blocks(
    unit_tokens: int, mocker: MockerFixture
) -> None:
    if family.IS_ASCEND:
        pytest.skip("without a connector, vLLM-Ascend's lookups drop no tokens")
    full, states = WIDE_STATES
    engine = SchedulerEngine(
        layouts.Layout("states", (replace(full, is_eagle=True), states)),
        EngineOptions(
            num_blocks=64,
            max_num_batched_tokens=2048,
            max_model_len=4096,
            match_unit_tokens=unit_tokens,
            drafter=Drafter.EAGLE,
        ),
    )
    info = mocker.patch("vllm.logger.init_logger").return_value.info
    log_least_prompt(engine.scheduler.kv_cache_manager.coordinator)
    assert info.call_args.args[1:] == (1025, 512)
    assert not hit_of_second_request(engine, 1024)
    for num_tokens in range(1025, 1537, 31):
        assert hit_of_second_request(engine, num_tokens) >= 512, num_tokens
    engine.shutdown()


def hit_of_second_request(engine: SchedulerEngine, num_tokens: int) -> int:
    """The tokens that a prompt hits when it is sent again; no other prompt is cached then."""
    prompt = tuple(range(1, num_tokens + 1))
    assert engine.reset_prefix_cache(False)
    hit_tokens = []
    for number in range(2):
        name = f"{len(engine.plans)}-{number}"
        engine.add_request(
            RequestPlan(request_id=name, arrival_step=0, prompt=prompt, max_tokens=1)
        )
        steps = engine.finish()
        hit_tokens.append(steps[0].scheduled[0].num_computed_tokens)
    return hit_tokens[1]
