# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which descriptors are refused, and in which words. What is refused has written nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import combinations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.sample import sampled
from support.transfer.cases import (
    HOST_ALIGNMENT_BYTES,
    HOST_TO_PAGES,
    PAGES_TO_HOST,
    Table,
    TransferCase,
    TransferMemory,
    assert_same,
    cases,
    cut_into_chunks,
    uniform_case,
)

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.transfer.errors import DescriptorError
from vllm_ascend_kvext.transfer.schema import PlaneColumn, PoolColumn, RunColumn

MOST = 2**63 - 1
MESSAGE = re.compile(
    r"(pools|planes|runs|host)\[\d+\]\.[a-z_]+: expected [^.]*, found [^.]*\. [A-Z][^.]*\."
)


def refusal(
    pools: Table, host_address: int, host_bytes: int, planes: Table, runs: Table, direction: int
) -> str | None:
    """The message with which the compiled module refuses it."""
    try:
        native().validate(pools, host_address, host_bytes, planes, runs, direction)
    except DescriptorError as error:
        return str(error)
    return None


QUICK = settings(max_examples=sampled(400), suppress_health_check=list(HealthCheck))
Span = tuple[int, int]


def is_valid(
    pools: Table, host_address: int, host_bytes: int, planes: Table, runs: Table, direction: int
) -> bool:
    """Whether a transfer may run, by the definition: Python integers, every pair compared."""
    pool_rows, plane_rows, run_rows = pools.tolist(), planes.tolist(), runs.tolist()
    host = (host_address, host_address + host_bytes)
    is_host_left_out = not run_rows and host_bytes == 0 and host_address >= 0
    regions = [(address, address + num_bytes) for address, num_bytes in pool_rows]
    return (
        all(0 < first < end < MOST for first, end in regions)
        and (is_host_left_out or 0 < host[0] < host[1] < MOST)
        and not any(_meet(host, region) for region in regions)
        and all(_is_plane_valid(plane, pool_rows) for plane in plane_rows)
        and all(
            left[6] == right[6]
            for left, right in combinations(plane_rows, 2)
            if left[0] == right[0]
        )
        and [run[0] for run in run_rows] == sorted(run[0] for run in run_rows)
        and all(_is_run_valid(run, plane_rows) for run in run_rows)
        and _fits_host(plane_rows, run_rows, host_bytes)
        and _writes_once(plane_rows, run_rows, pool_rows, direction)
    )


def _is_plane_valid(plane: list[int], pools: list[list[int]]) -> bool:
    group, pool, base, stride, region, row_bytes, rows, pages, host_offset = plane
    return (
        min(group, base, region, host_offset) >= 0
        and min(stride, row_bytes, rows, pages) > 0
        and 0 <= pool < len(pools)
        and host_offset % HOST_ALIGNMENT_BYTES == 0
        and region + rows * row_bytes <= stride
        and base + (pages - 1) * stride + region + rows * row_bytes <= pools[pool][1]
    )


def _is_run_valid(run: list[int], planes: list[list[int]]) -> bool:
    group, page, first_row, num_rows, host_row = run
    of_group = [plane for plane in planes if plane[0] == group]
    return (
        bool(of_group)
        and all(1 <= page < plane[7] for plane in of_group)
        and min(first_row, host_row) >= 0
        and num_rows > 0
        and all(first_row + num_rows <= plane[6] for plane in of_group)
    )


def _fits_host(planes: list[list[int]], runs: list[list[int]], host_bytes: int) -> bool:
    extents = []
    for group, *_, row_bytes, _, _, offset in planes:
        ends = [run[4] + run[3] for run in runs if run[0] == group]
        if ends:
            extents.append((offset, offset + max(ends) * row_bytes))
    return all(end <= host_bytes for _, end in extents) and not _any_meet(extents)


def _writes_once(
    planes: list[list[int]], runs: list[list[int]], pools: list[list[int]], direction: int
) -> bool:
    writes = []
    for group, pool, base, stride, region, row_bytes, _, _, offset in planes:
        for run_group, page, first_row, num_rows, host_row in runs:
            if run_group != group:
                continue
            if direction == HOST_TO_PAGES:
                first = pools[pool][0] + base + page * stride + region + first_row * row_bytes
            else:
                first = offset + host_row * row_bytes
            writes.append((first, first + num_rows * row_bytes))
    return not _any_meet(writes)


