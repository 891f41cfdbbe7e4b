# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The steps that an engine makes before its prefix cache is reset, so that transfers end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from pytest_mock import MockerFixture

from vllm_ascend_kvext.patches.connector import core

NUM_STEPS_OF_A_STORE = 3
PAUSED = SimpleNamespace(is_finished=lambda: False)
ABORTED = SimpleNamespace(is_finished=lambda: True)


@pytest.mark.parametrize(
    ("requests", "is_own_process", "num_steps"),
    [
        ({}, False, NUM_STEPS_OF_A_STORE),
        ({}, True, NUM_STEPS_OF_A_STORE),
        ({"paused": PAUSED}, True, NUM_STEPS_OF_A_STORE),  # The step sends its outputs.
        ({"paused": PAUSED}, False, 0),
        ({"aborted": ABORTED}, False, NUM_STEPS_OF_A_STORE),  # The request stays while it loads.
        ({"aborted": ABORTED, "paused": PAUSED}, False, 0),
    ],
)
def test_no_step_is_made_whose_outputs_nobody_would_get(
    requests: dict[str, object], is_own_process: bool, num_steps: int, mocker: MockerFixture
) -> None:
    """While requests are paused, upstream does not count them as unfinished."""
    under_way = [True] * NUM_STEPS_OF_A_STORE + [False]
    side = mocker.Mock()
    type(side).has_transfers = mocker.PropertyMock(side_effect=under_way)
    mocker.patch.object(core, "side_of", return_value=side)
    step = mocker.Mock(return_value=({}, True))
    scheduler = SimpleNamespace(requests=requests, has_unfinished_requests=lambda: False)
    how = {"_process_engine_step": step} if is_own_process else {"step_fn": step}
    engine = SimpleNamespace(scheduler=scheduler, post_step=mocker.Mock(), **how)
    assert core.drain_before_reset(lambda: True, engine)
    assert step.call_count == num_steps
