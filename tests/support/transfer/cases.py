# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Random valid transfers, their memory, and their expected results.

The module knows the descriptor tables and their rules, but neither torch, backends nor vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.transfer.oracle import oracle_transfer
from vllm_ascend_kvext.transfer.backend import Transfer
from vllm_ascend_kvext.transfer.placement import CALLING_THREAD
from vllm_ascend_kvext.transfer.schema import Direction

PAGES_TO_HOST = 0
HOST_TO_PAGES = 1
HOST_ALIGNMENT_BYTES = 64
GUARD_BYTES = 96
"""Bytes before and after every region. No transfer may touch them."""

ROW_BYTES = (1, 2, 16, 31, 32, 33, 512, 1024, 4097, 9000)

Table = NDArray[np.int64]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TransferCase:
    """One valid transfer.

    ``misalignment_bytes``: by how much each pool, and then the host, begin behind a 64-byte
    boundary.
    """

    pool_bytes: tuple[int, ...]
    host_bytes: int
    planes: Table
    runs: Table
    direction: int
    misalignment_bytes: tuple[int, ...]

    def reversed(self) -> TransferCase:
        """The transfer in the other direction. It is valid if no side is addressed twice."""
        return replace(self, direction=1 - self.direction)


@dataclass(frozen=True, slots=True)
class GuardedBytes:
    """A region of random bytes between two guards. All three are one allocation."""

    whole: Bytes
    region: Bytes

    @classmethod
    def random(cls, num_bytes: int, misalignment_bytes: int, random: np.random.Generator):
        """Make a region that begins ``misalignment_bytes`` behind a 64-byte boundary."""
        slack = HOST_ALIGNMENT_BYTES
        whole = random.integers(0, 256, num_bytes + 2 * GUARD_BYTES + 2 * slack, dtype=np.uint8)
        first = GUARD_BYTES + slack
        first += (misalignment_bytes - (whole.ctypes.data + first)) % slack
        return cls(whole, whole[first : first + num_bytes])

    @property
    def address(self) -> int:
        return self.region.ctypes.data


@dataclass(frozen=True, slots=True)
class TransferMemory:
    """The pools and the host buffer of one case."""

    pools: tuple[GuardedBytes, ...]
    host: GuardedBytes

    @classmethod
    def random(cls, case: TransferCase, seed: int = 0) -> TransferMemory:
        random = np.random.default_rng(seed)
        *pools, host = (
            GuardedBytes.random(num_bytes, misalignment, random)
            for num_bytes, misalignment in zip(
                (*case.pool_bytes, case.host_bytes), case.misalignment_bytes, strict=True
            )
        )
        return cls(tuple(pools), host)

    @property
    def pool_table(self) -> Table:
        """shape: [num_pools, 2]. The columns are address and num_bytes."""
        rows = [(pool.address, pool.region.size) for pool in self.pools]
        return np.array(rows, dtype=np.int64).reshape(len(rows), 2)

    def descriptors(self, case: TransferCase) -> tuple[Table, int, int, Table, Table, int]:
        """The first six arguments of every function of the compiled module."""
        return (
            self.pool_table,
            self.host.address,
            case.host_bytes,
            case.planes,
            case.runs,
            case.direction,
        )

    def transfer(
        self, case: TransferCase, pool_tensors: Sequence[object], host_tensor: object
    ) -> Transfer:
        """The transfer for a backend. The tensors may represent memory of a device."""
        return Transfer(
            pools=self.pool_table,
            planes=case.planes,
            runs=case.runs,
            host_address=self.host.address,
            host_bytes=case.host_bytes,
            direction=Direction(case.direction),
            placement=CALLING_THREAD,
            pool_tensors=tuple(pool_tensors),
            host_tensor=host_tensor,
        )

    def snapshot(self) -> tuple[Bytes, ...]:
        """Copies of every allocation with its guards: the pools, and then the host."""
        return tuple(region.whole.copy() for region in (*self.pools, self.host))

    def after(self, case: TransferCase) -> tuple[Bytes, ...]:
        """The oracle's result: what ``snapshot`` must return after ``case`` has run."""
        regions = (*self.pools, self.host)
        result = self.snapshot()
        *pools, host = (
            whole[region.address - region.whole.ctypes.data :][: region.region.size]
            for whole, region in zip(result, regions, strict=True)
        )
        oracle_transfer(pools, host, case.planes, case.runs, Direction(case.direction))
        return result


