# SPDX-License-Identifier: Apache-2.0
"""The benchmark of holes: its table, its traces, and one small cell."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from holes import admission, results  # noqa: E402
from holes.results import Result, Row, Variant  # noqa: E402
from holes.traces import TRACES, trace_named  # noqa: E402


def a_row(trace: str = "chat", holes: int = 800, reuse: int = 500, num_leaks: int = 0) -> Row:
    row = Row("full", trace, 0.5, 0.25, 100, 1 << 30)
    row.endless = Result(100_000, 10**9, 0)
    counts = (900, 750, 800, holes, reuse)
    for variant, count in zip(Variant, counts, strict=True):
        row.results[variant] = Result(
            1000 * count, count * 10**8, 0, stored_bytes=2 << 30, num_leaks=num_leaks
        )
    return row


def test_a_line_says_what_was_measured() -> None:
    words = results.line(a_row()).split()
    assert words[:4] == ["full", "chat", "25%", "|"]
    # Thousands of tokens: endless, device, lru, prefix, holes, reuse; lru by reuse.
    assert words[4:12] == ["100", "900", "750", "800", "800", "500", "1.50", "|"]
    assert words[12:18] == ["75.0", "80.0", "80.0", "50.0", "1.50", "|"]
    assert words[18:] == ["2.0", "2.0", "2.0", "2.0"]


def test_rows_are_summed_by_share() -> None:
    (total,) = results.sums([a_row(), a_row("agent", reuse=300)])
    assert total.results[Variant.REUSE].computed_tokens == 800_000
    assert total.results[Variant.PREFIX].computed_tokens == 1_600_000
    assert total.endless is not None
    assert total.endless.computed_tokens == 200_000


def test_targets_that_are_missed_are_named() -> None:
    lines = list(results.verdicts([a_row(), a_row("agent", holes=801, num_leaks=1)]))
    assert lines[0].endswith("in 1 of 2 rows: agent at 25%")
    assert lines[1].endswith("in 0 of 2 rows: none")
    assert "1.50 times fewer tokens than lru" in lines[2]
    assert lines[2].endswith("is met; than prefix, 1.60 times")
    assert lines[3].endswith(": 5")
    assert "is missed" in list(results.verdicts([a_row(reuse=600)]))[2]


def test_a_row_can_be_written_as_json() -> None:
    read = json.loads(json.dumps(a_row().to_json()))
    assert read["results"]["reuse"]["computed_tokens"] == 500_000


@pytest.mark.parametrize("name", TRACES)
def test_traces_are_the_same_every_time(name: str) -> None:
    def shape() -> list[tuple[int, int, int]]:
        requests = trace_named(name, 0.1).requests
        return [(len(each.prompt), len(each.answered), each.delay_steps) for each in requests]

    assert shape() == shape()
    assert len(shape()) > 10


def test_holes_are_computed_in_a_small_cell_and_nothing_else_is() -> None:
    from holes.cells import ENDLESS_BYTES, Bench
    from host_tier.cells import installed

    bench = Bench("full", "questions", 0.1, "second_touch")
    with installed("dense"):
        alone = bench.serve(Variant.ALONE, 0)
        endless = bench.serve(Variant.PREFIX, ENDLESS_BYTES)
        lru, prefix, holes, reuse = (
            bench.serve(variant, endless.held_bytes // 2)
            for variant in (Variant.LRU, Variant.PREFIX, Variant.HOLES, Variant.REUSE)
        )
    assert lru.stored_bytes > prefix.stored_bytes
    assert prefix.hole_tokens == 0 < holes.hole_tokens
    assert holes.computed_tokens < prefix.computed_tokens
    for result in (lru, prefix, holes, reuse):
        assert endless.computed_tokens < result.computed_tokens < alone.computed_tokens
        assert result.hole_tokens < result.computed_tokens
        assert not result.num_leaks
        assert result.held_bytes <= endless.held_bytes // 2


def test_missing_chunks_are_as_many_as_the_cases_say() -> None:
    for num_chunks in (16, 32, 128):
        missing = admission.missing_chunks(num_chunks)
        assert not missing[admission.WHOLE]
        tenth = missing[admission.TENTH]
        assert len(tenth) == round(num_chunks / 10)
        places = [chunk for chunk in tenth if chunk - 1 not in tenth]
        assert len(places) == min(admission.MOST_PLACES, len(tenth))
        assert max(tenth) < num_chunks - 1
        assert len(missing[admission.EVERY_OTHER]) == num_chunks // 2


def test_admission_is_timed_beside_that_of_stock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    admission.main(["--quick", "--rounds", "3", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert (tmp_path / "admission.txt").read_text() == printed
    rows = json.loads((tmp_path / "admission.json").read_text())
    assert [row["num_holes"] for row in rows] == [0, 0, 0, 2, 2, 7, 7]
    assert rows[0]["ratio"] == 1
    assert all(row["match_us"] > 0 for row in rows)
    assert sum(line.lstrip().startswith(("met", "NOT MET")) for line in printed.splitlines()) == 3


def test_a_ratio_above_the_target_is_not_met() -> None:
    met, missed = list(
        admission.verdicts(
            [
                admission.Result(1024, admission.STOCK, 0, 100, 1.0, has_target=False),
                admission.Result(1024, admission.WHOLE, 0, 130, 1.3, 5),
                admission.Result(1024, admission.TENTH, 1, 131, 1.31, 5),
            ]
        )
    )[1:]
    assert met.split()[:2] == ["met", "1.30"]
    assert missed.split()[:3] == ["NOT", "MET", "1.31"]
