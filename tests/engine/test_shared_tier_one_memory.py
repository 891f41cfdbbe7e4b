# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A shared tier behind host memory that the workers of an engine share.

One worker gets an object for all. The scheduler is vLLM's, pages and memory are real, and there is
no model. Ranks write equal bytes where they are said to have equal KV, and other bytes elsewhere.
Every byte that attention would read is compared on every rank.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.connector.engines import engine_of, plan_of
from support.connector.gates import until
from support.connector.offload_run import check_nothing_is_left, run_offloading, serve
from support.connector.offload_workloads import EngineKind, random_offload
from support.connector.page_contents import PageContents, WrongBytesError
from support.connector.paged_layouts import FULL, LAYOUTS, STATE_LAYOUTS, PagedLayout
from support.connector.shared_objects import forge, objects
from support.connector.simulated_engine import SimulatedEngine
from support.sample import sampled
from test_shared_tier import (
    CAPACITY_BYTES,
    Faults,
    _equal_seeds,
    _patience,
    floor,
    hit_tokens,
    payload,
    prompt_of,
    see_log,
    sharing,
    weights,
)

from vllm_ascend_kvext.connector.scheduler import loads
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.shared_tier import files, names
from vllm_ascend_kvext.shared_tier.backend import Answer, SharedObject
from vllm_ascend_kvext.shared_tier.files import FilesTier
from vllm_ascend_kvext.shared_tier.scheduler import limits

__all__ = ["_equal_seeds", "_patience", "weights"]
pytestmark = [
    pytest.mark.usefixtures("offloading_in_effect", "weights"),
    pytest.mark.main_version,
]

every_layout = pytest.mark.parametrize(
    "layout", LAYOUTS + STATE_LAYOUTS, ids=lambda layout: layout.name
)


def contents(layout: PagedLayout, num_workers: int, num_heads: int = 1) -> list[int]:
    """By group: states are cut among ranks, and everything else has ``num_heads`` heads."""
    kinds = [tensor.reach.kind for tensor in by_group(layout)]
    return [num_workers if kind is GroupKind.STATE else num_heads for kind in kinds]


def by_group(layout: PagedLayout) -> list[Any]:
    pages = layout.make(2)
    first = {tensor.group: tensor for tensor in reversed(pages.tensors)}
    return [first[group] for group in sorted(first)]


def one_memory(
    layout: PagedLayout, folder: Path, num_workers: int = 2, num_heads: int = 1, **options: Any
) -> dict[str, Any]:
    """The arguments of an engine whose workers share host memory, as much as one worker has."""
    gib = layout.host_bytes[-1] / (1 << 30)
    return {
        "offloading": sharing(layout, folder, **{"host_memory_gib": gib, **options}),
        "num_workers": num_workers,
        "num_contents": contents(layout, num_workers, num_heads),
    }


def store_with(engine: dict[str, Any], layout: PagedLayout, *prompts: Sequence[int]) -> None:
    """Let an engine compute prompts, put their KV, and end."""
    with engine_of(layout, **engine) as made:
        for number, prompt in enumerate(prompts):
            serve(made, plan_of(f"stored-{number}", prompt))
        assert not any(made.side.counters.shared_failures.values())


