# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The arithmetic behind the tables of benchmarks, on the smallest input. It needs no vLLM."""

from __future__ import annotations

import hashlib
import math
import sys
from array import array
from dataclasses import astuple, replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from blending import metrics
from common import report
from offload.server import failures
from offload.taps import union_s
from offload.workload import OFFLOADED_TOKENS, Moved, Visit
from offload.workload import Prompt as OffloadPrompt
from retention.losses import CachedOnce, ComputedPrefixes, GroupNeeds, split_losses
from retention.texts import Library, Text


def test_a_ratio_is_of_the_same_round() -> None:
    assert report.median_ratio([1, 20, 3], [1, 10, 2]) == 1.5
    with pytest.raises(ValueError):
        report.median_ratio([1, 2], [1])


def test_time_in_which_several_transfers_run_counts_once() -> None:
    assert union_s([(2, 5), (1, 3), (7, 8), (7.5, 7.7)]) == 5


def test_a_difference_is_paired_and_its_interval_narrows_with_more_questions() -> None:
    assert metrics.paired_difference([0, 4, 9], [1, 5, 10]) == metrics.Interval(-1, -1, -1)
    many = metrics.paired_difference([1.0, 0.0] * 250, [0.0] * 500)
    # Of 500 draws: 0.5 plus or minus 1.96 * sqrt(0.25 / 500).
    assert (many.low, many.high) == pytest.approx((0.456, 0.544), abs=0.005)


def test_recovered_is_the_share_of_what_was_lost() -> None:
    full, plain = [1.0] * 10, [0.0] * 8 + [1.0] * 2
    found = metrics.recovered([1.0] * 6 + [0.0] * 2 + [1.0] * 2, plain, full)
    assert found is not None
    assert found.mean == pytest.approx(6 / 8)
    assert found.low < 0.75 < found.high <= 1


def test_what_only_one_distribution_knows_counts_as_the_rest() -> None:
    one, other = ({1: 0.5, 2: 0.4}, {1: 0.8, 3: 0.1})
    logs = [{token: math.log(share) for token, share in each.items()} for each in (one, other)]
    expected = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    assert metrics.divergence(*logs) == pytest.approx(expected)


GOOD = OffloadPrompt(
    *(2.0, 0.2, 0, OFFLOADED_TOKENS),
    store=Moved(seconds=0.1, num_tokens=OFFLOADED_TOKENS, transfers=2),
    load=Moved(seconds=0.2, transfers=1),
)


def test_what_was_not_moved_does_not_count() -> None:
    assert GOOD.why_not is None
    for change in (
        {"cold_hit_tokens": 128},
        {"warm_hit_tokens": 3072},
        {"store": Moved(transfers=1, failed=1)},
        {"store": Moved(transfers=1, num_tokens=3840)},
        {"load": Moved()},
    ):
        assert replace(GOOD, **change).why_not
    kinds = [Visit(OFFLOADED_TOKENS, loads=1), Visit(OFFLOADED_TOKENS), Visit(0), Visit(896)]
    assert [visit.kind for visit in kinds] == ["loaded", "local", "new", None]
    assert failures("Stored 4096 tokens in 0.1 s\nSome keys not found") == ["Some keys not found"]


@pytest.mark.parametrize(
    ("hit", "once", "expected"),
    [
        (96, b"0123", (3, 0, 0)),
        (32, b"0123", (3, 0, 64)),
        (32, b"01", (3, 32, 32)),
        (0, b"013", (3, 32, 64)),
    ],
)
def test_what_is_lost_is_split_by_cause(hit: int, once: bytes, expected: tuple[int, ...]) -> None:
    """One full group with blocks of 32 tokens. The causes: granularity, never kept, evicted."""
    keys = {bytes([each]) + bytes(4) for each in once}
    hashes = [bytes([each]) for each in b"0123"]
    history = CachedOnce((GroupNeeds(32, None),), 32, hashes, keys)
    assert astuple(split_losses(hit, 99, 32, history)) == expected


@pytest.mark.parametrize(
    "once, expected",
    [
        # Of a full group and of states, by group: the hashes of ends that were cached.
        (("135", "5"), 96),
        (("1345", "34"), 80),
        (("135", "34"), 64),  # The beginning of the third block is not there.
        (("1345", "3"), 64),
        (("34", "34"), 0),
        (("0", "0"), 16),
        (("1", ""), 0),
    ],
)
def test_a_boundary_inside_a_block_needs_the_beginning_of_the_block(
    once: tuple[str, str], expected: int
) -> None:
    """Blocks of 32 tokens, of which the first 16 may be hit alone."""
    keys = {each.encode() + bytes([0, 0, 0, i]) for i, some in enumerate(once) for each in some}
    hashes = [bytes([each]) for each in b"012345"]
    history = CachedOnce((GroupNeeds(32, None), GroupNeeds(32, 1)), 16, hashes, keys)
    assert astuple(split_losses(0, 99, 16, history)) == (3, 96 - expected, expected)


def test_texts_share_hashes_and_computed_prefixes() -> None:
    library = Library("texts")
    root = library.write(37)
    one, other = library.write(50, library.write(2, root)), library.write(20, root.cut(21))
    assert other.tokens()[:21] == one.tokens()[:21]
    for text in (one, other, one.cut(38)):
        assert text.block_hashes(4) == _hashes(text, 4)
    prefixes = ComputedPrefixes()
    prefixes.extend(one, 0, 60)
    assert (prefixes.longest(one), prefixes.longest(other)) == (60, 21)


def _hashes(text: Text, block_tokens: int) -> list[bytes]:
    tokens, previous, hashes = array("I", text.tokens()), b"", []
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        block = tokens[end - block_tokens : end].tobytes()
        previous = hashlib.sha256(previous + block).digest()
        hashes.append(previous)
    return hashes
