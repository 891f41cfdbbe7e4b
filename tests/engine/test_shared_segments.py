# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Segments that engines share, on vLLM's real scheduler, with real pages, but no model.

The bytes that requests read are compared in every step: see `LearningEngine`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.connector.learning_engine import HEAD_TOKENS, LearningEngine, learning_engine
from support.connector.offload_workloads import tokens
from support.connector.paged_layouts import FULL, GPT_OSS, PagedLayout
from support.connector.shared_objects import forge, objects
from support.connector.simulated_segments import SimulatedMover
from support.scheduler.token_stream import VOCAB_SIZE
from support.scheduler.workload import RequestPlan
from test_shared_tier import Slow, _equal_seeds, _patience, payload, weights

from vllm_ascend_kvext.segments.counters import SegmentRefusal
from vllm_ascend_kvext.segments.keys.key_check import MIN_PAIRS, find_pairs

__all__ = ["_equal_seeds", "_patience", "weights"]

pytestmark = pytest.mark.usefixtures("offloading_in_effect", "weights")

ONE, OTHER = (tuple(tokens(random.Random(num), num)) for num in (40, 53))


@contextmanager
def sharing(
    folder: Path, layout: PagedLayout = FULL, segments: dict[str, Any] | None = None, **more: Any
) -> Iterator[LearningEngine]:
    shared = {"shared_tier": f"file://{folder}", **more.pop("connector", {})}
    segments = {"learn": False, **(segments or {})}
    with learning_engine(layout, connector=shared, segments=segments, **more) as engine:
        # Otherwise a window covers all of such a short segment.
        engine.choose(min_head_tokens=0)
        yield engine


def store_in(folder: Path, *documents: tuple[int, ...], **more: Any) -> None:
    with sharing(folder, **more) as engine:
        for document in documents:
            engine.store(document)
        engine.serve()
        engine.serve()


def names_of(folder: Path) -> list[str]:
    """The names of the objects, without keys."""
    return sorted(path.name.rpartition("-")[0] for path in objects(folder))


def reused_tokens(engine: LearningEngine, *documents: tuple[int, ...], **more: Any) -> int:
    before = engine.counts.reused_tokens
    for document in documents:
        plan = RequestPlan(request_id="", arrival_step=0, prompt=document, max_tokens=1)
        engine.contents.expect_segment(document, plan)
    engine.answer(*documents, **more)
    return int(engine.counts.reused_tokens - before)


