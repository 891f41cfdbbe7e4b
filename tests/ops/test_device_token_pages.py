# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which transfer moves rows of tokens; `test_worker_segments` moves them."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from vllm_ascend_kvext.layout.model import Plane
from vllm_ascend_kvext.segments.token_rows import HostRows, TokenPlane
from vllm_ascend_kvext.segments.worker.device_token_pages import (
    DeviceTokenPages,
    PlacedPlane,
    runs_of,
)
from vllm_ascend_kvext.transfer.errors import BackendError
from vllm_ascend_kvext.transfer.schema import Direction, RowDtype


def test_runs_are_consecutive_slots_of_one_page() -> None:
    slots = np.array([9, 10, 11, 12, 13, 20, 22, 23, 24, 7, 6])
    assert runs_of(3, slots, 4, 100).tolist() == [
        [3, 2, 1, 3, 100],
        [3, 3, 0, 2, 103],
        [3, 5, 0, 1, 105],
        [3, 5, 2, 2, 106],
        [3, 6, 0, 1, 108],
        [3, 1, 3, 1, 109],
        [3, 1, 2, 1, 110],
    ]
    assert runs_of(0, np.array([0]), 4, 0).tolist() == [[0, 0, 0, 1, 0]]


def pages_that_call(calls: mock.Mock) -> DeviceTokenPages:
    planes = [
        PlacedPlane(
            TokenPlane("a", group, 2, 8, RowDtype.FLOAT32, None),
            Plane("a", group, 96, stride, 32, 64, "float32", is_packed=False),
        )
        for group, stride in ((1, 512), (0, 1024))
    ]
    return DeviceTokenPages(planes, {0: 4, 1: 8}, 10, calls.pools, wait=calls.wait, move=calls.move)


def test_rows_of_all_groups_are_one_transfer_which_is_waited_for() -> None:
    """The caller may overwrite the rows in host memory next."""
    calls = mock.Mock()
    pages = pages_that_call(calls)
    slots = {0: np.array([9, 10]), 1: np.array([9, 10])}
    rows = HostRows(calls.memory, [0, 640], first_row=3)
    for move, direction in (
        (pages.read, Direction.PAGES_TO_HOST),
        (pages.write, Direction.HOST_TO_PAGES),
    ):
        calls.reset_mock()
        move(slots, rows)
        moved, waited = calls.mock_calls
        assert moved.args[:2] == (calls.pools, calls.memory) and moved.args[4] is direction
        of_planes, runs = moved.args[2:4]
        assert of_planes.tolist() == [
            [1, 1, 96, 512, 32, 64, 8, 10, 0],
            [0, 0, 96, 1024, 32, 64, 4, 10, 640],
        ]
        assert runs.tolist() == [[0, 2, 1, 2, 3], [1, 1, 1, 2, 3]]
        assert waited == mock.call.wait()


def test_copies_before_a_failed_one_are_waited_for() -> None:
    """A large transfer is several batches. Host memory of the first ones is freed after an error.

    Keys are read for a question on the model's thread, where nothing else waits.
    """
    calls = mock.Mock()
    calls.move.side_effect = BackendError("the second batch failed")
    calls.pools.device_types = ("cpu",)
    with pytest.raises(BackendError, match="second batch"):
        pages_that_call(calls).read_plane(0, np.array([9, 10]))
    assert [call[0] for call in calls.mock_calls] == ["move", "wait"]
