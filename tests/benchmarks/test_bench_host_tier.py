# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the host tier: its table, and one small cell."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from host_tier import results  # noqa: E402
from host_tier.results import HostUse, Result, Row, Variant  # noqa: E402

HOST = HostUse(
    row_bytes=8 << 20,
    tail_bytes=4 << 20,
    num_tails=2,
    bytes_held=12 << 20,
    computed_tokens=4096,
    shortfalls={"no_tail": 3},
    refusals={"already_stored": 1000},
    num_leaks=0,
)


def a_row(host_rate: float = 0.72, num_leaks: int = 0) -> Row:
    row = Row("gemma", "chat", 0.5, 10, 0.2, 1234)
    for variant, hit_rate in zip(Variant, (0.3, 0.4, host_rate, 0.6), strict=True):
        host = replace(HOST, num_leaks=num_leaks) if variant.has_host else None
        row.results[variant] = Result(hit_rate, 0.75, 1.5, 0, host)
    return row


def test_a_line_says_what_was_measured() -> None:
    words = results.line(a_row()).split()
    assert words[:5] == ["gemma", "chat", "20%", "1,234", "|"]
    # Four hit rates, the ceiling, and what the better of the last two lacks.
    assert words[5:11] == ["30.0", "40.0", "72.0", "60.0", "75.0", "3.0"]
    # 8 and 4 MiB for 4,096 tokens; 2 tails.
    assert words[12:15] == ["2.00", "1.00", "2.00"]


def test_reasons_are_those_of_variants_with_a_host_tier() -> None:
    lines = list(results.why_not(a_row()))
    assert len(lines) == 2
    assert "no_tail 3" in lines[0]
    assert "already_stored 1,000" in lines[0]
    assert "LEAKS" not in lines[0]
    assert "LEAKS 4" in next(iter(results.why_not(a_row(num_leaks=4))))


def test_a_row_is_good_within_five_points_and_without_leaks() -> None:
    assert a_row(0.7001).is_good
    assert not a_row(0.6999).is_good
    assert not a_row(num_leaks=1).is_good
    assert results.summary([a_row(), a_row(0.5)]).startswith("1 of 2 rows")


def test_a_trace_that_fits_no_pool_is_said_to() -> None:
    row = Row("gemma", "chat", 0.5, 10, 0.4, 77)
    assert results.line(row).endswith("does not fit")
    assert not row.is_good


@pytest.mark.parametrize("row", [a_row(), Row("mamba", "agent", 1.0, 3)])
def test_rows_survive_json(row: Row) -> None:
    assert Row.from_json(json.loads(json.dumps(row.to_json()))) == row


def test_host_tier_reaches_the_ceiling_in_a_small_cell() -> None:
    from host_tier.cells import run_row

    row = run_row("gptoss", "chat", 0.1, (0.2, 0.4))
    assert row.is_complete
    assert row.is_good, results.line(row)
    device, host = (row.results[each].hit_rate for each in (Variant.DENSE, Variant.DENSE_HOST))
    assert host > device + 0.1
