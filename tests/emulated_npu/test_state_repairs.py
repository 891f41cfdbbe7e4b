# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""vLLM-Ascend answers wrong for models with states, and does not with the repairs.

- 0.30.0rc2 copies only the first view at an address of a block inside which a hit ends. Layers of
  several groups have views at one address.
- 0.23.0 saves states on a 310P by the drafts that the step before has accepted.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from emulated_plans import IS_0_23
from support.sample import IS_LONG
from support.scenarios.answers import LOGPROB_TOLERANCE, errors
from support.scenarios.processes import (
    NO_PREFIX_CACHING,
    NPU,
    PLUGIN_OFF,
    LazyReports,
    Plan,
)

NUM_REQUESTS = 200 if IS_LONG else 24
UNIT_TOKENS = 32
VISIBLE = 20 * LOGPROB_TOLERANCE
ENGINE = {
    "block_size": 384,  # three times the keys that are as large as a state
    "prefix_match_unit": UNIT_TOKENS,
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 200,
}

of_0_30 = pytest.mark.skipif(IS_0_23, reason="vLLM 0.23.0 has no hits inside blocks")
of_0_23 = pytest.mark.skipif(not IS_0_23, reason="only 0.23.0 has the defect")


@pytest.fixture(scope="module")
def reports(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> LazyReports:
    def plan(**engine: Any) -> Plan:
        options = {"unit_tokens": UNIT_TOKENS, "num_requests": NUM_REQUESTS}
        made = {"max_num_batched_tokens": 512, "num_gpu_blocks_override": 200, **engine}
        return Plan(
            lambda: folder_of("states"), ["seen_twice"], "hits_inside_blocks", made, options
        )

    processes = [
        (PLUGIN_OFF, {"reference": plan(**NO_PREFIX_CACHING)}),
        (PLUGIN_OFF, {"stock": plan(**ENGINE)}),
        ({"VLLM_ASCEND_KVEXT_DISABLE": "block-copies"}, {"without": plan(**ENGINE)}),
        ({}, {"repaired": plan(**ENGINE)}),
    ]
    return LazyReports(tmp_path_factory, processes, NPU)


def num_wrong(reports: LazyReports, name: str) -> int:
    answers = reports[name].answers("again")
    assert sum(answer.hit_tokens % 384 > 0 for answer in answers) > len(answers) / 2
    found = errors(answers, reports["reference"].answers("again"))
    return sum(not error <= VISIBLE for error in found)


@of_0_30
@pytest.mark.parametrize("name", ["stock", "without"])
def test_hits_inside_blocks_are_wrong_without_the_repair(reports: LazyReports, name: str) -> None:
    assert num_wrong(reports, name) > NUM_REQUESTS / 10


@of_0_30
def test_hits_inside_blocks_are_right(reports: LazyReports) -> None:
    assert not num_wrong(reports, "repaired")


NUM_CASES = 200
BLOCK_TOKENS = 16
NUM_DRAFTS = 3
NUM_ROWS = 4


class SavedStates:
    """A step of requests with drafts, after which vLLM-Ascend saves states."""

    def __init__(self, rng: random.Random) -> None:
        self.counts = [rng.randrange(1, NUM_DRAFTS + 2) for _ in range(NUM_ROWS)]
        before = [rng.randrange(1, NUM_DRAFTS + 2) for _ in range(NUM_ROWS)]
        computed = [rng.randrange(BLOCK_TOKENS, 3 * BLOCK_TOKENS) for _ in range(NUM_ROWS)]
        scheduled = NUM_DRAFTS + 1
        columns = [-(-(tokens + scheduled) // BLOCK_TOKENS) - 1 for tokens in computed]
        width = 4 + NUM_DRAFTS + 1
        self.table = torch.arange(1, NUM_ROWS * width + 1).view(NUM_ROWS, width).numpy()
        self.state = torch.arange(NUM_ROWS * width + 1, dtype=torch.float32).view(-1, 1)
        self.expected = self._expected(computed, columns)
        buffers = {
            "mamba_state_idx_buf": columns,
            "num_scheduled_tokens_buf": [scheduled] * NUM_ROWS,
            "num_computed_tokens_buf": computed,
            "num_draft_tokens_buf": [NUM_DRAFTS] * NUM_ROWS,
        }
        context = SimpleNamespace(
            block_size=BLOCK_TOKENS,
            mamba_group_ids=[0],
            **{name: SimpleNamespace(np=values) for name, values in buffers.items()},
        )
        group = SimpleNamespace(layer_names=["layer"])
        own = torch.tensor(before, dtype=torch.int32)
        accepted = torch.zeros(NUM_ROWS, dtype=torch.int32)
        self.runner = SimpleNamespace(
            use_async_scheduling=True,
            speculative_config="drafts",
            model_config=SimpleNamespace(is_hybrid=True),
            cache_config=SimpleNamespace(mamba_cache_mode="align"),
            num_accepted_tokens=SimpleNamespace(gpu=accepted, cpu=accepted.clone()),
            num_accepted_tokens_event=SimpleNamespace(record=lambda: None),
            _get_mamba_bufs=lambda: SimpleNamespace(postprocess_align=context),
            input_batch=SimpleNamespace(
                num_accepted_tokens_cpu=own.numpy(),
                block_table=[SimpleNamespace(get_numpy_array=lambda: self.table)],
            ),
            kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
            compilation_config=SimpleNamespace(
                static_forward_context={"layer": SimpleNamespace(kv_cache=[self.state])}
            ),
            model=SimpleNamespace(get_mamba_state_copy_func=self._copy_funcs),
        )

    @staticmethod
    def _copy_funcs() -> Any:
        from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec

        return (get_temporal_copy_spec,)

    def _expected(self, computed: list[int], columns: list[int]) -> torch.Tensor:
        """The states, after that of a block's last token has been copied to the block."""
        expected = self.state.clone()
        for row, count in enumerate(self.counts):
            end = (computed[row] + count) // BLOCK_TOKENS
            behind = end * BLOCK_TOKENS - computed[row] - 1
            if behind >= 0:
                source = self.table[row][columns[row] + behind]
                expected[self.table[row][end - 1]] = self.state[source]
        return expected

    def save(self, update: Callable[..., None]) -> bool:
        """Whether the right states are saved."""
        ids = torch.full((NUM_ROWS, NUM_DRAFTS + 1), -1)
        for row, count in enumerate(self.counts):
            ids[row, :count] = 7
        update(self.runner, ids)
        return bool((self.state == self.expected).all())


@pytest.fixture
def update(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """vLLM-Ascend's own function, on a 310P."""
    from vllm.v1.worker import mamba_utils
    from vllm_ascend.patch.worker import patch_mamba_utils
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    loop = patch_mamba_utils._postprocess_mamba_align_gpu_cpu_fallback
    monkeypatch.setattr(mamba_utils, "postprocess_mamba_align_gpu", loop)
    own = NPUModelRunner._update_states_after_model_execute
    yield lambda runner, ids: getattr(own, "__wrapped__", own)(runner, ids, None)


def wrong_cases(update: Callable[..., None]) -> list[int]:
    return [seed for seed in range(NUM_CASES) if not SavedStates(random.Random(seed)).save(update)]


@of_0_23
def test_stock_saves_states_by_the_step_before(update: Callable[..., None]) -> None:
    assert len(wrong_cases(update)) > NUM_CASES / 10


@of_0_23
def test_states_are_saved_by_this_step(update: Callable[..., None]) -> None:
    from vllm_ascend_kvext.patches.repairs.model_runner_v1 import save_states_by_this_step

    def repaired(runner: Any, ids: torch.Tensor) -> None:
        save_states_by_this_step(lambda ids, _: update(runner, ids), runner, ids, None)  # type: ignore[arg-type]

    assert not wrong_cases(repaired)


def test_the_next_step_waits_for_states_that_another_stream_saves() -> None:
    """Some seeds run the next step's kernels first, unless they wait."""
    from torch_npu import emulation

    from vllm_ascend_kvext.patches.repairs.model_runner_v1 import save_states_before_the_next_step

    def num_early(step: Callable[..., Any]) -> int:
        found = 0
        stream = torch.npu.Stream()
        for seed in range(20):
            state = torch.zeros(1, device="npu")
            read = torch.zeros(1, device="npu")
            torch.npu.synchronize()
            emulation.set_seed(seed)
            event = torch.npu.Event()
            with torch.npu.stream(stream):
                state.fill_(1)
                event.record()
            step(
                lambda to, of: to.copy_(of),
                SimpleNamespace(num_accepted_tokens_event=event),
                read,
                state,
            )
            torch.npu.synchronize()
            emulation.set_seed(None)
            found += int(read.item() == 0)
        return found

    assert num_early(lambda wrapped, _runner, *args: wrapped(*args)) > 0
    assert num_early(save_states_before_the_next_step) == 0


def test_drafts_of_a_first_step_are_counted() -> None:
    """A step has one token more than drafts. Else it is a part of a prompt, with drafts or not."""
    from vllm_ascend_kvext.patches.repairs.model_runner_v1 import count_drafts_of_first_steps

    class Counts:
        np = numpy.array([-1, 2, -1, -1], numpy.int32)
        on_device: Any = None

        def copy_to_gpu(self) -> None:
            self.on_device = self.np.copy()

    counts = Counts()
    rows = {"one token is left": 0, "decodes": 1, "prompt with drafts": 2, "prompt": 3}
    runner = SimpleNamespace(
        num_decode_draft_tokens=counts, input_batch=SimpleNamespace(req_id_to_index=rows)
    )
    drafts = {"one token is left": [-1, -1], "decodes": [7, 8], "prompt with drafts": [7]}
    output = SimpleNamespace(scheduled_spec_decode_tokens=drafts)
    found = count_drafts_of_first_steps(
        lambda *given: given,
        runner,
        output,  # type: ignore[arg-type]
        numpy.array([3, 3, 40, 40]),
    )
    assert found[0] is output
    assert counts.on_device.tolist() == [2, 2, -1, -1]


def test_steps_are_patched() -> None:
    """A process of its own loads the plugin before it imports the runner, as an engine does."""
    script = """
import wrapt
from vllm.plugins import load_general_plugins
load_general_plugins()
import vllm_ascend.patch.worker.patch_mamba_utils  # 0.23.0 has circular imports.
from vllm_ascend.worker.model_runner_v1 import NPUModelRunner
for name in ("execute_model", "_prepare_inputs"):
    print(name, isinstance(vars(NPUModelRunner)[name], wrapt.FunctionWrapper))
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert not ended.returncode, ended.stderr
    found = [line for line in ended.stdout.splitlines() if line.endswith(("True", "False"))]
    assert found == ["execute_model True", f"_prepare_inputs {not IS_0_23}"]