def hits_all(engine: SimulatedEngine, name: str, prompt: Sequence[int]) -> bool:
    return hit_tokens(engine, plan_of(name, prompt)) == floor(engine, len(prompt) - 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """The bytes of the gets and puts of each object."""
    found: dict[str, list[int]] = {}
    for name in ("get_into", "put"):
        call = getattr(FilesTier, name)

        def counted(
            tier: FilesTier, what: SharedObject, *more: Any, call: Any = call, name: str = name
        ) -> Any:
            found.setdefault(f"{name} {what.name}", []).append(what.num_bytes)
            return call(tier, what, *more)

        monkeypatch.setattr(FilesTier, name, counted)
    return found


def got_bytes(calls: dict[str, list[int]]) -> list[int]:
    return [sum(each) for name, each in calls.items() if name.startswith("get_into")]


CASES = [
    pytest.param(2, 1, id="1 copy for 2 ranks"),
    pytest.param(4, 2, id="2 copies for 4 ranks"),
]


@pytest.mark.parametrize(("num_workers", "num_heads"), CASES)
@every_layout
def test_an_object_is_put_and_got_once_for_all_ranks(
    layout: PagedLayout,
    num_workers: int,
    num_heads: int,
    tmp_path: Path,
    calls: dict[str, list[int]],
) -> None:
    prompt = prompt_of(layout, 1)
    engine = one_memory(layout, tmp_path, num_workers, num_heads)
    store_with(engine, layout, prompt)
    assert {path.parts[-4] for path in objects(tmp_path)} == {"r0"}
    assert {len(each) for each in calls.values()} == {1}
    calls.clear()
    with engine_of(layout, **engine) as made:
        assert made.workers[0].side.describe().sharing is not None
        # The first request hits, although this engine has compared nothing yet.
        assert hits_all(made, "a", prompt)
        counters = made.side.counters
        assert counters.transfer_bytes["get"] == sum(got_bytes(calls)) > 0
        # Patience is for the bytes of one memory, whoever gets them.
        assert made.side.secondary._gets._busy_bytes == sum(got_bytes(calls))
        assert not any(counters.shared_failures.values())
        assert hits_all(made, "b", prompt)
        assert sum(counters.shared_requests.values()) == 1
    assert {len(each) for name, each in calls.items() if name.startswith("get_into")} == {1}


def moved_bytes(folder: Path, **engine: Any) -> dict[str, float]:
    """The bytes that an engine puts, and those that another one gets."""
    prompt = prompt_of(FULL, 1)
    store_with(engine, FULL, prompt)
    put_bytes = sum(len(payload(path)) for path in objects(folder))
    with engine_of(FULL, **engine) as made:
        assert hits_all(made, "a", prompt)
        return {"put": put_bytes, "get": made.side.counters.transfer_bytes["get"]}


def test_more_ranks_move_no_more_bytes(tmp_path: Path) -> None:
    alone = moved_bytes(tmp_path / "1", offloading=sharing(FULL, tmp_path / "1"), num_workers=1)
    for num_workers in (2, 4):
        folder = tmp_path / str(num_workers)
        assert moved_bytes(folder, **one_memory(FULL, folder, num_workers)) == alone
    apart = moved_bytes(tmp_path / "own", offloading=sharing(FULL, tmp_path / "own"), num_workers=2)
    assert apart == {name: 2 * value for name, value in alone.items()}


def test_engines_with_other_memory_do_not_meet(tmp_path: Path) -> None:
    """An entry of memory that ranks share has other bytes than one of a rank's own."""
    prompt = prompt_of(FULL, 1)
    own = {"offloading": sharing(FULL, tmp_path), "num_workers": 2}
    engines = [own, one_memory(FULL, tmp_path), one_memory(FULL, tmp_path, num_heads=2)]
    engines[2]["num_contents"] = None
    engines[2]["num_workers"] = 4
    for engine in engines:
        with engine_of(FULL, **engine) as made:
            assert hit_tokens(made, plan_of("a", prompt)) == 0


@every_layout
def test_wrong_bytes_with_a_right_checksum_are_seen(layout: PagedLayout, tmp_path: Path) -> None:
    """The control: the tests here would notice wrong bytes."""
    prompt, engine = prompt_of(layout, 1), one_memory(layout, tmp_path)
    store_with(engine, layout, prompt)
    for path in objects(tmp_path):
        forge(tmp_path, path, bytes(len(payload(path))))
    with (
        pytest.raises((WrongBytesError, AssertionError)),
        engine_of(layout, **engine) as made,
    ):
        serve(made, plan_of("a", prompt))


# Faults of the rank that gets.


@pytest.mark.parametrize("fault", ["raises", "unreachable", "broken", "absent"])
@every_layout
def test_what_one_rank_could_not_get_is_lost_for_all(
    layout: PagedLayout, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The get has written half of the bytes before it fails."""
    monkeypatch.setattr(limits, "PAUSE_S", 0.0)
    prompt, engine = prompt_of(layout, 1), one_memory(layout, tmp_path)
    store_with(engine, layout, prompt)
    failed = []

    def get_half(tier: FilesTier, what: SharedObject, on_bytes: Any) -> Answer:
        failed.append(what.name)
        half = what.num_bytes // 2
        tier._memory[what.offset_bytes :][:half] = b"\x5a" * half
        on_bytes(half)
        if fault == "raises":
            raise RuntimeError("a backend that is wrong")
        return Answer(fault)

    with engine_of(layout, **engine) as made:
        with monkeypatch.context() as patched:
            patched.setattr(FilesTier, "get_into", get_half)
            assert hit_tokens(made, plan_of("a", prompt)) == 0
        reason = "get_unreachable" if fault == "raises" else f"get_{fault}"
        assert made.side.counters.shared_failures[reason] == len(failed) > 0
        assert made.side.counters.transfer_bytes["get"] == 0
        assert hits_all(made, "b", prompt)  # It was computed and stored.


def test_nothing_is_loaded_before_the_rank_that_gets_has_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank ends the job at once. The request waits for the slow one nevertheless."""
    monkeypatch.setattr(limits, "MAX_HANG_S", 60.0)
    prompt, engine = prompt_of(FULL, 1), one_memory(FULL, tmp_path)
    store_with(engine, FULL, prompt)
    gate, get_into = threading.Event(), FilesTier.get_into

    def slow(tier: FilesTier, what: SharedObject, on_bytes: Any) -> Answer:
        assert gate.wait(20)
        return get_into(tier, what, on_bytes)

    monkeypatch.setattr(FilesTier, "get_into", slow)
    with engine_of(FULL, **engine) as made:
        plan = plan_of("a", prompt)
        made.add_request(plan)
        secondary = made.side.secondary
        for _ in range(200):
            made.step()
        assert secondary._gets._under_way, "no get is under way"
        left = {each.workers_left for each in made.side._jobs._under_way.values()}
        assert left == {1}, "the rank that gets nothing has not ended its part"
        assert not made.side._loads.num_under_way
        assert not any(entry.row_map for entry in made.entries)
        gate.set()
        until(lambda: made.step() is not None and not made.has_work(), "the end")
        assert made.side.counters.hit_tokens == floor(made, len(prompt) - 1)
        check_nothing_is_left(made)


def test_a_get_that_hangs_on_one_rank_keeps_its_place_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is given up, and computed. What comes late harms nobody."""
    monkeypatch.setattr(limits, "MAX_STALL_S", 0.05)
    prompt, engine = prompt_of(FULL, 1), one_memory(FULL, tmp_path)
    store_with(engine, FULL, prompt)
    gate, begun = threading.Event(), []

    def late(tier: FilesTier, what: SharedObject, on_bytes: Any) -> Answer:
        begun.append(what)
        gate.wait(60)
        tier._memory[what.offset_bytes :][: what.num_bytes] = b"\x5a" * what.num_bytes
        return Answer.BROKEN

    with engine_of(FULL, **engine) as made:
        with monkeypatch.context() as patched:
            patched.setattr(FilesTier, "get_into", late)
            serve_while_it_hangs(made, plan_of("a", prompt))
        assert begun and made.side.counters.hit_tokens == 0
        assert made.side.counters.shared_requests["given_up"] == 1
        hanging = {each.offset_bytes for each in begun}
        others = prompt_of(FULL, 2), prompt_of(FULL, 3)
        for number, other in enumerate(others):
            serve_while_it_hangs(made, plan_of(f"other {number}", other))
        held = [each for each in made.entries if each.offset_bytes in hanging]
        assert len(held) == len(hanging) and not any(each.row_map for each in held)
        gate.set()
        ended = [until(lambda w=w: not w.shared.wait_for_end(0.01), "it") for w in made.workers]
        assert all(ended)
        for number, other in enumerate(others):
            assert hits_all(made, f"again {number}", other)


def serve_while_it_hangs(engine: SimulatedEngine, plan: Any) -> None:
    engine.add_request(plan)
    until(lambda: (engine.step(), not engine.scheduler.requests)[1], plan.request_id)


# Ranks whose bytes differ, although the configuration says that they are equal.


def differing(layout: PagedLayout, folder: Path) -> Any:
    return engine_of(layout, **one_memory(layout, folder))


def let_differ(engine: SimulatedEngine) -> None:
    """Each rank writes other bytes to all of its pages."""
    for rank, worker in enumerate(engine.workers):
        worker.contents = PageContents(worker.pages, rank)


@every_layout
def test_ranks_that_differ_put_and_get_the_bytes_of_each(
    layout: PagedLayout,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    see_log(caplog, monkeypatch)
    monkeypatch.setattr(limits, "PAUSE_S", 0.0)
    prompts = [prompt_of(layout, seed) for seed in range(3)]
    with differing(layout, tmp_path) as made:
        let_differ(made)
        serve(made, plan_of("shows it", prompts[0]))
        assert "keeps all of its bytes from now on" in caplog.text
        assert "Shared tier file://" in caplog.text and "shared with such engines" in caplog.text
        serve(made, plan_of("apart", prompts[1]))
        assert hits_all(made, "again", prompts[1])
        namespaces = {path.parts[-5] for path in objects(tmp_path)}
        assert namespaces == {made.side.secondary._shared.namespace}
        assert namespaces != {names.namespace_of(made.side.secondary._identity)}
    with differing(layout, tmp_path) as made:
        let_differ(made)
        assert hit_tokens(made, plan_of("first", prompts[1])) == 0, "it shared nothing yet"
        assert made.side.counters.transfer_bytes["get"] == 0
        serve(made, plan_of("shows it, too", prompts[2]))
        assert made.side._keeps_apart
    with differing(layout, tmp_path) as made:
        let_differ(made)
        serve(made, plan_of("shows it", prompts[2]))
        assert hits_all(made, "got", prompts[1])
        assert made.side.counters.transfer_bytes["get"] > 0
    with differing(layout, tmp_path) as made:  # This one's ranks are equal.
        assert hit_tokens(made, plan_of("equal", prompts[1])) == 0


def test_no_request_waits_for_a_get_from_before_the_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entry will not be found. Its place is held until it ends."""
    monkeypatch.setattr(limits, "MAX_HANG_S", 60.0)
    prompt, other = prompt_of(FULL, 1), prompt_of(FULL, 2)
    store_with(one_memory(FULL, tmp_path), FULL, prompt)
    gate, get_into = threading.Event(), FilesTier.get_into

    def slow(tier: FilesTier, what: SharedObject, on_bytes: Any) -> Answer:
        assert gate.wait(60)
        return get_into(tier, what, on_bytes)

    monkeypatch.setattr(FilesTier, "get_into", slow)
    with differing(FULL, tmp_path) as made:
        let_differ(made)
        made.add_request(plan_of("waits", prompt))
        until(lambda: (made.step(), made.side.secondary._gets._awaited)[1], "the get")
        serve_while_it_hangs(made, plan_of("shows it", other))
        assert made.side._keeps_apart and made.side.counters.hit_tokens == 0
        assert made.side.secondary._gets._under_way
        gate.set()
        until(lambda: (made.step(), not made.has_work())[1], "the end")
        check_nothing_is_left(made)
        assert hits_all(made, "again", prompt) and hits_all(made, "again, too", other)


def test_an_answer_from_before_the_difference_begins_no_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: dict[str, list[int]]
) -> None:
    """Objects of the other name space have other sizes."""
    monkeypatch.setattr(limits, "MAX_QUEUED_S", 60.0)
    prompt, other = prompt_of(FULL, 1), prompt_of(FULL, 2)
    store_with(one_memory(FULL, tmp_path), FULL, prompt)
    gate, exist = threading.Event(), FilesTier.exist

    def slow(tier: FilesTier, asked: Sequence[str]) -> list[str]:
        found = exist(tier, asked)
        assert gate.wait(60)
        return found

    with differing(FULL, tmp_path) as made:
        let_differ(made)
        with monkeypatch.context() as patched:
            patched.setattr(FilesTier, "exist", slow)
            made.add_request(plan_of("asks", prompt))
            # The tier is not asked for a request with an adapter, which need not wait for it.
            made.add_request(replace(plan_of("shows it", other), adapter="adapter-0"))
            until(lambda: (made.step(), made.side._keeps_apart)[1], "the difference")
            assert made.scheduler.requests, "the request must still wait for its answer"
            calls.clear()
            gate.set()
            until(lambda: (made.step(), not made.has_work())[1], "the end")
        assert not any(name.startswith("get_into") for name in calls)
        assert not any(made.side.counters.shared_failures.values())
        check_nothing_is_left(made)


def test_ranks_that_differ_on_several_hosts_do_not_use_the_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_log(caplog, monkeypatch)
    prompts = [prompt_of(FULL, seed) for seed in range(2)]
    with engine_of(FULL, hosts=("a", "a", "b", "b"), **one_memory(FULL, tmp_path, 4)) as made:
        let_differ(made)
        serve(made, plan_of("shows it", prompts[0]))
        assert "on several hosts" in caplog.text
        serve(made, plan_of("apart", prompts[1]))
        assert hits_all(made, "again", prompts[1])
        assert objects(tmp_path) == []


def test_each_host_gets_an_object_once(tmp_path: Path, calls: dict[str, list[int]]) -> None:
    prompt = prompt_of(FULL, 1)
    engine = {"hosts": ("a", "a", "b", "b"), **one_memory(FULL, tmp_path, 4)}
    store_with(engine, FULL, prompt)
    assert {path.parts[-4] for path in objects(tmp_path)} == {"r0", "r2"}
    with engine_of(FULL, **engine) as made:
        assert hits_all(made, "a", prompt)
        assert made.side.counters.transfer_bytes["get"] == sum(got_bytes(calls)) > 0
    assert {len(each) for each in calls.values()} == {2}


def test_engines_with_other_ranks_on_each_host_do_not_meet(tmp_path: Path) -> None:
    """Both have 2 of 4 heads on each host, but not the same ones."""
    prompt, engine = prompt_of(FULL, 1), one_memory(FULL, tmp_path, 8, num_heads=4)
    neighbours, others = "aaaabbbb", "aabbaabb"
    for hosts, is_found in ((neighbours, False), (others, False), (neighbours, True)):
        with engine_of(FULL, hosts=hosts, **engine) as made:
            assert hits_all(made, "a", prompt) == is_found
            assert not any(made.side.counters.shared_failures.values())
    with engine_of(FULL, hosts=others, **engine) as made:
        assert hits_all(made, "a", prompt)


# A soak: two engines, one after the other, on one folder. Faults occur all the time.


@pytest.fixture(scope="module")
def soaked() -> Counter[str]:
    """The events of all runs of the soak."""
    return Counter()


@pytest.mark.parametrize("num_heads", [1, 2])
@every_layout
def test_random_requests(
    layout: PagedLayout,
    num_heads: int,
    soaked: Counter[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bytes and outputs are right, and nothing is left, whatever happens to the files."""
    monkeypatch.setattr(loads, "MIN_RUN_TOKENS", 0)
    monkeypatch.setattr(limits, "PAUSE_S", 0.005)
    faults = Faults(monkeypatch)
    num_workers = 2 * num_heads
    for seed in range(sampled(3)):
        folder = tmp_path / str(seed)
        name = f"one memory/{num_heads}/{seed}"
        workload = random_offload(layout, name, 15, EngineKind.TWO_WORKERS)
        shared = {"shared_tier": f"file://{folder}", "shared_tier_bytes": CAPACITY_BYTES}
        options = replace(
            workload.options,
            offloading={**(workload.options.offloading or {}), **shared},
            num_workers=num_workers,
        )
        for number in range(2):
            workload = workload._replace(
                name=f"{number}", options=options, reset_share=workload.reset_share if seed else 0
            )
            counts = run_offloading(workload, contents(layout, num_workers, num_heads)).counts
            soaked["requests"] += counts["requests"]
            soaked["hit requests"] += counts["hit requests"]
        taken = sum(taken for _, taken, _ in files.files_below(str(folder / "kvext4")))
        assert taken <= CAPACITY_BYTES
    soaked.update(faults.counts)


def test_the_soak_has_met_everything(soaked: Counter[str]) -> None:
    if soaked["requests"] < 30 * len(LAYOUTS + STATE_LAYOUTS) * 2:
        pytest.skip("only a part of the soak has run")
    named = ("hit requests", "whole", "absent", "broken", "unreachable", "puts", "put unreachable")
    assert {name for name in (*named, "flipped", "cut", "vanished") if not soaked[name]} == set()
