# SPDX-License-Identifier: Apache-2.0
"""Reports of several workers are one."""

from __future__ import annotations

from vllm_ascend_kvext.connector.messages import JobResults


def test_what_loads_lack_on_some_worker_is_joined() -> None:
    results = JobResults(lacking={"a": {(0, 32)}, "b": {(0, 64)}})
    results.add(JobResults(lacking={"a": {(64, 96)}, "c": {(32, 64)}}))
    assert results.lacking == {"a": {(0, 32), (64, 96)}, "b": {(0, 64)}, "c": {(32, 64)}}


def test_a_load_that_lacks_something_is_reported() -> None:
    assert JobResults(lacking={"a": {(0, 32)}})
    assert not JobResults()