def assert_same(actual: Sequence[Bytes], expected: Sequence[Bytes]) -> None:
    """Compare allocations. An error names the allocation and the first bytes that differ."""
    assert len(actual) == len(expected)
    for index, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        where = np.flatnonzero(got != wanted)
        name = "host" if index == len(expected) - 1 else f"pool {index}"
        assert not where.size, f"{name}: {where.size} bytes differ, first at {where[:4]}"


@dataclass(frozen=True, slots=True)
class _PlaneShape:
    """A plane whose place in memory is not decided yet."""

    index: int
    group: int
    row_bytes: int
    rows_per_page: int

    @property
    def page_bytes(self) -> int:
        return self.row_bytes * self.rows_per_page


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    row_bytes: Sequence[int] = ROW_BYTES,
    max_page_bytes: int = 20_000,
    max_pages: int = 7,
) -> TransferCase:
    """Valid transfers.

    They vary in: groups (numbers with gaps), planes per group and their row widths, padded page
    strides, several regions per page, blobs that layers of several groups share, misalignment of
    pools and host, page order, partial pages, gaps and order of the host rows, gaps between the
    host's planes. ``max_page_bytes`` limits the rows of a page, but one row is always possible.
    """
    direction = draw(st.sampled_from((PAGES_TO_HOST, HOST_TO_PAGES)))
    groups = sorted(draw(st.sets(st.integers(0, 5), min_size=1, max_size=3)))
    num_pages = 1 + draw(st.integers(1, max_pages))
    widths = st.one_of(st.sampled_from(tuple(row_bytes)), st.integers(1, max(row_bytes)))

    shapes = []
    for group in groups:
        group_widths = draw(st.lists(widths, min_size=1, max_size=3))
        max_rows = max(1, max_page_bytes // max(group_widths))
        rows = draw(st.integers(1, min(max_rows, 40)))
        shapes += [
            _PlaneShape(len(shapes) + i, group, width, rows) for i, width in enumerate(group_widths)
        ]

    blobs = _draw_blobs(draw, shapes)
    shares_pages = all(len({shape.group for shape in blob}) == 1 for blob in blobs)
    shares_pages &= draw(st.booleans())
    runs = _draw_runs(draw, shapes, num_pages, direction, shares_pages)
    pool_bytes, places = _draw_places(draw, blobs, num_pages)
    host_bytes, offsets = _draw_host_offsets(draw, shapes, runs)

    planes = [
        (
            *(shape.group, *places[shape.index][:4], shape.row_bytes, shape.rows_per_page),
            places[shape.index][4],
            offsets[shape.index],
        )
        for shape in draw(st.permutations(shapes))
    ]
    count = len(pool_bytes) + 1
    misalignment = draw(st.lists(st.integers(0, 63), min_size=count, max_size=count))
    return TransferCase(
        pool_bytes=tuple(pool_bytes),
        host_bytes=host_bytes,
        planes=np.array(planes, dtype=np.int64),
        runs=np.array(runs, dtype=np.int64),
        direction=direction,
        misalignment_bytes=tuple(misalignment),
    )


def cut_into_chunks(case: TransferCase, draw: st.DrawFn) -> TransferCase:
    """The same pages as chunks of one transfer. Each chunk has the planes again, in its own places.

    A run may be cut between two chunks. Then the chunks share a page.
    """
    num_chunks = draw(st.integers(1, 4))
    num_groups = int(case.planes[:, 0].max()) + 1
    runs = []
    for group, page, first_row, num_rows, _ in case.runs.tolist():
        cut = draw(st.integers(0, num_rows))
        for part_row, part_rows in ((first_row, cut), (first_row + cut, num_rows - cut)):
            if part_rows:
                chunk = draw(st.integers(0, num_chunks - 1))
                runs.append([chunk * num_groups + group, page, part_row, part_rows, 0])
    runs.sort(key=lambda run: run[0])
    rows_of_group: dict[int, int] = {}
    for run in runs:
        run[4] = rows_of_group.get(run[0], 0)
        rows_of_group[run[0]] = run[4] + run[3]
    planes = []
    host_bytes = 0
    for chunk in draw(st.permutations(range(num_chunks))):
        for plane in case.planes.tolist():
            group = chunk * num_groups + plane[0]
            planes.append([group, *plane[1:8], host_bytes])
            host_bytes += rows_of_group.get(group, 0) * plane[5]
            host_bytes += -host_bytes % HOST_ALIGNMENT_BYTES
    return replace(
        case,
        host_bytes=max(host_bytes, 1),
        planes=np.array(planes, np.int64),
        runs=np.array(runs, np.int64),
    )


def _draw_blobs(draw: st.DrawFn, shapes: list[_PlaneShape]) -> list[list[_PlaneShape]]:
    """Distribute planes over blobs. The planes of a blob share page 0 and the page stride."""
    numbers = st.integers(0, len(shapes) - 1)
    blobs: dict[int, list[_PlaneShape]] = {}
    for shape in shapes:
        blobs.setdefault(draw(numbers), []).append(shape)
    return list(blobs.values())


def _draw_places(
    draw: st.DrawFn, blobs: list[list[_PlaneShape]], num_pages: int
) -> tuple[list[int], dict[int, tuple[int, int, int, int, int]]]:
    """Put blobs into pools, one after the other, with gaps.

    Returns:
        The bytes of each pool. For each plane: pool, base, page stride, offset in the page, pages.
    """
    gaps = st.sampled_from((0, 0, 1, 7, 32, 64, 100))
    pool_bytes: list[int] = []
    places = {}
    for blob in blobs:
        if not pool_bytes or draw(st.booleans()):
            pool_bytes.append(draw(gaps))
        page_offsets: dict[int, int] = {}
        regions = {}
        for shape in blob:
            start = page_offsets.get(shape.group, 0) + draw(gaps)
            regions[shape.index] = start
            page_offsets[shape.group] = start + shape.page_bytes
        page_stride = max(page_offsets.values()) + draw(gaps)
        pages = num_pages + draw(st.integers(0, 2))
        base = pool_bytes[-1]
        for shape in blob:
            pool = len(pool_bytes) - 1
            places[shape.index] = (pool, base, page_stride, regions[shape.index], pages)
        pool_bytes[-1] = base + pages * page_stride + draw(gaps)
    return pool_bytes, places


def _draw_runs(
    draw: st.DrawFn,
    shapes: list[_PlaneShape],
    num_pages: int,
    direction: int,
    shares_pages: bool,
) -> list[tuple[int, int, int, int, int]]:
    """Draw at least one run. The runs are sorted by group.

    Different groups have different pages unless ``shares_pages``. The source may be read twice.
    """
    rows_per_page = {shape.group: shape.rows_per_page for shape in shapes}
    pages = draw(st.permutations(range(1, num_pages)))
    if draw(st.booleans()):
        pages.sort()
    groups = list(rows_per_page)
    if shares_pages:
        owned = {group: list(pages) for group in groups}
    else:
        owned = {group: list(pages[index :: len(groups)]) for index, group in enumerate(groups)}

    runs = []
    for group in groups:
        rows = rows_per_page[group]
        pieces = [(page, *part) for page in owned[group] for part in _draw_rows(draw, rows)]
        is_rereading = pieces and draw(st.integers(0, 4)) == 0
        if is_rereading and direction == PAGES_TO_HOST:
            pieces.append(draw(st.sampled_from(pieces)))
        if draw(st.booleans()):
            pieces = draw(st.permutations(pieces))
        host_row = draw(st.integers(0, 2))
        first_of_group = len(runs)
        for page, first, count in pieces:
            runs.append((group, page, first, count, host_row))
            host_row += count + draw(st.sampled_from((0, 0, 0, 1, 3)))
        if is_rereading and direction == HOST_TO_PAGES:
            shared = runs[first_of_group][4]
            runs[-1] = (*runs[-1][:4], shared)
        if draw(st.booleans()):
            runs[first_of_group:] = draw(st.permutations(runs[first_of_group:]))
    if not runs:
        group = groups[0]
        runs.append((group, pages[0], 0, rows_per_page[group], 0))
    return runs


def _draw_rows(draw: st.DrawFn, rows: int) -> list[tuple[int, int]]:
    """Draw the disjoint row ranges of one page that are moved: (first row, rows)."""
    kind = draw(st.sampled_from(("whole", "whole", "part", "two", "none")))
    if kind == "none":
        return []
    if kind == "part":
        first = draw(st.integers(0, rows - 1))
        return [(first, draw(st.integers(1, rows - first)))]
    if kind == "two" and rows > 1:
        middle = draw(st.integers(1, rows - 1))
        return [(0, draw(st.integers(1, middle))), (middle, draw(st.integers(1, rows - middle)))]
    return [(0, rows)]


def _draw_host_offsets(
    draw: st.DrawFn, shapes: list[_PlaneShape], runs: list[tuple[int, int, int, int, int]]
) -> tuple[int, dict[int, int]]:
    """Put the extents of the planes into the host buffer, in any order.

    Returns:
        The bytes of the host buffer, and the offset of each plane.
    """
    extent_rows: dict[int, int] = {}
    for group, _, _, num_rows, host_row in runs:
        extent_rows[group] = max(extent_rows.get(group, 0), host_row + num_rows)
    end = 0
    offsets = {}
    for shape in draw(st.permutations(shapes)):
        start = -(-end // HOST_ALIGNMENT_BYTES) * HOST_ALIGNMENT_BYTES
        start += HOST_ALIGNMENT_BYTES * draw(st.sampled_from((0, 0, 1)))
        offsets[shape.index] = start
        end = start + extent_rows.get(shape.group, 0) * shape.row_bytes
    return max(end, 1) + draw(st.sampled_from((0, 1, 64))), offsets


def uniform_case(
    *,
    row_bytes: int,
    rows_per_page: int,
    pages: Sequence[int],
    num_planes: int = 1,
    padding_bytes: int = 0,
    direction: int = PAGES_TO_HOST,
    misalignment_bytes: int = 0,
) -> TransferCase:
    """A simple case: one group, whole pages, and equal planes, each in its own pool."""
    num_pages = max(pages) + 1
    page_stride = row_bytes * rows_per_page + padding_bytes
    rows = len(pages) * rows_per_page
    extent = -(-rows * row_bytes // HOST_ALIGNMENT_BYTES) * HOST_ALIGNMENT_BYTES
    planes = [
        (0, plane, 0, page_stride, 0, row_bytes, rows_per_page, num_pages, plane * extent)
        for plane in range(num_planes)
    ]
    runs = [(0, page, 0, rows_per_page, i * rows_per_page) for i, page in enumerate(pages)]
    return TransferCase(
        pool_bytes=(page_stride * num_pages,) * num_planes,
        host_bytes=extent * num_planes,
        planes=np.array(planes, dtype=np.int64),
        runs=np.array(runs, dtype=np.int64),
        direction=direction,
        misalignment_bytes=(misalignment_bytes,) * (num_planes + 1),
    )


LARGE_CASES = [
    uniform_case(
        row_bytes=row_bytes,
        rows_per_page=rows_per_page,
        pages=pages,
        num_planes=num_planes,
        padding_bytes=padding,
        misalignment_bytes=padding % 64,
    )
    for row_bytes, rows_per_page, pages, num_planes, padding in (
        (9000, 7, (5, 1, 9, 2, 3), 8, 100),
        (33, 301, tuple(range(40, 0, -1)), 5, 0),
        (2, 997, tuple(range(1, 200)), 6, 31),
        (70_001, 1, (3, 2, 7, 1), 9, 1),
        (2048, 16, tuple(range(1, 33)), 4, 0),
    )
]
"""They are large enough to be split between threads. No task's end falls on a row's end."""