def _any_meet(spans: Iterable[Span]) -> bool:
    return any(_meet(left, right) for left, right in combinations(spans, 2))


def _meet(left: Span, right: Span) -> bool:
    return left[0] < right[1] and right[0] < left[1]


@st.composite
def damages(draw: st.DrawFn, case: TransferCase) -> tuple[np.ndarray, np.ndarray]:
    """The case's planes and runs, with one to three cells that may be wrong."""
    planes, runs = case.planes.copy(), case.runs.copy()
    for _ in range(draw(st.integers(1, 3))):
        table = draw(st.sampled_from((planes, runs)))
        row = draw(st.integers(0, len(table) - 1))
        column = draw(st.integers(0, table.shape[1] - 1))
        was = int(table[row, column])
        value = draw(
            st.one_of(
                st.integers(-2, 9),
                st.sampled_from((was - 1, was + 1, was * 2, was + 64)),
                st.sampled_from([int(value) for value in table[:, column]]),
                st.sampled_from((MOST, MOST - 1, -MOST - 1, 2**62, 2**32, 2**31)),
                st.integers(-MOST - 1, MOST),
            )
        )
        table[row, column] = min(max(value, -MOST - 1), MOST)
    if draw(st.booleans()):
        runs = runs[draw(st.permutations(range(len(runs))))]
    return planes, runs


@settings(QUICK, max_examples=sampled(1000))
@given(st.data(), cases(max_page_bytes=3000), st.booleans())
def test_it_agrees_with_the_definition(
    data: st.DataObject, case: TransferCase, is_cut: bool
) -> None:
    if is_cut:
        case = cut_into_chunks(case, data.draw)
    planes, runs = data.draw(damages(case))
    memory = TransferMemory.random(case)
    before = memory.snapshot()
    arguments = (memory.pool_table, memory.host.address, case.host_bytes, planes, runs)
    message = refusal(*arguments, case.direction)
    assert (message is None) == is_valid(*arguments, case.direction), message
    assert message is None or MESSAGE.fullmatch(message), message
    if message is not None:
        for move in (native().page_transfer, native().expand):
            with pytest.raises(DescriptorError, match=re.escape(message)):
                move(*arguments, case.direction)
        assert_same(memory.snapshot(), before)


@QUICK
@given(cases(max_page_bytes=3000), st.data())
def test_it_agrees_on_pools_and_host(case: TransferCase, data: st.DataObject) -> None:
    memory = TransferMemory.random(case)
    pools = memory.pool_table
    numbers = st.one_of(
        st.integers(-2, 2),
        st.sampled_from((MOST, MOST - 1, 2**62)),
        st.integers(-200, 200).map(lambda delta: memory.host.address + delta),
        st.integers(-MOST - 1, MOST),
    )
    host = [memory.host.address, case.host_bytes]
    which = data.draw(st.integers(0, len(pools)))
    row = host if which == len(pools) else pools[which]
    row[data.draw(st.integers(0, 1))] = data.draw(numbers)
    arguments = (pools, *host, case.planes, case.runs, case.direction)
    message = refusal(*arguments)
    assert (message is None) == is_valid(*arguments), message


# One group, two planes, three runs of whole pages of 4 rows of 16 bytes; 5 pages.
def small_case(direction: int) -> TransferCase:
    return uniform_case(
        row_bytes=16, rows_per_page=4, pages=(2, 4, 1), num_planes=2, direction=direction
    )


