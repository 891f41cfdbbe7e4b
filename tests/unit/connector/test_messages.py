# SPDX-License-Identifier: Apache-2.0
"""Reports of several workers are one."""

from __future__ import annotations

import numpy as np

from vllm_ascend_kvext.connector.messages import JobResults


def test_what_some_worker_could_not_read_is_joined() -> None:
    results = JobResults(unreadable={"a": {0}, "b": {0}})
    results.add(JobResults(unreadable={"a": {64}, "c": {128}}))
    assert results.unreadable == {"a": {0, 64}, "b": {0}, "c": {128}}


def test_a_load_that_lacks_something_is_reported() -> None:
    assert JobResults(unreadable={"a": {0}})
    assert not JobResults()


def test_scores_are_summed_over_workers() -> None:
    results = JobResults(scores={"a": np.array([1, 2], np.float32)})
    results.add(JobResults(scores={"a": np.array([3, 5], np.float32)}))
    (scores,) = results.scores.values()
    assert scores is not None
    assert scores.tolist() == [4, 7]


def test_scores_that_one_worker_lacks_are_none() -> None:
    some = np.array([1, 2], np.float32)
    for one, other in ((some, None), (None, some), (None, None)):
        results = JobResults(scores={"a": one})
        results.add(JobResults(scores={"a": other}))
        assert results.scores == {"a": None}
        assert results
