# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Where segments of a worker on a device are rotated: in host memory, on the CPUs of the worker."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from support.transfer.host_model import HostModel

from vllm_ascend_kvext.connector.worker.extension import RegisteredPages
from vllm_ascend_kvext.segments.options import SegmentOptions, Selector
from vllm_ascend_kvext.segments.worker import segments_worker
from vllm_ascend_kvext.transfer import placement


@pytest.mark.parametrize("is_named", [False, True])
def test_rotations_follow_the_cpus_of_the_worker(
    is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM-Ascend binds them after the registration. OpenMP's variables bind no NPU's model."""
    host = HostModel()
    made: list[tuple[Any, ...]] = []

    def note(*arguments: Any) -> mock.Mock:
        made.append(arguments)
        return mock.Mock()

    named = placement.CopyPlacement((3,), 1)
    monkeypatch.setattr(placement, "HostCpus", lambda: host)
    monkeypatch.setattr(segments_worker, "WorkerSegments", note)
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    worker = segments_worker.SegmentsWorker(None, SegmentOptions(selector=Selector.HEADS), None)
    pages: Any = dict.fromkeys(RegisteredPages._fields)
    worker.register(RegisteredPages(**pages | {"placer": (lambda: named) if is_named else None}))
    host.bind_all(range(50, 94))
    placer = made[0][4]
    assert placer() == (named if is_named else placement.CopyPlacement(tuple(range(50, 94)), 4))
