# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Prompts with thousands of segments. The scheduler waits until they are processed."""

from __future__ import annotations

from array import array
from typing import Any

from vllm_ascend_kvext.holes.load_plan import Span, spans_within
from vllm_ascend_kvext.segments.scheduler.segment_contexts import Sink
from vllm_ascend_kvext.segments.scheduler.segment_store import SegmentPrefix
from vllm_ascend_kvext.token_range import TokenRange, without


class CountedRuns(list[TokenRange]):
    """Segments of which each may be read only a few times."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_read += 1
        assert self.num_read < 10 * len(self)
        return super().__getitem__(index)


class CountedPrefix(SegmentPrefix):
    """A prefix that counts the tokens from which keys are made."""

    num_read = 0

    def ids_of(self, first_tokens: int, end_tokens: int) -> bytes:
        self.num_read += end_tokens - first_tokens
        return super().ids_of(first_tokens, end_tokens)


def test_segments_are_not_compared_each_with_each() -> None:
    runs = CountedRuns(TokenRange(10 * number, 10 * number + 4) for number in range(10_000))
    found = [Span(run.first_tokens, run.end_tokens + 3) for run in runs]
    cut = spans_within(found, runs)
    left = without([TokenRange(run.first_tokens, run.end_tokens + 3) for run in runs], runs)
    assert [(rows.first_tokens, rows.end_tokens) for rows in cut] == runs
    assert left == tuple(TokenRange(run.end_tokens, run.end_tokens + 3) for run in runs)


def test_the_keys_of_a_long_segment_read_each_token_once() -> None:
    sink = Sink((), b"space")
    packed_ids = array("q", range(200_000)).tobytes()
    prefix = CountedPrefix(sink, packed_ids, 16)
    keys = prefix.keys_at(range(16, 200_001, 16))
    assert prefix.num_read == 200_000
    assert len(set(keys)) == len(keys)
    again = SegmentPrefix(sink, packed_ids, 16)
    assert [again.key_at(boundary) for boundary in (200_000, 16, 160)] == [
        keys[-1],
        keys[0],
        keys[9],
    ]