def test_a_reset_while_a_segment_is_being_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entries are already gone when the store ends."""
    with sharing(tmp_path) as engine:
        engine.store(ONE)
        engine.serve()
        assert engine.segments.checks.are_passed
        # A request runs, so the reset waits for nothing.
        engine.send(tokens(random.Random(5), 20), 40)
        engine.step()
        engine.store(OTHER)
        (worker,) = engine.workers
        with monkeypatch.context() as patch:
            patch.setattr(worker.transfers, "end_some", lambda _: None)
            for _ in range(6):
                engine.step()
            assert engine.side._jobs.num_stores, "the store must still be running"
            engine.reset(reset_connector=True)
        engine.serve()
        assert not any(path.name.startswith("S") for path in objects(tmp_path)[3:])


@pytest.mark.parametrize(("num_workers", "num_heads"), [(1, 0), (2, 0), (2, 1), (4, 2)])
@pytest.mark.parametrize("layout", [FULL, GPT_OSS], ids=["full", "windows"])
def test_a_segment_that_one_engine_has_stored_is_reused_by_another(
    layout: PagedLayout, num_workers: int, num_heads: int, tmp_path: Path
) -> None:
    """Workers with the same heads share host memory, if ``num_heads`` says how many."""
    workers = {
        "num_workers": num_workers,
        "num_contents": [num_heads] * len(layout.groups) if num_heads else None,
    }
    store_in(tmp_path, ONE, OTHER, layout=layout, **workers)
    with sharing(tmp_path, layout, **workers) as engine:
        assert reused_tokens(engine, OTHER, ONE) == len(ONE) + len(OTHER) - 2 * HEAD_TOKENS
        counters = engine.side.counters
        assert counters.shared_requests["found"] == 1 and not engine.counts.stored_segments
        assert counters.transfer_bytes["get"] > 0 and not any(counters.shared_failures.values())


def test_nothing_of_the_first_engine_is_needed_but_the_folder(tmp_path: Path) -> None:
    """Here, no worker has compared keys. The engine that put the segments has compared them."""
    store_in(tmp_path, ONE)
    with sharing(tmp_path) as engine:
        assert not engine.segments.checks.are_passed
        reused_tokens(engine, OTHER)
        assert engine.counts.refusals[SegmentRefusal.UNCHECKED_KEYS] == 1
        assert reused_tokens(engine, ONE, OTHER) == len(ONE) - HEAD_TOKENS


def test_segments_are_put_once_keys_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sharing(tmp_path) as engine:
        monkeypatch.setattr(SimulatedMover, "check_keys", lambda *_: None)
        engine.store(ONE)
        engine.serve()
        assert objects(tmp_path) == []
        monkeypatch.undo()
        engine.store(OTHER)
        engine.serve()
        engine.serve()
        assert names_of(tmp_path) == ["S0-16", "S16-32", "S32-48", "S48-56"]
        engine.answer(ONE)  # The segment is used, so it is put, too.
        assert len(objects(tmp_path)) == 4 + 3


def test_what_has_failed_the_comparison_is_not_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sharing(tmp_path) as engine:
        monkeypatch.setattr(SimulatedMover, "check_keys", lambda *_: "wrong")
        engine.store(ONE)
        engine.serve()
        engine.store(OTHER)
        engine.serve()
        assert objects(tmp_path) == []


def test_what_keys_are_compared_by_is_not_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tuple(random.Random(0).sample(range(VOCAB_SIZE), 40))

    def check_keys(mover: SimulatedMover, rows: Any) -> str | None:
        token_ids = [token_id for each in rows for token_id in each.token_ids]
        return "" if len(find_pairs(token_ids)) >= MIN_PAIRS else None

    monkeypatch.setattr(SimulatedMover, "check_keys", check_keys)
    with sharing(tmp_path) as engine:
        engine.store(document)
        engine.serve()
        assert engine.segments.checks.are_passed and objects(tmp_path) == []
        assert reused_tokens(engine, document) == len(document) - HEAD_TOKENS
        assert names_of(tmp_path) == ["S0-16", "S16-32", "S32-40"], (
            "a segment that is used must be put"
        )
    with sharing(tmp_path) as engine:
        assert reused_tokens(engine, document) == len(document) - HEAD_TOKENS
        assert not engine.own_plans, "keys were compared again"


def test_learned_segments_are_shared(tmp_path: Path) -> None:
    with sharing(tmp_path, segments={"learn": True}) as engine:
        for _ in range(3):
            engine.answer(ONE)
    with sharing(tmp_path, segments={"learn": True}) as engine:
        rng = random.Random(1)
        # The earlier prompts would be reused exactly, so other prompts are sent.
        for _ in range(3):
            assert reused_tokens(engine, tuple(tokens(rng, 30)), ONE) == len(ONE) - HEAD_TOKENS
        assert ONE not in engine.learned


@pytest.mark.parametrize("other", ["sink", "salt"])
def test_other_sinks_and_salts_do_not_meet(other: str, tmp_path: Path) -> None:
    store_in(tmp_path, ONE)
    segments = {"sink": [6]} if other == "sink" else {}
    salted = {"cache_salt": "x"} if other == "salt" else {}
    with sharing(tmp_path, segments=segments) as engine:
        assert reused_tokens(engine, ONE, **salted) == 0
        assert engine.side.counters.transfer_bytes["get"] == 0


def test_several_requests_at_once_share_what_is_got(tmp_path: Path) -> None:
    store_in(tmp_path, ONE)
    with sharing(tmp_path) as engine:
        for _ in range(3):
            engine.ask(ONE)
        assert reused_tokens(engine, ONE) == 4 * (len(ONE) - HEAD_TOKENS)
        num_bytes = sum(path.stat().st_size for path in objects(tmp_path))
        assert 0 < engine.side.counters.transfer_bytes["get"] < num_bytes


def test_a_later_request_waits_for_what_is_being_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_in(tmp_path, ONE)
    slow = Slow(monkeypatch, "get_into")
    with sharing(tmp_path) as engine:
        engine.ask(ONE)
        engine.step_until(lambda: slow.num_calls)
        engine.ask(ONE)
        engine.step()
        slow.gate.set()
        assert reused_tokens(engine, ONE) == 3 * (len(ONE) - HEAD_TOKENS)


@pytest.mark.parametrize("damage", ["flipped", "gone"])
def test_damaged_segments_are_computed(damage: str, tmp_path: Path) -> None:
    store_in(tmp_path, ONE, OTHER)
    path = min(objects(tmp_path), key=lambda path: path.name)
    if damage == "gone":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[7] ^= 1
        path.write_bytes(data)
    with sharing(tmp_path) as engine:
        # One of the two is computed completely, because its beginning is lost.
        all_tokens = {len(ONE) - HEAD_TOKENS, len(OTHER) - HEAD_TOKENS}
        assert reused_tokens(engine, OTHER, ONE) in all_tokens


def test_wrong_bytes_with_a_right_checksum_are_seen(tmp_path: Path) -> None:
    """The control: the tests here would notice if segments were mixed up."""
    store_in(tmp_path, ONE)
    for path in objects(tmp_path):
        forge(tmp_path, path, bytes(len(payload(path))))
    with pytest.raises(AssertionError), sharing(tmp_path) as engine:
        reused_tokens(engine, ONE)
