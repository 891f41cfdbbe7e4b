# SPDX-License-Identifier: Apache-2.0
"""The retention benchmark's plan, columns and verdicts."""

from __future__ import annotations

import pytest
from retention.report import line, markdown, rows, summary
from retention.suite import Cell, Finished, batches
from retention.variants import Variant


def finished(pool: str, variant: str, points: float | None, **result: object) -> Finished:
    if points is not None:
        result = {
            "hit_rate": points / 100,
            "prompt_tokens": 1000,
            "computed_tokens": 500,
            "losses": {"granularity": 1, "look_ahead": 0, "never_kept": 20, "evicted": 30},
            "cached_blocks": [10.0, 20.0],
            "num_blocks": 100,
            "num_evictions": 7,
            "num_preemptions": 1,
            "readmission_tokens": 200,
            "readmission_hit_tokens": 100,
            "scheduler_s": 0.5,
            "cell_s": 1.0,
        }
    return Finished(Cell("layout", "trace", pool, variant), result, "key")


CELLS = [
    finished("inf", "dense", 90.0),
    finished("0.4", "dense", 60.0),
    finished("0.4", "stock:0", 70.0),
    finished("0.4", "adaptive", 80.0),
    finished("0.2", "dense", 50.0),
    finished("0.2", "stock:0", 40.0),
    finished("0.2", "adaptive", 49.6),
    finished("0.1", "dense", 30.0),
    finished("0.1", "stock:0", None, refused="no such interval\nmore"),
    finished("0.1", "adaptive", 20.0),
]


class TestVerdict:
    def test_is_against_the_best_of_the_others(self):
        _, first, second, third = rows(CELLS)
        assert first.best_other() == (70.0, "stock:0")
        assert first.lead("adaptive") == pytest.approx(10)
        assert second.lead("adaptive") == pytest.approx(-0.4)
        assert third.best_other() == (30.0, "dense")

    def test_counts_and_names_what_is_behind(self):
        text = summary(rows(CELLS), "adaptive")
        assert "3 cells: 1 better, 1 within 0.5 points, 1 worse" in text
        assert "layout, trace, 10%: 20.0, dense has 30.0 (-10.0)" in text

    def test_ours_are_no_competition(self):
        more = [*CELLS, finished("0.4", "adaptive:4096", 99.0)]
        assert rows(more)[1].best_other() == (70.0, "stock:0")


class TestTable:
    def test_has_the_adaptive_columns_last(self):
        text = markdown([finished("inf", "adaptive", 90.0), *CELLS], {"vLLM": "0"})
        assert "| trace | pool | dense | stock:0 | adaptive | best other |" in text

    def test_has_a_row_per_pool(self):
        text = markdown(CELLS, {"vLLM": "0"})
        assert "| trace | 40% | 60.0 | 70.0 | 80.0 | 70.0 (stock:0) | 80.0 | +10.0 |" in text
        assert "| trace | 10% | 30.0 | - | 20.0 | 30.0 (dense) | 20.0 | -10.0 |" in text

    @pytest.mark.parametrize(
        "result, expected",
        [
            ({"refused": "no such interval\nmore"}, "refused: no such interval"),
            ({"does_not_fit": True, "num_blocks": 9}, "does not fit into 9 blocks"),
            ({"error": "Traceback\nKeyError: 1\n"}, "FAILED: KeyError: 1"),
        ],
    )
    def test_says_why_there_is_no_number(self, result, expected):
        assert line(finished("0.1", "dense", None, **result)).endswith(expected)


class TestPlan:
    def test_begins_with_the_dense_cache_that_sizes_the_pools(self):
        (batch,) = batches(["dsv4"], ["chat"], ["inf", "0.2"], ["dense", "stock:0", "adaptive"])
        assert (batch.base.pool, batch.base.variant) == ("inf", "dense")
        others = [(cell.pool, cell.variant) for cell in batch.others]
        assert others == [
            ("inf", "adaptive"),
            *(("0.2", variant) for variant in ("dense", "stock:0", "adaptive")),
        ]

    def test_has_no_vllm_032_on_ascend(self):
        plain, ascend = batches(["dsv4", "dsv4-ascend32"], ["chat"], ["0.2"], ["dense", "v032:0"])
        assert len(plain.others) == 2
        assert [cell.variant for cell in ascend.others] == ["dense"]


class TestVariant:
    @pytest.mark.parametrize(
        "name, policy, interval",
        [
            ("dense", None, None),
            ("stock:0", None, 0),
            ("v032:4096", None, 4096),
            ("v032:dense", None, None),
            ("interval:16384", "interval", 16384),
            ("adaptive", "adaptive", None),
            ("adaptive:4096", "adaptive", 4096),
        ],
    )
    def test_is_read_from_its_name(self, name, policy, interval):
        variant = Variant.parse(name)
        assert (variant.policy, variant.interval_tokens) == (policy, interval)

    @pytest.mark.parametrize(
        "name",
        ["", "stock", "stock:", "stock:-1", "dense:0", "interval", "adaptive:x", "v032", "x:0"],
    )
    def test_is_refused_if_it_means_nothing(self, name):
        with pytest.raises(ValueError, match="expected dense, stock:N"):
            Variant.parse(name)
