# SPDX-License-Identifier: Apache-2.0
"""Prompts with thousands of segments."""

from __future__ import annotations

import time

from vllm_ascend_kvext.blending.segment_store import SegmentPrefix
from vllm_ascend_kvext.connector.segments.blended_requests import _cut
from vllm_ascend_kvext.holes.load_plan import Span
from vllm_ascend_kvext.token_range import TokenRange, without


def test_thousands_of_segments_are_found_in_no_time() -> None:
    """The scheduler waits for it: comparing each with each of 10,000 takes tens of seconds."""
    runs = [TokenRange(10 * number, 10 * number + 4) for number in range(10_000)]
    found = [Span(run.first_tokens, run.end_tokens + 3) for run in runs]
    began_s = time.perf_counter()
    cut = _cut(found, runs)
    left = without([TokenRange(run.first_tokens, run.end_tokens + 3) for run in runs], runs)
    assert time.perf_counter() - began_s < 3
    assert [(rows.first_tokens, rows.end_tokens) for rows in cut] == runs
    assert left == tuple(TokenRange(run.end_tokens, run.end_tokens + 3) for run in runs)


def test_the_keys_of_a_long_segment_read_each_token_once() -> None:
    """Each key read all tokens before it: 100,000 tokens took the scheduler more than a second."""
    prefix = SegmentPrefix(b"space", range(200_000), 16)
    began_s = time.perf_counter()
    keys = prefix.keys_at(range(16, 200_001, 16))
    assert time.perf_counter() - began_s < 1.5
    assert len(set(keys)) == len(keys)
    again = SegmentPrefix(b"space", range(200_000), 16)
    assert [again.key_at(boundary) for boundary in (200_000, 16, 160)] == [
        keys[-1],
        keys[0],
        keys[9],
    ]
