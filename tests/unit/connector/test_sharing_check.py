# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What workers share is compared: what counts as equal, and what is kept until it is known."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from vllm_ascend_kvext.connector.common.messages import EXTRA_ROWS, PlaneDigest, WorkerOutput
from vllm_ascend_kvext.connector.scheduler.sharing_check import SharingCheck
from vllm_ascend_kvext.layout.sharing import HostSharing, PlaneShare

NUM_RANKS = 2
GROUPS = frozenset({0, 1})


def check_of(groups: frozenset[int] = GROUPS, has_extras: bool = False) -> SharingCheck:
    share = PlaneShare(num_copies=1, copy=0, is_stored=True, content=0)
    sharing = HostSharing(0, tuple(range(NUM_RANKS)), ((share,),) * len(GROUPS))
    return SharingCheck(sharing, NUM_RANKS, groups, has_extras)


def report(
    number: int,
    rank: int,
    groups: Iterable[int] = (),
    digest: bytes = b"equal",
    fails: bool = False,
) -> WorkerOutput:
    """The report of one worker about one store: digests of some groups, or a failure."""
    found = WorkerOutput(jobs_ended={number: 1})
    digests = tuple(PlaneDigest(group, 0, 0, digest) for group in groups)
    if digests:
        found.digests[number] = {rank: digests}
    if fails:
        found.failed_jobs.add(number)
    return found


def test_a_group_counts_as_equal_when_all_ranks_have_reported_it() -> None:
    check = check_of()
    check.note(report(1, 0, GROUPS))
    assert check.is_first and check.is_pending
    check.note(report(1, 1, GROUPS))
    assert not check.is_first and not check.is_pending and check.difference is None


def test_reports_of_one_step_are_joined() -> None:
    check = check_of()
    joined = report(1, 0, GROUPS)
    joined.add(report(1, 1, GROUPS, b"other"))
    check.note(joined)
    assert check.difference == "plane 0 of group 0 on ranks 0 and 1"


def test_each_group_is_compared_by_itself() -> None:
    check = check_of()
    for rank in range(NUM_RANKS):
        check.note(report(1, rank, {0}))
    assert not check.is_first and check.is_pending
    check.note(report(2, 0, {1}))
    check.note(report(2, 1, {1}, b"other"))
    assert check.difference == "plane 0 of group 1 on ranks 0 and 1"


ORDERS = [pytest.param([(0, False), (1, True)], id="digests, then the failure")]
ORDERS.append(pytest.param([(1, True), (0, False)], id="the failure, then digests"))


@pytest.mark.parametrize("order", ORDERS)
def test_a_store_that_fails_on_a_rank_leaves_nothing_behind(order: list[tuple[int, bool]]) -> None:
    check = check_of()
    for number in range(100):
        for rank, fails in order:
            check.note(report(number, rank, () if fails else GROUPS, fails=fails))
    assert check.is_first and not check._under_way


def test_stores_of_what_is_not_shared_leave_nothing_behind() -> None:
    check = check_of()
    for number in range(100):
        for rank in range(NUM_RANKS):
            check.note(report(number, rank))
    assert check.is_first and not check._under_way


@pytest.mark.parametrize("digest", [b"equal", b"other"])
def test_nothing_is_kept_when_the_check_has_ended(digest: bytes) -> None:
    check = check_of()
    check.note(report(7, 0, GROUPS))
    check.note(report(1, 0, GROUPS))
    check.note(report(1, 1, GROUPS, digest))
    assert not check.is_pending and not check._under_way


def test_rows_of_an_extension_are_compared_by_themselves() -> None:
    check = check_of(has_extras=True)
    assert check.compares_groups and check.compares_extras
    for rank in range(NUM_RANKS):
        check.note(report(1, rank, GROUPS))
    assert check.is_pending and not check.compares_groups and check.compares_extras
    for rank in range(NUM_RANKS):
        check.note(report(2, rank, {EXTRA_ROWS}))
    assert not (check.is_pending or check.compares_extras) and check.difference is None


def test_rows_of_an_extension_that_differ_end_all_comparisons() -> None:
    check = check_of(has_extras=True)
    check.note(report(1, 0, {EXTRA_ROWS}))
    check.note(report(1, 1, {EXTRA_ROWS}, b"other"))
    assert check.difference == "plane 0 of an extension's rows on ranks 0 and 1"
    assert not (check.is_pending or check.compares_groups or check.compares_extras)


def test_without_an_extension_none_of_its_rows_are_waited_for() -> None:
    assert not check_of().compares_extras
