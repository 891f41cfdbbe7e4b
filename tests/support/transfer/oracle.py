# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The meaning of a transfer, run by run, for tests and benchmarks. The code is slow and simple."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_ascend_kvext.transfer.schema import Direction, Table

Bytes = npt.NDArray[np.uint8]


def oracle_transfer(
    pools: Sequence[Bytes], host: Bytes, planes: Table, runs: Table, direction: Direction
) -> None:
    """Move the bytes of a valid transfer. For the tables, see `PlaneColumn` and `RunColumn`."""
    for group, pool, base, stride, region, row_bytes, rows, pages, offset in planes.tolist():
        for run_group, page, first, count, host_row in runs.tolist():
            if run_group != group:
                continue
            assert 0 < page < pages and 0 <= first < first + count <= rows
            num_bytes = count * row_bytes
            begin = base + page * stride + region + first * row_bytes
            in_page = pools[pool][begin : begin + num_bytes]
            begin = offset + host_row * row_bytes
            in_host = host[begin : begin + num_bytes]
            assert len(in_page) == len(in_host) == num_bytes
            if direction == Direction.PAGES_TO_HOST:
                in_host[:] = in_page
            else:
                in_page[:] = in_host
