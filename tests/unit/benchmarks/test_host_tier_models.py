# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The models of host tiers that KvextConnector is compared with, against brute force."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from host_tier import standings
from host_tier.policies import (
    Clairvoyant,
    Computed,
    Future,
    LruBlocks,
    LruChunks,
    Policy,
    unit_names,
)
from host_tier.rounds import ENDLESS, Records, Round, play
from host_tier.standings import Place, Standing
from host_tier.workloads import WRITERS, write_workload
from retention.losses import GroupNeeds
from retention.production import RECORDINGS, read_trace
from retention.traces import Trace, TracedRequest

from vllm_ascend_kvext.replay.trace import DEFAULT_BLOCK_TOKENS

UNIT = 4
BLOCK_BYTES = 10


class Prompts:
    """Random prompts that share prefixes, as paths in a tree of units."""

    def __init__(self, seed: int, num_prompts: int = 12) -> None:
        rng = random.Random(seed)
        paths: list[tuple[int, ...]] = []
        for _ in range(num_prompts):
            start = rng.choice(paths) if paths and rng.random() < 0.8 else ()
            start = start[: rng.randint(0, len(start))]
            paths.append(start + tuple(rng.randint(0, 1) for _ in range(rng.randint(1, 4))))
        self.paths = [path[:7] for path in paths]

    def hashes(self, number: int) -> list[bytes]:
        path = self.paths[number]
        return [bytes(path[: end + 1]) for end in range(len(path))]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.paths)))


def served(policy: Policy, prompts: Prompts, answer_units: int = 0) -> list[int]:
    """The tokens that each prompt hits, where one request runs after the other."""
    hits = []
    for number in prompts:
        hashes = prompts.hashes(number)
        num_tokens = len(hashes) * UNIT
        hits.append(policy.find(number, hashes, num_tokens))
        policy.admit(number)
        prompt_tokens = num_tokens - answer_units * UNIT
        policy.store(Computed(number, hashes, 0, num_tokens, prompt_tokens, hits[-1]))
    return hits


def lru_blocks(num_blocks: int, needs: Sequence[GroupNeeds] = (GroupNeeds(UNIT, None),)) -> Policy:
    sizes = [BLOCK_BYTES] * len(needs)
    states = [False] * len(needs)
    return LruBlocks(needs, sizes, states, UNIT, UNIT, num_blocks * BLOCK_BYTES)


def clairvoyant(num_blocks: int, prompts: Prompts, tail_bytes: int = 0) -> Clairvoyant:
    future = Future(list(prompts), {number: prompts.hashes(number) for number in prompts})
    return Clairvoyant(future, UNIT, UNIT, BLOCK_BYTES, tail_bytes, num_blocks * BLOCK_BYTES)


def by_brute_force(prompts: Prompts, num_blocks: int) -> list[int]:
    """LRU by block, with a list whose front is the oldest."""
    ages: list[bytes] = []
    hits = []
    for number in prompts:
        names = prompts.hashes(number)
        num_hits = next((i for i, name in enumerate(names) if name not in ages), len(names))
        for name in reversed(names[:num_hits]):
            ages.remove(name)
            ages.append(name)
        for name in reversed(names):
            if name in ages:
                ages.remove(name)
            ages.append(name)
            ages = ages[-num_blocks:]
        hits.append(num_hits * UNIT)
    return hits


def best_possible(prompts: Prompts, num_blocks: int) -> int:
    """The most units that any choice of kept units can hit: every choice is tried."""
    reachable: dict[frozenset[bytes], int] = {frozenset(): 0}
    for number in prompts:
        names = prompts.hashes(number)
        later: dict[frozenset[bytes], int] = {}
        for kept, so_far in reachable.items():
            hit = next((i for i, name in enumerate(names) if name not in kept), len(names))
            candidates = sorted(kept | set(names))
            for size in range(min(num_blocks, len(candidates)) + 1):
                for chosen in itertools.combinations(candidates, size):
                    key = frozenset(chosen)
                    later[key] = max(later.get(key, 0), so_far + hit)
        reachable = later
    return max(reachable.values())


