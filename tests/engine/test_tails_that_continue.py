# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Tails that continue others, on vLLM's real scheduler, with real pages, but no model.

Prompts part behind a common beginning. Once two of them have resumed there, further tails have only
what they have beyond the tails at the end of the beginning. The engine compares each byte that
a step reads with what the step has to read.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from support.connector.engines import engine_of, fail_next, make_holes, plan_of
from support.connector.offload_run import check_nothing_is_left, serve
from support.connector.offload_workloads import tokens
from support.connector.page_contents import WrongBytesError
from support.connector.paged_layouts import GEMMA, PagedLayout, paged
from support.connector.simulated_engine import SimulatedEngine
from support.scheduler import layouts

from vllm_ascend_kvext.connector.scheduler import loads
from vllm_ascend_kvext.holes.load_plan import plan_of_hit
from vllm_ascend_kvext.store.counters import Removal
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind
from vllm_ascend_kvext.store.lookup import Hit
from vllm_ascend_kvext.store.prefix import HashedPrefix

pytestmark = pytest.mark.usefixtures("offloading_in_effect")

WIDE_WINDOW = paged(layouts.WIDE_WINDOW)
"""A window of 40 tokens, with pages of 8 and of 4 tokens."""

TWO_WINDOWS = paged(layouts.TWO_WINDOWS)
"""Windows of 6 and of 20 tokens, and no full attention."""

MAMBA_WINDOW = paged(layouts.MAMBA_WINDOW)

LAYOUTS = (GEMMA, WIDE_WINDOW)

by_layout = {"ids": lambda layout: layout.name}

rng = random.Random("continued tails")
BEGINNING = tokens(rng, 80)
QUESTIONS = tuple([*BEGINNING, *tokens(rng, length)] for length in (17, 13, 9, 9, 26, 41, 60))
LAST = 3
"""The number of a question whose tails continue others in all layouts."""


@contextmanager
def engine_with_questions(layout: PagedLayout, **options: Any) -> Iterator[SimulatedEngine]:
    """An engine that has served all questions, one after the other."""
    with engine_of(layout, **options) as engine:
        for number, question in enumerate(QUESTIONS):
            serve(engine, plan_of(f"question-{number}", question, max_tokens=1))
        yield engine


def prefix_of(engine: SimulatedEngine, prompt: Sequence[int]) -> HashedPrefix:
    request = engine.make_request(plan_of("asks for keys", prompt))
    return engine.side._stores._view.prefix(request)


def hit_of(engine: SimulatedEngine, prompt: Sequence[int]) -> Hit:
    return engine.tier.look_up(prefix_of(engine, prompt), len(prompt) - 1)


def tails_of(engine: SimulatedEngine, prompt: Sequence[int]) -> Entry:
    """The tails at which a prompt resumes."""
    tails = hit_of(engine, prompt).tails
    assert tails is not None
    return tails


def serve_again(engine: SimulatedEngine, prompt: Sequence[int]) -> int:
    """Serve a prompt. Returns the tokens that were loaded."""
    before = engine.side.counters.hit_tokens
    serve(engine, plan_of(f"again-{before}-{len(prompt)}", prompt))
    return engine.side.counters.hit_tokens - before


def hit_tokens_of(engine: SimulatedEngine, prompt: Sequence[int]) -> int:
    """The tokens that can be loaded at most."""
    return engine.tier.geometry.floor(len(prompt) - 1)


@pytest.mark.parametrize("layout", LAYOUTS, **by_layout)
def test_questions_behind_a_common_beginning_have_its_windows_once(layout: PagedLayout) -> None:
    with engine_with_questions(layout) as engine:
        found = [tails_of(engine, question) for question in QUESTIONS]
        (base,) = {entry.base for entry in found if entry.base is not None}
        assert base.base is None and base.piece.end_tokens <= len(BEGINNING)
        assert found[LAST].base is base
        assert all(entry.num_bytes <= 3 / 4 * base.num_bytes for entry in base.continued_by or ())
        for question in QUESTIONS:
            assert serve_again(engine, question) == hit_tokens_of(engine, question)
        check_nothing_is_left(engine)


@pytest.mark.parametrize("part", [0, 1], ids=["base", "continuing"])
@pytest.mark.parametrize("layout", LAYOUTS, **by_layout)
def test_both_parts_are_read(layout: PagedLayout, part: int) -> None:
    """The control: without the bytes of one part, a step reads wrong bytes."""
    with engine_with_questions(layout) as engine:
        entry = tails_of(engine, QUESTIONS[LAST]).chain[part]
        for worker in engine.workers:
            host = worker.side._host.tensor
            host[entry.offset_bytes : entry.offset_bytes + entry.num_bytes] = 0
        with pytest.raises(WrongBytesError):
            serve_again(engine, QUESTIONS[LAST])


@pytest.mark.parametrize("part", [0, 1], ids=["base", "continuing"])
@pytest.mark.parametrize("layout", LAYOUTS, **by_layout)
def test_what_continues_tails_that_cannot_be_read_goes_with_them(
    layout: PagedLayout, part: int
) -> None:
    with engine_with_questions(layout) as engine:
        question = QUESTIONS[LAST]
        base, entry = chain = tails_of(engine, question).chain
        others = {*(base.continued_by or ()), base}
        number = plan_of_hit(hit_of(engine, question)).entries.index(chain[part])
        fail_next(engine, 1, 2 + number)  # The load fails, and then this part of it.
        assert serve_again(engine, question) < hit_tokens_of(engine, question)
        gone = others if part == 0 else {entry}
        assert {each for each in others if each.state is EntryState.GONE} == gone
        removed = engine.side.counters.tier.removed_entries
        assert removed[Removal.LOAD_FAILED] == len(gone)
        for each in QUESTIONS:
            serve_again(engine, each)
        for each in QUESTIONS:
            assert serve_again(engine, each) == hit_tokens_of(engine, each)
        check_nothing_is_left(engine)


def test_a_hole_begins_with_tails_that_continue_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "MIN_RUN_TOKENS", 0)
    question = QUESTIONS[LAST]
    longer = [*question, *tokens(random.Random("longer"), 40)]
    hole_tokens = len(question) // GEMMA.unit_tokens * GEMMA.unit_tokens
    with engine_with_questions(GEMMA, max_num_batched_tokens=512) as engine:
        serve(engine, plan_of("longer", longer, max_tokens=1))
        make_holes(engine, (hole_tokens, hole_tokens + 4))
        entry = tails_of(engine, longer)
        assert entry.piece.end_tokens == hole_tokens and entry.base is not None
        serve_again(engine, longer)
        counters = engine.side.counters
        assert counters.holes and not counters.tier.failed_loads
        check_nothing_is_left(engine)


@pytest.mark.parametrize("layout", [MAMBA_WINDOW, TWO_WINDOWS], **by_layout)
def test_tails_with_states_or_without_rows_are_whole(layout: PagedLayout) -> None:
    """A state at an earlier token is another state. Without rows, nothing else could give way."""
    with engine_with_questions(layout) as engine:
        found = [entry for entry in engine.entries if entry.piece.kind is Kind.TAILS]
        assert found and not any(entry.base for entry in found)