WRONG_CELLS = [
    ("planes", 1, PlaneColumn.GROUP, -1, "at least 0"),
    ("planes", 1, PlaneColumn.POOL, 2, "a row of pools, which has 2"),
    ("planes", 1, PlaneColumn.POOL, -1, "a row of pools, which has 2"),
    ("planes", 0, PlaneColumn.BASE_BYTES, -64, "at least 0"),
    ("planes", 0, PlaneColumn.PAGE_STRIDE_BYTES, 63, "at least 64"),
    ("planes", 0, PlaneColumn.PAGE_STRIDE_BYTES, 0, "at least 1"),
    ("planes", 0, PlaneColumn.REGION_OFFSET_BYTES, -1, "at least 0"),
    ("planes", 0, PlaneColumn.ROW_BYTES, 0, "at least 1"),
    ("planes", 1, PlaneColumn.ROWS_PER_PAGE, 3, "4, as planes[0] of the same group has"),
    ("planes", 1, PlaneColumn.ROWS_PER_PAGE, 0, "at least 1"),
    ("planes", 1, PlaneColumn.NUM_PAGES, 6, "within the 320 bytes of pools[1]"),
    ("planes", 1, PlaneColumn.NUM_PAGES, 2**60, "within the 320 bytes of pools[1]"),
    ("planes", 1, PlaneColumn.HOST_OFFSET_BYTES, 224, "a multiple of 64"),
    ("planes", 1, PlaneColumn.HOST_OFFSET_BYTES, 128, "at least 192, where the host rows of pl"),
    ("planes", 1, PlaneColumn.HOST_OFFSET_BYTES, 256, "within the 384 bytes of the host"),
    ("runs", 1, RunColumn.GROUP, 1, "a group that one of the 2 planes has"),
    ("runs", 0, RunColumn.GROUP, -1, "at least 0"),
    ("runs", 2, RunColumn.PAGE, 0, "1 to 4, the pages of planes[0]"),
    ("runs", 2, RunColumn.PAGE, 5, "1 to 4, the pages of planes[0]"),
    ("runs", 2, RunColumn.PAGE, -3, "1 to 4, the pages of planes[0]"),
    ("runs", 1, RunColumn.FIRST_ROW, -1, "at least 0"),
    ("runs", 1, RunColumn.NUM_ROWS, 0, "at least 1"),
    ("runs", 1, RunColumn.NUM_ROWS, 5, "within the 4 of a page"),
    ("runs", 1, RunColumn.NUM_ROWS, MOST, "within the 4 of a page"),
    ("runs", 1, RunColumn.HOST_ROW, -1, "at least 0"),
    ("pools", 1, PoolColumn.ADDRESS, 0, "at least 1"),
    ("pools", 1, PoolColumn.NUM_BYTES, 0, "at least 1"),
]


@pytest.mark.parametrize("direction", [PAGES_TO_HOST, HOST_TO_PAGES])
@pytest.mark.parametrize(("table", "row", "column", "value", "expected"), WRONG_CELLS)
def test_it_names_the_cell_and_both_numbers(table, row, column, value, expected, direction):
    case = small_case(direction)
    memory = TransferMemory.random(case)
    before = memory.snapshot()
    tables = {"pools": memory.pool_table, "planes": case.planes, "runs": case.runs}
    tables[table][row, column] = value
    with pytest.raises(DescriptorError) as caught:
        native().page_transfer(
            tables["pools"],
            memory.host.address,
            case.host_bytes,
            tables["planes"],
            tables["runs"],
            direction,
        )
    message = str(caught.value)
    assert message.startswith(f"{table}[{row}].{column.name.lower()}: expected ")
    assert expected in message
    assert str(value) in message.partition(", found ")[2]
    assert_same(memory.snapshot(), before)


WRITTEN_TWICE = {
    "rows loaded twice": (
        *(HOST_TO_PAGES, "runs", 2),
        {RunColumn.PAGE: 4, RunColumn.FIRST_ROW: 3, RunColumn.NUM_ROWS: 1},
        r"runs\[2\]\.page: expected bytes that nothing else writes: planes\[\d\] and "
        r"runs\[1\] write bytes \d+ to \d+ of the pool, found byte \d+ through planes",
    ),
    "host rows stored twice": (
        *(PAGES_TO_HOST, "runs", 1),
        {RunColumn.HOST_ROW: 3},
        r"runs\[1\]\.host_row: expected host rows that no other run writes: runs\[0\] writes "
        r"host rows 0 to 3, found host row 3\.",
    ),
    "planes of one page": (
        *(HOST_TO_PAGES, "planes", 1),
        {PlaneColumn.POOL: 0},
        r"runs\[2\]\.page: expected bytes that nothing else writes: planes\[\d\] and "
        r"runs\[2\] write bytes 64 to 127 of the pool, found byte 64 through planes\[\d\]\.",
    ),
}


@pytest.mark.parametrize("name", WRITTEN_TWICE)
def test_it_names_both_that_write_a_byte(name: str) -> None:
    direction, table, row, cells, expected = WRITTEN_TWICE[name]
    case = small_case(direction)
    for column, value in cells.items():
        getattr(case, table)[row, column] = value
    with pytest.raises(DescriptorError, match=expected):
        native().page_transfer(*TransferMemory.random(case).descriptors(case))


