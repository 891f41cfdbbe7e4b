# SPDX-License-Identifier: Apache-2.0
"""Failed loads on the schedulers that vLLM-Ascend puts in place of vLLM's."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm_ascend")

from support.installed import repairs_installed
from support.scheduler.invariants import blocks_are_conserved
from support.scheduler.layouts import FULL_WINDOW
from support.scheduler.model_runner import ReadCheck
from support.scheduler.options import ExternalLoad, FailingLoads
from support.scheduler.random_workloads import random_workload
from support.scheduler.run import run

NUM_SEEDS = 3


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("load", [ExternalLoad.IN_STEP, ExternalLoad.BETWEEN_STEPS])
def test_outputs_are_those_of_a_run_without_failures(load: ExternalLoad, is_async: bool) -> None:
    num_failed = 0
    with repairs_installed():
        for seed in range(NUM_SEEDS):
            workload = random_workload(FULL_WINDOW, seed)
            options = replace(
                workload.options,
                num_blocks=workload.options.num_blocks * 3,
                external_load=load,
                is_async=is_async,
                failing_loads=FailingLoads(seed=seed, max_steps=3),
            )
            workload = replace(workload, options=options, resets=())
            result = run(workload, [blocks_are_conserved], ReadCheck.ALL)
            assert not result.wrong_outputs(workload), workload.name
            num_failed += result.transcript.counts["failed loads"]
    assert num_failed >= NUM_SEEDS