@pytest.mark.parametrize("seed", range(40))
def test_lru_keeps_what_a_list_in_order_of_use_keeps(seed: int) -> None:
    prompts = Prompts(seed)
    for num_blocks in (1, 3, 6, 100):
        policy = lru_blocks(num_blocks)
        assert served(policy, prompts) == by_brute_force(prompts, num_blocks)
        assert policy.held_bytes <= num_blocks * BLOCK_BYTES


@pytest.mark.parametrize("seed", range(40))
def test_chunks_of_one_unit_are_blocks(seed: int) -> None:
    prompts = Prompts(seed)
    for num_blocks in (1, 3, 6):
        chunks = LruChunks(UNIT, BLOCK_BYTES, UNIT, num_blocks * BLOCK_BYTES)
        assert served(chunks, prompts) == by_brute_force(prompts, num_blocks)


@pytest.mark.parametrize(
    "policy", [lru_blocks(3), LruChunks(UNIT, BLOCK_BYTES, UNIT, 3 * BLOCK_BYTES)]
)
def test_a_lookup_is_a_use_and_the_end_of_a_prompt_gives_way_first(policy: Policy) -> None:
    prompts = Prompts(0)
    prompts.paths = [(0, 0), (1,), (2,), (3,)]

    def store(number: int) -> None:
        hashes = prompts.hashes(number)
        num_tokens = len(hashes) * UNIT
        policy.store(Computed(number, hashes, 0, num_tokens, num_tokens, 0))

    def found_tokens(number: int) -> int:
        return policy.find(number, prompts.hashes(number), 2 * UNIT)

    store(0)
    store(1)
    assert found_tokens(0) == 2 * UNIT
    store(2)
    assert found_tokens(1) == 0
    store(3)
    assert found_tokens(0) == UNIT


def test_chunks_are_whole_and_of_prompts_only() -> None:
    prompts = Prompts(0)
    prompts.paths = [(0, 0, 0, 0, 1, 1), (0, 0, 0, 0, 1, 1)]
    of_two = LruChunks(2 * UNIT, 2 * BLOCK_BYTES, UNIT, 1000)
    assert served(of_two, prompts) == [0, 6 * UNIT]
    of_four = LruChunks(4 * UNIT, 4 * BLOCK_BYTES, UNIT, 1000)
    assert served(of_four, prompts) == [0, 4 * UNIT]
    without_answer = LruChunks(2 * UNIT, 2 * BLOCK_BYTES, UNIT, 1000)
    assert served(without_answer, prompts, answer_units=3) == [0, 2 * UNIT]
    assert without_answer.held_bytes == 2 * BLOCK_BYTES


@pytest.mark.parametrize("seed", range(30))
def test_nothing_hits_more_than_the_tier_that_knows_the_future(seed: int) -> None:
    prompts = Prompts(seed)
    for num_blocks in (1, 2, 4, 7):
        best = clairvoyant(num_blocks, prompts)
        hits = sum(served(best, prompts))
        assert hits >= sum(served(lru_blocks(num_blocks), prompts))
        assert hits >= sum(by_brute_force(prompts, num_blocks))


@pytest.mark.parametrize("seed", range(6))
def test_the_tier_that_knows_the_future_is_the_best_possible(seed: int) -> None:
    prompts = Prompts(seed, num_prompts=6)
    prompts.paths = [path[:4] for path in prompts.paths]
    for num_blocks in (1, 2, 3):
        hits = sum(served(clairvoyant(num_blocks, prompts), prompts))
        assert hits == best_possible(prompts, num_blocks) * UNIT


@pytest.mark.parametrize("seed", range(20))
def test_the_tier_that_knows_the_future_holds_no_more_than_its_bytes(seed: int) -> None:
    prompts = Prompts(seed, num_prompts=30)
    policy = clairvoyant(5, prompts, tail_bytes=15)
    for number in prompts:
        hashes = prompts.hashes(number)
        policy.find(number, hashes, len(hashes) * UNIT)
        policy.admit(number)
        num_tokens = len(hashes) * UNIT
        policy.store(Computed(number, hashes, 0, num_tokens, num_tokens, 0))
        assert 0 <= policy.held_bytes <= 50
    assert policy.held_bytes == 0  # Nothing is asked for any more.


