# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Questions are compared with segments on the emulated NPU, in vLLM-Ascend's attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from emulated_plans import RUNNERS
from support.blending.oracle import Oracle
from support.blending.scores import MAX_TOKENS, SCORE_TOLERANCE, score_errors
from support.scenarios import processes
from support.scenarios.answers import NPU_TOLERANCE, errors
from support.scenarios.processes import NPU, Plan, Reports
from support.scenarios.question import HEAD_TOKENS, ORDERS

MODEL = "full attention"
CHECK_LAYER = 1
SINK = [7, 8, 9]
POOL = {"num_gpu_blocks_override": 200}


@pytest.fixture(scope="module", params=RUNNERS)
def served(
    request: pytest.FixtureRequest,
    folder_of: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Reports:
    blending = processes.blending(
        head_tokens=HEAD_TOKENS,
        selector="question",
        check_layer=CHECK_LAYER,
        sink=SINK,
    )
    folder = folder_of(MODEL)
    plans = {
        "cold": Plan(folder, ["cold"], "question", POOL),
        "blends": Plan(folder, ["reused"], "question", POOL | blending),
    }
    return processes.serve(tmp_path_factory, plans, RUNNERS[request.param], NPU)


def test_scores_are_those_of_an_oracle(served: Reports, folder_of: Callable[[str], Path]) -> None:
    oracle = Oracle(folder_of(MODEL), [(0, SINK)], MAX_TOKENS)
    for place, answer in enumerate(served["blends"].answers("solo")):
        assert answer.probe is not None
        error, control = score_errors(oracle, answer.probe, place, HEAD_TOKENS, CHECK_LAYER)
        assert error < SCORE_TOLERANCE and control > 10 * SCORE_TOLERANCE


def test_what_the_question_chooses_is_computed(served: Reports) -> None:
    """With all tokens computed an answer is the plain one; with some it is another one.

    An answer with some tokens also differs from the one with only heads computed.
    """
    blends = served["blends"]
    cold = served["cold"].answers("cold")
    solo = blends.answers("solo")
    assert len(cold) == len(solo) == len(ORDERS)
    assert max(errors(blends.answers("everything"), cold)) <= NPU_TOLERANCE
    assert min(errors(solo, cold)) > 0.01
    assert min(errors(blends.answers("no scores"), solo)) > 0.01
    blends.check_nothing_is_left()
