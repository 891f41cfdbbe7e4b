# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Segments in host memory that the workers of an engine share.

Of workers with the same content, one writes a segment, and all read it. All bytes that requests
read are compared on every worker, and so is what lies in host memory: see `LearningEngine`.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.connector.exact_contents import ExactContents
from support.connector.learning_engine import (
    HEAD_TOKENS,
    MAX_TOKENS,
    LearningEngine,
    learning_engine,
)
from support.connector.offload_workloads import tokens
from support.connector.page_contents import PageContents
from support.connector.paged_layouts import FULL, GPT_OSS, PagedLayout
from test_shared_tier import see_log

from vllm_ascend_kvext.segments.scheduler.segment_store import StoredTokens

pytestmark = pytest.mark.usefixtures("offloading_in_effect")

ONE, OTHER, THIRD = (tuple(tokens(random.Random(num), num)) for num in (40, 53, 61))
every_layout = pytest.mark.parametrize("layout", [FULL, GPT_OSS], ids=["full", "windows"])
NEVER = {"store_policy": "never"}


def one_memory(layout: PagedLayout, num_workers: int, num_heads: int = 1) -> dict[str, Any]:
    return {"num_workers": num_workers, "num_contents": [num_heads] * len(layout.groups)}


def stored_bytes(layout: PagedLayout, **workers: Any) -> tuple[float, int]:
    """What workers copy for two documents, and what their entries take of host memory."""
    with learning_engine(layout, connector=NEVER, **workers) as engine:
        engine.choose(min_head_tokens=0)
        for document in (ONE, OTHER):
            engine.store(document)
            engine.serve()
        engine.answer(ONE, OTHER)
        assert engine.counts.reused_tokens == len(ONE) + len(OTHER) - 2 * HEAD_TOKENS
        held = [each for each in engine.entries if isinstance(each.row_map, StoredTokens)]
        copied_bytes = engine.side.counters.transfer_bytes["store"]
        return copied_bytes, sum(each.num_bytes for each in held)


@every_layout
def test_a_segment_is_stored_once_for_workers_with_the_same_content(layout: PagedLayout) -> None:
    alone = stored_bytes(layout, num_workers=1)
    assert stored_bytes(layout, **one_memory(layout, 2)) == alone
    assert stored_bytes(layout, **one_memory(layout, 4)) == alone
    twice = tuple(2 * each for each in alone)
    assert stored_bytes(layout, **one_memory(layout, 4, num_heads=2)) == twice
    copied_bytes, entry_bytes = stored_bytes(layout, num_workers=2)
    assert (copied_bytes, entry_bytes) == (twice[0], alone[1]), "each worker has its own memory"


def let_differ(engine: LearningEngine) -> None:
    """Each worker writes other bytes, although all are said to have the same."""
    for rank, worker in enumerate(engine.workers):
        worker.writers = rank
        worker.contents = PageContents(worker.pages, rank)
    engine.contents = ExactContents(engine, MAX_TOKENS)


@pytest.mark.parametrize("policy", ["all", "never"])
@every_layout
def test_workers_that_differ_have_segments_of_their_own(
    layout: PagedLayout,
    policy: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    see_log(caplog, monkeypatch)
    workers = one_memory(layout, 2)
    with learning_engine(layout, connector={"store_policy": policy}, **workers) as engine:
        engine.choose(min_head_tokens=0)
        let_differ(engine)
        engine.store(ONE)
        engine.serve()
        assert "keeps all of its bytes from now on" in caplog.text
        if policy == "never":
            assert "an extension's rows on ranks 0 and 1" in caplog.text
            engine.answer(ONE)
            assert engine.counts.reused_tokens == 0, "what was stored before was found"
        for document in (ONE, OTHER):
            engine.store(document)
            engine.serve()
        before = engine.counts.reused_tokens
        engine.answer(ONE, OTHER)
        reused_tokens = len(ONE) + len(OTHER) - 2 * HEAD_TOKENS
        assert engine.counts.reused_tokens - before == reused_tokens


@every_layout
def test_segments_are_compared_although_prompts_were(layout: PagedLayout) -> None:
    """A difference that shows in segments only ends what is shared of prompts, too."""
    with learning_engine(layout, **one_memory(layout, 2)) as engine:
        engine.choose(min_head_tokens=0)
        engine.answer(OTHER)
        assert not engine.side._check.compares_groups and engine.side._check.compares_extras
        mover = engine.workers[1].side._runner.mover
        found = mover.digests
        mover.digests = lambda *job: tuple(each._replace(digest=b"other") for each in found(*job))
        engine.store(ONE)
        engine.serve()
        assert engine.side._keeps_apart and mover.layout.num_sections == 2
        engine.store(THIRD)
        engine.serve()
        engine.answer(THIRD)
        assert engine.counts.reused_tokens == len(THIRD) - HEAD_TOKENS


def test_segments_of_layers_with_different_heads_are_kept_apart() -> None:
    """Nothing is compared here, because no two workers share a section, and no prompt is stored."""
    workers = {"num_workers": 2, "num_contents": [1, 2]}
    with learning_engine(GPT_OSS, connector=NEVER, **workers) as engine:
        engine.choose(min_head_tokens=0)
        described = [worker.side.describe() for worker in engine.workers]
        assert all(each.sharing is not None for each in described)
        sections = [each.extras.layout for each in described]
        assert [(each.num_sections, each.section) for each in sections] == [(2, 0), (2, 1)]
        for _ in range(2):
            engine.store(ONE)
            engine.serve()
        engine.answer(ONE)
        assert engine.counts.reused_tokens == len(ONE) - HEAD_TOKENS
        assert engine.side._check.is_first
