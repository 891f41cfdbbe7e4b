# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The second model runner finds the state at the end of a hit, whatever the other groups' blocks.

vLLM's own `MambaHybridModelState` notes the columns. The expected columns are those that vLLM's
own block table of states has at the ends of hits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)

from vllm_ascend_kvext.patches.repairs.model_runner import count_columns_in_state_blocks

pytestmark = pytest.mark.vllm(">=0.30")

NUM_CASES = 200
MAX_REQUESTS = 8

Add = Callable[[Any, Any], None]


def config_of(full_block_tokens: int, state_block_tokens: int) -> KVCacheConfig:
    full = FullAttentionSpec(
        block_size=full_block_tokens, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    state = MambaSpec(
        block_size=state_block_tokens,
        shapes=((4,), (4,)),
        dtypes=(torch.float32, torch.float32),
        mamba_cache_mode="align",
    )
    groups = [KVCacheGroupSpec(["full"], full), KVCacheGroupSpec(["state"], state)]
    return KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)


def runner_of(full_block_tokens: int, state_block_tokens: int, mode: str = "align") -> Any:
    """A runner with what adding requests reads. ``block_size`` is as the engine core sets it."""
    from vllm.v1.worker.gpu.model_states import default, mamba_hybrid

    state = object.__new__(mamba_hybrid.MambaHybridModelState)
    state.cache_config = SimpleNamespace(block_size=min(full_block_tokens, state_block_tokens))
    state.num_accepted_tokens_gpu = torch.zeros(MAX_REQUESTS, dtype=torch.int32)
    state._mamba_state_idx_gpu = torch.full((MAX_REQUESTS,), -7, dtype=torch.int32)
    state._align_mode = mode == "align"
    state._mamba_spec = None
    state._mamba_group_ids = []
    assert default.DefaultModelState.add_request is not type(state).add_request
    return SimpleNamespace(
        model_state=state,
        kv_cache_config=config_of(full_block_tokens, state_block_tokens),
        req_states=SimpleNamespace(req_id_to_index={}),
    )


@pytest.fixture(autouse=True)
def nothing_else_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    monkeypatch.setattr(DefaultModelState, "add_request", lambda *_: None)


def upstreams(runner: Any) -> Callable[[Any], None]:
    def add_requests(scheduler_output: Any) -> None:
        for request in scheduler_output.scheduled_new_reqs:
            row = len(runner.req_states.req_id_to_index)
            runner.req_states.req_id_to_index[request.req_id] = row
            runner.model_state.add_request(row, request)

    return add_requests


def stock(runner: Any, scheduler_output: Any) -> None:
    upstreams(runner)(scheduler_output)


def repaired(runner: Any, scheduler_output: Any) -> None:
    count_columns_in_state_blocks(upstreams(runner), runner, scheduler_output)


def wrong_cases(add: Add) -> list[int]:
    found = []
    for seed in range(NUM_CASES):
        rng = random.Random(seed)
        full_tokens = rng.choice((16, 32, 64))
        state_tokens = full_tokens * rng.choice((1, 3, 4, 34))
        runner = runner_of(full_tokens, state_tokens)
        blocks = [rng.randrange(5) for _ in range(rng.randrange(1, 4))]
        requests = [
            SimpleNamespace(req_id=str(number), num_computed_tokens=num * state_tokens)
            for number, num in enumerate(blocks)
        ]
        add(runner, SimpleNamespace(scheduled_new_reqs=requests))
        columns = runner.model_state._mamba_state_idx_gpu[: len(blocks)].tolist()
        if columns != [num - 1 for num in blocks]:
            found.append(seed)
    return found


def test_stock_counts_columns_in_the_smallest_block() -> None:
    assert len(wrong_cases(stock)) > NUM_CASES / 10


def test_the_column_is_that_of_the_state_at_the_end_of_the_hit() -> None:
    assert not wrong_cases(repaired)


def test_an_engine_without_aligned_states_is_left_alone() -> None:
    runner = runner_of(16, 64, mode="none")
    request = SimpleNamespace(req_id="a", num_computed_tokens=128)
    repaired(runner, SimpleNamespace(scheduled_new_reqs=[request]))
    assert runner.model_state._mamba_state_idx_gpu[0] == -7


def test_a_model_without_states_is_left_alone() -> None:
    runner = SimpleNamespace(model_state=object())
    called = []
    count_columns_in_state_blocks(called.append, runner, "output")  # type: ignore[arg-type]
    assert called == ["output"]
