# SPDX-License-Identifier: Apache-2.0
"""Which steps an engine makes before its prefix cache is reset, so that transfers end."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_kvext.patches.connector.core import drain_before_reset

NUM_STEPS_OF_A_STORE = 3
PAUSED = SimpleNamespace(is_finished=lambda: False)
ABORTED = SimpleNamespace(is_finished=lambda: True)


class KvextConnector:
    """Its store ends with the third step."""

    def __init__(self) -> None:
        self.steps_left = NUM_STEPS_OF_A_STORE
        self.learning = None
        self.scheduler_side = self
        self.bind_engine = nullcontext

    @property
    def has_transfers(self) -> bool:
        return self.steps_left > 0

    def release_pages(self) -> None:
        pass


class Core:
    """An engine whose requests are paused, so that upstream counts none."""

    def __init__(self, requests: dict[str, object], is_own_process: bool) -> None:
        self.num_steps = 0
        self.connector = KvextConnector()
        self.scheduler = SimpleNamespace(
            connector=self.connector, requests=requests, has_unfinished_requests=lambda: False
        )
        if is_own_process:
            self._process_engine_step = self._step

    def step_fn(self) -> tuple[dict[int, Any], bool]:
        self._step()
        return {}, True

    def post_step(self, is_executed: bool) -> None:
        pass

    def _step(self) -> None:
        self.num_steps += 1
        self.connector.steps_left -= 1


@pytest.mark.parametrize(
    ("requests", "is_own_process", "num_steps"),
    [
        ({}, False, NUM_STEPS_OF_A_STORE),
        ({}, True, NUM_STEPS_OF_A_STORE),
        ({"paused": PAUSED}, True, NUM_STEPS_OF_A_STORE),  # The step sends its outputs.
        ({"paused": PAUSED}, False, 0),
        ({"aborted": ABORTED}, False, NUM_STEPS_OF_A_STORE),  # It is there while it loads.
        ({"aborted": ABORTED, "paused": PAUSED}, False, 0),
    ],
)
def test_no_step_is_made_whose_outputs_nobody_would_get(
    requests: dict[str, object], is_own_process: bool, num_steps: int
) -> None:
    core = Core(requests, is_own_process)
    assert drain_before_reset(lambda: True, core)
    assert core.num_steps == num_steps
