# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""KV of an adapter never meets KV of the base model, or of another adapter.

The tests run vLLM's real scheduler, with real pages. ``test_shared_tier`` shows that a shared tier
has no KV of adapters. ``test_connector_holes`` shows that their holes are not computed.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.connector.engines import engine_of, plan_of
from support.connector.learning_engine import learning_engine
from support.connector.offload_run import serve
from support.connector.offload_workloads import tokens
from support.connector.paged_layouts import FULL, GPT_OSS, PagedLayout
from support.scheduler.block_manager import BlockManager, Layout, full
from vllm.lora.request import LoRARequest

from vllm_ascend_kvext.segments.prompt_segments import STORE_KEY

pytestmark = pytest.mark.usefixtures("offloading_in_effect")

PROMPT = tokens(random.Random("prompt"), 100)
DOCUMENT = tuple(tokens(random.Random("document"), 40))
MODELS = (None, "adapter-0", "adapter-1")
"""The base model, and two adapters."""


@pytest.mark.parametrize("caching", [False, True], ids=["host memory", "and prefix cache"])
@pytest.mark.parametrize("layout", [FULL, GPT_OSS], ids=lambda layout: layout.name)
@pytest.mark.parametrize("stored_by", MODELS)
def test_a_prompt_hits_what_the_same_adapter_has_stored_and_nothing_else(
    stored_by: str | None, layout: PagedLayout, caching: bool
) -> None:
    with engine_of(layout, caching=caching) as engine:
        serve(engine, replace(plan_of("stored", PROMPT), adapter=stored_by))
        if caching:
            assert engine.reset()
        for asked_by in sorted(MODELS, key=lambda each: each == stored_by):
            hits_before = engine.side.counters.hit_tokens
            serve(engine, replace(plan_of(f"asked by {asked_by}", PROMPT), adapter=asked_by))
            hit_tokens = engine.side.counters.hit_tokens - hits_before
            assert (hit_tokens > 0) == (asked_by == stored_by), asked_by


def test_segments_are_neither_reused_nor_stored_for_an_adapter() -> None:
    with learning_engine() as engine:
        engine.show_twice(DOCUMENT)
        engine.serve()
        engine.answer(DOCUMENT)
        assert engine.learned == [DOCUMENT]
        reused_tokens = engine.counts.reused_tokens
        assert reused_tokens > 0
        engine.answer(DOCUMENT, adapter="adapter-0")
        assert engine.counts.reused_tokens == reused_tokens


def test_a_document_that_a_client_stores_with_an_adapter_is_refused() -> None:
    with learning_engine() as engine:
        engine.send(DOCUMENT, 1, extra_args=((STORE_KEY, True),), adapter="adapter-0")
        engine.serve()
        assert engine.counts.stored_segments == 0
        engine.answer(DOCUMENT)
        assert engine.counts.reused_tokens == 0


def test_vllm_gives_the_first_block_of_an_adapter_the_hash_of_a_salt_of_the_same_name() -> None:
    """docs/offload.md warns of this defect of vLLM: no salt may be named like an adapter."""
    world = BlockManager(Layout((full(4),)))
    adapter = world.request(range(8), lora_request=LoRARequest("name", 1, "/adapter"))
    salted = world.request(range(8), cache_salt="name")
    plain = world.request(range(8))
    assert adapter.block_hashes[0] == salted.block_hashes[0] != plain.block_hashes[0]
    assert adapter.block_hashes[1] != salted.block_hashes[1]
