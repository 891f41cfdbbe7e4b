# SPDX-License-Identifier: Apache-2.0
"""The pure parts of the offload benchmark: which measurements count, and what is made of them."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from offload.contenders import ALONE, LMCACHE_DRIVEN, OURS, contenders  # noqa: E402
from offload.figures import (  # noqa: E402
    chosen_steps,
    kind_of,
    median_ratio,
    overlaps,
    percentile,
    union_s,
    why_not,
)
from offload.models import MODELS  # noqa: E402
from offload.report import Measured, lines, targets  # noqa: E402
from offload.server import failures, free_ports, tokens_moved  # noqa: E402
from offload.taps import NoTap  # noqa: E402
from offload.workload import OFFLOADED_TOKENS, Moved, Prompt, Step, Visit  # noqa: E402

GOOD = Prompt(
    cold_s=2.0,
    warm_s=0.2,
    cold_hit_tokens=0,
    warm_hit_tokens=OFFLOADED_TOKENS,
    store=Moved(seconds=0.1, num_tokens=OFFLOADED_TOKENS, transfers=2),
    load=Moved(seconds=0.2, transfers=1),
)


def prompt(store_s: float, load_s: float) -> Prompt:
    store, load = replace(GOOD.store, seconds=store_s), replace(GOOD.load, seconds=load_s)
    return replace(GOOD, store=store, load=load)


class TestSeconds:
    @pytest.mark.parametrize(
        ("intervals", "expected_s"),
        [
            ([], 0),
            ([(1, 3)], 2),
            ([(1, 3), (5, 6)], 3),
            ([(1, 4), (2, 3)], 3),
            ([(2, 5), (1, 3)], 4),
            ([(1, 2), (2, 3)], 2),
        ],
    )
    def test_time_in_which_several_transfers_run_counts_once(self, intervals, expected_s):
        assert union_s(intervals) == expected_s

    def test_an_interval_that_only_touches_does_not_overlap(self):
        assert overlaps([(1, 3)], 2, 9)
        assert overlaps([(1, 3)], 0, 1.5)
        assert not overlaps([(1, 3)], 3, 9)
        assert not overlaps([], 0, 9)

    def test_percentile_is_a_value_that_was_measured(self):
        values = [float(number) for number in range(1, 101)]
        assert percentile(values, 0.5) == 50
        assert percentile(values, 0.99) == 99
        assert percentile(values, 1) == 100
        assert percentile([7.0], 0.01) == 7

    @pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], 0), ([1.0], 1.1)])
    def test_percentile_of_nothing_is_refused(self, values, share):
        with pytest.raises(ValueError, match="percentile"):
            percentile(values, share)

    def test_a_ratio_is_of_the_same_round(self):
        assert median_ratio([1, 20, 3], [1, 10, 2]) == 1.5
        with pytest.raises(ValueError):
            median_ratio([1, 2], [1])


class TestWhatCounts:
    def test_a_cold_and_a_warm_request(self):
        assert why_not(GOOD) is None

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"cold_hit_tokens": 128}, "cold request hit 128"),
            ({"warm_hit_tokens": 3072}, "warm request hit 3072"),
            ({"store": Moved(seconds=0.001, transfers=1, failed=1)}, "1 of 1 stores failed"),
            ({"load": Moved()}, "no load was seen"),
            ({"store": Moved(num_tokens=3840, transfers=1)}, "store was of 3840 tokens"),
        ],
    )
    def test_what_was_not_moved_does_not_count(self, change, reason):
        assert reason in why_not(replace(GOOD, **change))

    @pytest.mark.parametrize(
        ("visit", "kind"),
        [
            (Visit(OFFLOADED_TOKENS, loads=1), "loaded"),
            (Visit(OFFLOADED_TOKENS), "local"),
            (Visit(0, stores=3), "new"),
            (Visit(896), None),
            (Visit(0, loads=1), None),
        ],
    )
    def test_a_visit_is_what_it_was(self, visit, kind):
        assert kind_of(visit) == kind

    def test_steps_by_what_ran_beside_them(self):
        prefill, busy, quiet = steps = [
            Step(1.0, 0.5, True, True),
            Step(2.0, 0.5, False, True),
            Step(3.0, 0.5, False, False),
        ]
        visits = [Visit(0, steps[:1]), Visit(0, steps[1:])]
        assert chosen_steps(visits) == [prefill, busy, quiet]
        assert chosen_steps(visits, has_prefill=False, has_transfer=True) == [busy]
        assert chosen_steps(visits, has_prefill=False) == [busy, quiet]

    def test_facts_survive_json(self):
        visit = Visit(5, [Step(1.0, 0.5, True, False)], 1, 2)
        assert Prompt.from_dict(asdict(GOOD)) == GOOD
        assert Visit.from_dict(asdict(visit)) == visit


class TestServerLog:
    def test_transfers_that_did_not_happen_are_found(self):
        bad = (
            "[t] LMCache ERROR: Failed to batched allocate 16 x 18874368, short by 4 blocks",
            "[t] LMCache WARNING: STORE block ID underflow for request_id=1: skipping the store.",
            "[t] LMCache ERROR: Some keys not found during retrieve!",
            "No handler registered for operation register_kv_cache_engine_driven_context",
        )
        good = "[t] LMCache INFO: Stored 4096 tokens in 0.085 seconds"
        assert failures("\n".join([good, *bad, good])) == list(bad)

    def test_tokens_are_added_up(self):
        log = "Stored 768 tokens in 0.1 s\nRetrieved 4096 tokens in 0.2\nStored 4096 tokens in 0.3"
        assert tokens_moved(log) == {"Stored": 4864, "Retrieved": 4096}


class TestReport:
    def measured(self, num_busy_steps: int = 50) -> Measured:
        quiet = [Step(0.020, 0.01, False, False)] * 50
        busy = [Step(0.021, 0.01, False, True)] * num_busy_steps
        visits = [Visit(OFFLOADED_TOKENS, [*busy, *quiet], loads=1)]
        return Measured(
            MODELS["qwen3"],
            prompts={
                OURS: [prompt(0.05, 0.1), prompt(0.05, 0.1), prompt(0.05, 0.1)],
                LMCACHE_DRIVEN: [prompt(0.2, 0.2), prompt(0.2, 0.2), prompt(9.0, 0.2)],
                ALONE: [replace(GOOD, store=Moved(), load=Moved())] * 3,
            },
            visits={(OURS, "loaded"): visits},
            limit_s={1: [0.04, 0.04, 0.05]},
        )

    def test_targets_say_whether_they_are_met(self):
        store, load, decode = targets(self.measured())
        assert "4.0 x the throughput" in store and store.endswith(": met")
        assert "2.0 x the throughput" in load and load.endswith(": NOT MET")
        assert "p99 1.05 x" in decode and "p99 1.00 x, p50 1.00 x by CPU time" in decode
        assert decode.endswith("(p99 at most 1.1 x): met")

    def test_a_percentile_of_few_steps_is_not_judged(self):
        *_, decode = targets(self.measured(num_busy_steps=49))
        assert decode.endswith(": too few to judge")

    def test_tables_can_be_printed(self):
        text = "\n".join(lines(self.measured()))
        assert "268 MB" in text
        assert "streaming copy, 1 thread " in text

    def test_pairs_with_a_prompt_that_does_not_count_are_left_out(self):
        measured = self.measured()
        measured.prompts[LMCACHE_DRIVEN][0] = replace(GOOD, warm_hit_tokens=0)
        assert "median of 2 pairs" in next(targets(measured))
        assert "1 left out: the warm request hit 0" in "\n".join(lines(measured))


def test_models_have_the_kv_that_is_claimed():
    assert MODELS["qwen3"].kv_bytes(4096) == 268_435_456
    assert MODELS["gemma3"].kv_bytes(4096) == 301_989_888


def test_contenders_differ_in_name_and_port():
    found = contenders(2.0, (5000, 5001), "segment")
    assert len({contender.name for contender in found}) == len(found)
    ports = [c.server_options[1] for c in found if c.server_options]
    assert ports == ["5000", "5001"]
    assert [c.name for c in found if c.environ.get("VLLM_ASCEND_KVEXT_MODE") != "off"] == [OURS]


def test_free_ports_differ():
    assert len(set(free_ports(3))) == 3


def test_without_a_connector_nothing_moves():
    assert NoTap().take() == {"store": Moved(), "load": Moved()}