def test_a_unit_may_have_several_hashes() -> None:
    prompts = Prompts(0)
    prompts.paths = [(0, 0, 0, 0, 1), (0, 0, 0, 0, 1)]
    names = {n: unit_names(prompts.hashes(n), 2, 5 * UNIT, 2 * UNIT) for n in prompts}
    assert names[0] == [bytes([0, 0]), bytes([0, 0, 0, 0])]
    future = Future([0, 1], names)
    policy = Clairvoyant(future, 2 * UNIT, UNIT, BLOCK_BYTES, 0, 10 * BLOCK_BYTES)
    assert served(policy, prompts) == [0, 4 * UNIT]


def test_a_window_is_hit_where_all_of_its_tail_is_kept() -> None:
    needs = (GroupNeeds(UNIT, None), GroupNeeds(UNIT, 2 * UNIT))
    prompts = Prompts(0)
    prompts.paths = [(0, 0, 0, 0), (0, 0, 0, 0, 1), (0, 0, 0, 0, 1)]
    assert served(lru_blocks(100, needs), prompts) == [0, 4 * UNIT, 5 * UNIT]
    # Of the second request, the window has the loaded tail and what is computed, and no more.
    policy = lru_blocks(100, needs)
    hashes = prompts.hashes(1)
    policy.store(Computed(0, hashes, 0, 5 * UNIT, 5 * UNIT, hit_tokens=4 * UNIT))
    assert policy.held_bytes == (5 + 3) * BLOCK_BYTES


def test_a_state_is_kept_where_a_step_ends() -> None:
    needs = (GroupNeeds(UNIT, None), GroupNeeds(UNIT, 1))
    policy = LruBlocks(needs, [1, 1], [False, True], UNIT, UNIT, 1000)
    hashes = [bytes([0] * end) for end in range(1, 9)]
    policy.store(Computed(0, hashes, 0, 5 * UNIT, 8 * UNIT, 0))
    policy.store(Computed(0, hashes, 5 * UNIT, 8 * UNIT, 8 * UNIT, 0))
    assert policy.find(1, hashes, 8 * UNIT) == 8 * UNIT
    assert policy.find(1, hashes, 7 * UNIT) == 5 * UNIT
    assert policy.held_bytes == 8 + 2


PLACE = Place("full", "chat", 0.25)


def standing(**points: Sequence[float]) -> Standing:
    named = {name.replace("answers", "vllm+answers"): rates for name, rates in points.items()}
    return Standing(PLACE, [80.0], named)


def test_the_lead_is_over_the_best_of_the_others_with_the_same_seed() -> None:
    found = standing(
        kvext=[50.0, 60.0], lru=[40.0, 40.0], lmcache=[70.0, 30.0], vllm=[49.0, 55.0],
        answers=[1.0, 2.0], clairvoyant=[70.0, 90.0],
    )  # fmt: skip
    assert found.best_peer == "vllm"
    assert found.leads == [1.0, 5.0]
    assert standings.standard_error(found.leads) == pytest.approx(2.0)
    assert found.way == pytest.approx((55 - 40) / (80 - 40))
    assert "+3.0" in standings.line(found) and "0.38" in standings.line(found)
    assert standings.standard_error([1.0]) is None


def test_the_bound_is_no_peer_and_nothing_leads_without_ours() -> None:
    assert standing(lru=[40.0], clairvoyant=[70.0]).best_peer is None
    assert standing(kvext=[50.0], clairvoyant=[70.0]).leads == []
    assert standing(kvext=[50.0], lru=[69.5], clairvoyant=[70.0]).way is None


def test_verdicts_count_lost_and_won_places() -> None:
    won = standing(kvext=[50.0], lru=[45.0])
    even = standing(kvext=[50.0], lru=[50.4])
    lost = standing(kvext=[50.0], lru=[50.6])
    first, second = list(standings.verdicts([won, even]))
    assert first.startswith("met") and second.startswith("met") and "1 of 2" in second
    first, second = list(standings.verdicts([won, even, lost]))
    assert first.startswith("NOT MET") and "full chat 25% (-0.6 to lru)" in first
    assert second.startswith("NOT MET") and "1 of 3" in second


