# SPDX-License-Identifier: Apache-2.0
"""Which descriptors are valid, by the definition: Python integers, every pair compared.

Knows nothing of how the compiled module decides it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from support.transfer.cases import HOST_ALIGNMENT_BYTES, HOST_TO_PAGES, Table

MOST = 2**63 - 1

Span = tuple[int, int]


def is_valid(
    pools: Table, host_address: int, host_bytes: int, planes: Table, runs: Table, direction: int
) -> bool:
    """Whether a transfer may run; arguments as of ``_native.validate``."""
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