def test_one_byte_is_not_shared_by_host_rows_of_two_planes() -> None:
    case = uniform_case(row_bytes=65, rows_per_page=1, pages=(1,), num_planes=2)
    case.planes[1, PlaneColumn.HOST_OFFSET_BYTES] = 64
    message = refusal(*TransferMemory.random(case).descriptors(case))
    assert message is not None and "at least 65, where the host rows of planes[0] end" in message


def test_groups_that_share_a_page_may_not_share_its_bytes() -> None:
    """Rows of other widths. The row numbers of the groups differ, but their bytes are the same."""
    planes = np.array([(0, 0, 0, 64, 0, 16, 4, 9, 0), (1, 0, 0, 64, 0, 32, 2, 9, 64)])
    runs = np.array([(0, 3, 2, 2, 0), (1, 3, 1, 1, 0)])
    message = refusal(np.array([(1 << 20, 9 * 64)]), 1, 128, planes, runs, HOST_TO_PAGES)
    assert message is not None and "bytes that nothing else writes" in message


VALID = {
    "pools": np.array([(4096, 320), (8192, 320)]),
    "host_address": 1,
    "host_bytes": 384,
    "planes": small_case(PAGES_TO_HOST).planes,
    "runs": small_case(PAGES_TO_HOST).runs,
    "direction": PAGES_TO_HOST,
}


@pytest.mark.parametrize("host", [(0, 0), (4096, 0), (-1, 0), (0, 64), (1, 64)])
def test_without_runs_no_host_buffer_is_needed(host: tuple[int, int]) -> None:
    buffer = dict(zip(("host_address", "host_bytes"), host, strict=True))
    message = refusal(**VALID | buffer | {"runs": VALID["runs"][:0]})
    assert (message is None) == (host in [(0, 0), (4096, 0), (1, 64)]), message
    message = refusal(**VALID | {"host_address": 0, "host_bytes": 0})
    assert message is not None and message.startswith("host[0].address: expected at least 1")


RUNS = np.array([(0, 2, 0, 4, 0)])


@pytest.mark.parametrize(
    ("runs", "found"),
    [
        (RUNS.astype(np.int32), "format 'i', shape [1, 5], contiguous"),
        (RUNS.astype(np.float64), "format 'd', shape [1, 5], contiguous"),
        (RUNS.astype(np.uint64), "format 'L', shape [1, 5], contiguous"),
        (RUNS.astype(">i8"), "format '>q', shape [1, 5], contiguous"),
        (RUNS[:, :4].copy(), "format 'l', shape [1, 4], contiguous"),
        (RUNS[0], "format 'l', shape [5], contiguous"),
        (np.repeat(RUNS, 4, 0)[::2], "format 'l', shape [2, 5], not contiguous"),
        (np.asfortranarray(np.repeat(RUNS, 4, 0)), "format 'l', shape [4, 5], not contiguous"),
        ([[0, 2, 0, 4, 0]], "an object without a buffer"),
        (None, "an object without a buffer"),
    ],
)
def test_a_table_has_the_right_type(runs, found) -> None:
    assert refusal(**VALID | {"runs": runs}) == (
        f"runs: expected int64, shape [rows, 5], C-contiguous, found {found}. "
        "Build it with numpy.ascontiguousarray(rows, numpy.int64)."
    )


def test_a_table_may_be_read_only_but_is_aligned() -> None:
    read_only = VALID["runs"].copy()
    read_only.flags.writeable = False
    assert refusal(**VALID | {"runs": read_only}) is None
    shifted = memoryview(b"\0" + RUNS.tobytes())[1:].cast("q", RUNS.shape)
    message = refusal(**VALID | {"runs": shifted})
    assert message is not None and message.startswith("runs: expected int64")


@pytest.mark.parametrize("direction", [-1, 2, 2**40])
def test_there_are_two_directions(direction: int) -> None:
    message = refusal(**VALID | {"direction": direction})
    assert message is not None and message.startswith("direction: expected 0")
    assert f"found {direction}." in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_threads", 0),
        ("num_threads", 257),
        ("streaming", 2),
        ("niceness", -1),
        ("niceness", 20),
    ],
)
def test_options_are_checked(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{name}: expected .*, found {value}\."):
        native().page_transfer(**VALID, **{name: value})
