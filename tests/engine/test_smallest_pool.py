# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A request as long as the model allows, in the smallest pool with which vLLM starts."""

from __future__ import annotations

import random

import pytest
from support.connector.engines import engine_of, plan_of
from support.connector.offload_run import check_nothing_is_left
from support.connector.offload_workloads import offloading, tokens
from support.connector.paged_layouts import GPT_OSS, PagedLayout, paged
from support.scheduler.layouts import Attention, Group, Layout
from support.scheduler.options import EngineOptions, build_vllm_config

pytestmark = pytest.mark.usefixtures("offloading_in_effect")

MAX_MODEL_LEN = 448
WIDE_PAGES = paged(
    Layout("wide-pages", (Group(Attention.FULL, 32), Group(Attention.WINDOW, 4, 40)))
)
"""A unit is eight pages of the window. So eight pages are held between two boundaries."""


def smallest_pool(layout: PagedLayout, max_num_batched_tokens: int) -> int:
    """The blocks that vLLM requires to start (``max_memory_usage_bytes``), and the null block."""
    options = EngineOptions(
        num_blocks=2, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=max_num_batched_tokens
    )
    config = build_vllm_config(layout, options)
    specs = [group.kv_cache_spec for group in layout.to_config(2).kv_cache_groups]
    return 1 + sum(
        -(-each.max_memory_usage_bytes(config) // each.page_size_bytes) for each in specs
    )


@pytest.mark.parametrize("num_prompt_tokens", [445, 388], ids=["prompt", "answer"])
@pytest.mark.parametrize("layout", [GPT_OSS, WIDE_PAGES], ids=lambda layout: layout.name)
def test_the_longest_request_ends_in_the_smallest_pool(
    layout: PagedLayout, num_prompt_tokens: int
) -> None:
    """Stores must not hold blocks that the request's own next step needs."""
    step_tokens = 20
    prompt = tokens(random.Random(1), num_prompt_tokens)
    plan = plan_of("longest", prompt, max_tokens=MAX_MODEL_LEN - num_prompt_tokens)
    with engine_of(
        layout,
        num_blocks=smallest_pool(layout, step_tokens),
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=step_tokens,
        offloading=offloading(layout, store_policy="second_touch"),
    ) as engine:
        request = engine.add_request(plan)
        for _ in range(4 * MAX_MODEL_LEN // step_tokens + plan.max_tokens):
            engine.step()
        assert not engine.scheduler.requests, (
            f"preempted {request.num_preemptions} times, answered {request.num_output_tokens}"
        )
        engine.finish()
        check_nothing_is_left(engine)