def test_cpu_times_are_compared_where_both_are_known() -> None:
    both = Standing(PLACE, [80.0], {"kvext": [1.0], "lru": [1.0]}, {"kvext": 3.0, "vllm": 2.0})
    one = Standing(PLACE, [80.0], {"kvext": [1.0], "lru": [1.0]}, {"kvext": 9.0})
    lines = [line for line in standings.verdicts([both, one]) if "CPU" in line]
    assert lines == ["CPU time of the scheduler: 1.50 times that of vllm, sums of 1 cells"]


def test_what_is_in_a_file_is_not_run_again(tmp_path: Path) -> None:
    records = Records(tmp_path)
    rounds = [Round(PLACE, seed) for seed in range(2)]
    endless = {"hit_tokens": 8, "prompt_tokens": 10, "shared_tokens": 9, "scheduler_s": 0.5}
    for each in rounds:
        records.write(each.file_name(ENDLESS), endless)
        records.write(each.file_name("lru"), endless | {"hit_tokens": 4})
    records.write(rounds[0].file_name("kvext"), endless | {"hit_tokens": 6})
    # An import of vLLM would fail here.
    assert play(rounds[1], [ENDLESS, "lru"], tmp_path, {}) == []
    found = records.standing(PLACE, rounds, ["lru", "kvext", ENDLESS])
    assert found.ceiling == [90, 90] and found.points["lru"] == [40, 40]
    assert "kvext" not in found.points  # One seed is missing.
    assert found.scheduler_s == {ENDLESS: 1.0, "lru": 1.0}
    assert json.loads((tmp_path / "full.chat.1.0.25.0.lru.json").read_text())["hit_tokens"] == 4
    assert rounds[0].file_name(ENDLESS) == Round(Place("full", "chat", 0.1), 0).file_name(ENDLESS)


def shape(trace: Trace) -> list[tuple[object, ...]]:
    return [_facts(request) for request in trace.requests]


def _facts(request: TracedRequest) -> tuple[object, ...]:
    hashes = request.answered.block_hashes(128)
    return len(request.prompt), hashes[-1:], request.delay_steps, request.after


@pytest.mark.parametrize("name", WRITERS)
def test_workloads_are_the_same_every_time_and_differ_by_seed(name: str) -> None:
    first = shape(write_workload(name, 0.1))
    assert first == shape(write_workload(name, 0.1)) != shape(write_workload(name, 0.1, seed=1))
    assert len(first) > 5


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_recorded_trace_shares_what_its_ids_share(name: str) -> None:
    trace = read_trace(name, 0.1)
    assert len(trace.requests) == round(RECORDINGS[name].num_requests * 0.1)
    units: set[bytes] = set()
    num_shared = 0
    for request in trace.requests:
        found = request.prompt.block_hashes(DEFAULT_BLOCK_TOKENS)
        num_shared += sum(unit in units for unit in found)
        units.update(found)
    assert num_shared > 0
    assert trace.requests[0].delay_steps == 0
    later = read_trace(name, 0.1, part=1)
    assert later.requests[0].delay_steps == 0 and shape(later) != shape(trace)


def test_ids_of_a_recorded_trace_are_prefixes(tmp_path: Path, monkeypatch) -> None:
    import gzip

    from retention import production

    lines = [
        {"timestamp": 500, "input_length": 1000, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 750, "input_length": 1030, "output_length": 0, "hash_ids": [1, 2, 3]},
        {"timestamp": 900, "input_length": 512, "output_length": 9000, "hash_ids": [2]},
    ]
    with gzip.open(tmp_path / "trace.gz", "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    monkeypatch.setattr(production, "FOLDER", tmp_path)
    monkeypatch.setitem(production.RECORDINGS, "mine", production.Recording("trace.gz", 3))
    first, second, third = read_trace("mine").requests
    assert [len(r.prompt) for r in (first, second, third)] == [1000, 1030, 512]
    assert [r.num_output_tokens for r in (first, second, third)] == [3, 1, 600]
    assert [r.delay_steps for r in (first, second, third)] == [0, 2, 4]
    assert first.prompt.tokens() == second.prompt.cut(1000).tokens()
    # The same id behind another prefix is another text.
    assert third.prompt.tokens() != second.prompt.tokens_from(512).tolist()[:512]
    assert third.prompt.tokens() != first.prompt.cut(512).tokens()
