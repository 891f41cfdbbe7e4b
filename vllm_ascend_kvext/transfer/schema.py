# SPDX-License-Identifier: Apache-2.0
"""The tables that describe a transfer: one row per plane, per run and per pool.

All tables are numpy arrays of `DTYPE`, two-dimensional and C-contiguous; the enumerations are their
columns, in order. The C++ side reads the same columns (``csrc/include/kvext/descriptors.h``).
Which rows are valid is decided there, in one place.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

DTYPE = np.int64
HOST_ALIGNMENT_BYTES = 64

Table = npt.NDArray[np.int64]


class Direction(IntEnum):
    """Which way the bytes go."""

    PAGES_TO_HOST = 0
    HOST_TO_PAGES = 1


class PlaneColumn(IntEnum):
    """Columns of ``planes``, shape ``[num_planes, 9]``: one region of bytes per page.

    Row ``r`` of page ``q`` lies at ``pool + BASE_BYTES + q * PAGE_STRIDE_BYTES +
    REGION_OFFSET_BYTES + r * ROW_BYTES``; host row ``h`` at ``host + HOST_OFFSET_BYTES +
    h * ROW_BYTES``.
    """

    GROUP = 0
    POOL = 1
    BASE_BYTES = 2
    PAGE_STRIDE_BYTES = 3
    REGION_OFFSET_BYTES = 4
    ROW_BYTES = 5
    ROWS_PER_PAGE = 6
    NUM_PAGES = 7
    HOST_OFFSET_BYTES = 8


class RunColumn(IntEnum):
    """Columns of ``runs``, shape ``[num_runs, 5]``: consecutive rows of one page.

    Sorted by group. A run holds for every plane of its group. Page 0 is the null page, which no
    run may name.
    """

    GROUP = 0
    PAGE = 1
    FIRST_ROW = 2
    NUM_ROWS = 3
    HOST_ROW = 4


class PoolColumn(IntEnum):
    """Columns of ``pools``, shape ``[num_pools, 2]``: one registered storage."""

    ADDRESS = 0
    NUM_BYTES = 1
