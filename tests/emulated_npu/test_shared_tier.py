# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 on the emulated NPU: an engine hits, row unit by row unit, what another has put."""

from __future__ import annotations

import pytest
from compressed_attention_model import write_model
from emulated_plans import connector
from support.scenarios import processes
from support.scenarios.answers import Served
from support.scenarios.processes import NO_PREFIX_CACHING, NPU, Plan
from test_compressed_attention import BLOCK_TOKENS, CONTROL, ENGINE, TOLERANCE

PROMPTS_TOKENS = (300, 700, 1500)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> list[Served]:
    """One without anything, and two that share, each in a process of its own."""
    model, folder = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("tier")
    write_model(model)
    sharing = connector(shared_tier=f"file://{folder}")
    served = []
    for engine in ({}, sharing, sharing):
        plan = Plan(model, ("turns",), "compressed_attention", ENGINE | NO_PREFIX_CACHING | engine)
        served.append(processes.serve(tmp_path_factory, {"engine": plan}, {}, NPU)["engine"])
    return served


def test_another_engine_hits_to_the_last_row_unit(engines: list[Served]) -> None:
    alone, first, second = engines
    hits = [(length - 1) // BLOCK_TOKENS * BLOCK_TOKENS for length in PROMPTS_TOKENS]
    assert first.hit_tokens("first") == [0] * len(hits)
    assert second.hit_tokens("first") == hits
    assert second.report["own"]["transfer_bytes.get"] > 0
    for served in (first, second):
        served.check_equal(alone, ("first", "again", "next turn"), TOLERANCE)
        served.check_nothing_is_left()
        # A control: what is not loaded shows.
        assert served.logprob_error("again, nothing loaded", alone) > CONTROL
