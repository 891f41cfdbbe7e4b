# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Reports of several workers are joined."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_ascend_kvext.connector.common.messages import Traffic, WorkerOutput
from vllm_ascend_kvext.segments.messages import SegmentOutput

SOME, OTHER = np.array([1, 2], np.float32), np.array([3, 5], np.float32)


def test_what_workers_report_is_joined() -> None:
    moved = {"store": Traffic(num_bytes=100, seconds=0.5, transfers=1)}
    results = WorkerOutput(unreadable={"a": {0}, "b": {0}}, jobs_ended={1: 1})
    for _ in range(2):
        others = {"a": {64}, "c": {128}}
        results.add(WorkerOutput(unreadable=others, jobs_ended={1: 1}, traffic=moved))
    assert results.unreadable == {"a": {0, 64}, "b": {0}, "c": {128}}
    assert results.jobs_ended == {1: 3}
    assert results.traffic["store"] == Traffic(200, 1.0, 2)
    assert WorkerOutput(unreadable={"a": {0}}) and not WorkerOutput()


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [(SOME, OTHER, [4, 7]), (SOME, None, None), (None, SOME, None), (None, None, None)],
)
def test_scores_are_summed_over_workers_if_none_lacks_them(
    one: object, other: object, expected: list[int] | None
) -> None:
    results = WorkerOutput()
    results.add(WorkerOutput(extras=SegmentOutput(scores={"a": one})))
    results.add(WorkerOutput(extras=SegmentOutput(scores={"a": other})))
    assert results and results.extras is not None
    scores = results.extras.scores["a"]
    assert (scores if scores is None else scores.tolist()) == expected
