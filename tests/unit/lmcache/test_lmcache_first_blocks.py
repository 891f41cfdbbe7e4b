# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""If a connector was not told of a request's first blocks, it reads them from a step."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest

from vllm_ascend_kvext.lmcache.first_blocks import tell_first_blocks

NEW = SimpleNamespace(
    scheduled_new_reqs=[SimpleNamespace(req_id="a", block_ids=([1, 2], [3]))],
    scheduled_cached_reqs=SimpleNamespace(req_ids=(), new_block_ids=(), resumed_req_ids=()),
)


def cached(*resumed: str) -> SimpleNamespace:
    requests = SimpleNamespace(
        req_ids=["other", "a"], new_block_ids=[None, ([1, 2], [3])], resumed_req_ids={*resumed}
    )
    return SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=requests)


@pytest.mark.parametrize(
    ("output", "known", "is_told"),
    [
        *((output, {}, True) for output in (NEW, cached("other", "a"))),
        *((output, {0: 0, 1: 0}, True) for output in (NEW, cached("a"))),
        *((output, {0: 1, 1: 1}, False) for output in (NEW, cached("a"))),
        # LMCache itself adds the new blocks of running requests.
        *((output, {}, False) for output in (cached(), cached("other"))),
    ],
)
def test_what_was_not_told_of_the_blocks_it_begins_with_is_read_off_the_step(
    output: SimpleNamespace, known: dict[int, int], is_told: bool
) -> None:
    tracker = mock.Mock(num_allocated_blocks=lambda: known)
    tell_first_blocks({"a": tracker}, output)
    assert tracker.append_block_ids.mock_calls == [mock.call(([1, 2], [3]))] * is_told
    tell_first_blocks({}, output)  # Requests that LMCache does not know are skipped.
