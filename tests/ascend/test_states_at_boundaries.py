# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Beside a connector that may load, vLLM-Ascend 0.30 caches states of other positions.

Its steps of a prompt end within blocks there. A test named ``test_stock_...`` shows vLLM-Ascend on
its own; `tests/engine/test_hits_of_repairs.py` reads all that is hit with the repair.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.installed import installed
from support.retention.checkpoints import adaptive_retention
from support.scheduler.engine import SchedulerEngine
from support.scheduler.hits import FOREIGN, Beside, Cell, hits_of
from support.scheduler.layouts import MAMBA
from support.scheduler.options import EngineOptions, ExternalLoad
from support.scheduler.workload import RequestPlan

pytestmark = pytest.mark.vllm(">=0.30")

NUM_TOKENS = 45
"""Blocks have 8 tokens."""


@pytest.fixture
def repaired() -> Iterator[None]:
    with installed("aligned-steps"):
        yield


@pytest.mark.parametrize("beside", FOREIGN, ids=lambda beside: beside.kv_role)
@pytest.mark.parametrize("step_offset_tokens", [0, 3])
def test_stock_reads_states_of_other_positions(beside: Beside, step_offset_tokens: int) -> None:
    cell = Cell(MAMBA, beside, has_drafts=False, step_offset_tokens=step_offset_tokens)
    assert bool(hits_of(cell).wrong) == beside.may_load


@pytest.mark.usefixtures("repaired")
@pytest.mark.parametrize("beside", FOREIGN, ids=lambda beside: beside.kv_role)
@pytest.mark.parametrize("step_offset_tokens", [0, 3])
def test_states_that_are_hit_are_their_positions(beside: Beside, step_offset_tokens: int) -> None:
    cell = Cell(MAMBA, beside, has_drafts=False, step_offset_tokens=step_offset_tokens)
    assert not hits_of(cell).wrong


@pytest.mark.usefixtures("repaired")
@pytest.mark.parametrize(
    ("computed_tokens", "num_new_tokens", "expected"),
    [
        (8, 20, 16),  # The prompt goes on, so the step ends where a block does.
        (12, 20, 4),  # A step that begins within a block ends with it.
        (8, 37, 32),  # The last whole block of the prompt leaves its state.
        (40, 5, 5),
        (44, 3, 3),  # The last token of the prompt and two drafts are verified together.
        (45, 3, 3),  # An answer.
    ],
)
def test_steps_of_a_prompt_end_at_blocks_but_for_that_of_its_last_token(
    computed_tokens: int, num_new_tokens: int, expected: int
) -> None:
    options = EngineOptions(num_blocks=100, external_load=ExternalLoad.NEVER, kv_role="kv_consumer")
    engine = SchedulerEngine(MAMBA, options)
    plan = RequestPlan(
        request_id="request-1", arrival_step=0, prompt=(1,) * NUM_TOKENS, max_tokens=8
    )
    split = engine.scheduler._mamba_block_aligned_split
    request = engine.make_request(plan)
    assert split(request, num_new_tokens, 0, computed_tokens) == expected
    request.num_computed_tokens = computed_tokens
    assert split(request, num_new_tokens) == expected
    engine.shutdown()


def test_retention_still_ends_steps_where_a_request_says_so() -> None:
    with adaptive_retention():
        options = EngineOptions(
            num_blocks=100, external_load=ExternalLoad.NEVER, kv_role="kv_consumer"
        )
        engine = SchedulerEngine(MAMBA, options)
        plan = RequestPlan(
            request_id="request-1",
            arrival_step=0,
            prompt=(1,) * NUM_TOKENS,
            max_tokens=8,
            checkpoint_tokens=(16,),
        )
        request = engine.make_request(plan)
        assert engine.scheduler._mamba_block_aligned_split(request, 30, 0, 8) == 8
        engine.shutdown()
