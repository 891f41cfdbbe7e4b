# SPDX-License-Identifier: Apache-2.0
"""The tables that describe a transfer: one row per plane, per run and per pool; where keys are
rotated on the way, also per plane that is, and per group.

All tables are numpy arrays of `DTYPE`, two-dimensional and C-contiguous; the enumerations are their
columns, in order. The C++ side reads the same columns (``csrc/include/kvext/descriptors.h``,
``csrc/include/kvext/rotation.h``).
Which rows are valid is decided there, in one place.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

DTYPE = np.int64
HOST_ALIGNMENT_BYTES = 64

Table = npt.NDArray[np.int64]
Frequencies = npt.NDArray[np.float64]


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


class RowDtype(IntEnum):
    """The types of keys that can be rotated; float32 is computed with for all of them."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2

    @property
    def element_bytes(self) -> int:
        return 4 if self is RowDtype.FLOAT32 else 2


class PairStyle(IntEnum):
    """Which two elements of a rotated part of ``n`` pairs are pair ``i``."""

    HALVES = 0
    """``i`` and ``n + i``: NeoX."""
    NEIGHBOURS = 1
    """``2 * i`` and ``2 * i + 1``: GPT-J."""


class RotationColumn(IntEnum):
    """Columns of ``rotations``, shape ``[num_rotations, 8]``: one plane whose rows are keys.

    A row of the plane is ``NUM_HEADS`` heads of ``HEAD_BYTES``. In each of them ``NUM_PAIRS`` pairs
    from byte ``OFFSET_BYTES`` on are rotated, by the frequencies from ``FIRST_FREQUENCY`` on.
    ``PLANE`` is a row of ``planes``; what no row names moves as it is.
    """

    PLANE = 0
    DTYPE = 1
    PAIR_STYLE = 2
    NUM_HEADS = 3
    HEAD_BYTES = 4
    OFFSET_BYTES = 5
    NUM_PAIRS = 6
    FIRST_FREQUENCY = 7


class ShiftColumn(IntEnum):
    """Columns of ``shifts``, shape ``[num_shifts, 2]``: by how many positions a group's keys move.

    Ascending by group. Every group that moves rotated planes has one; 0 keeps every bit.
    """

    GROUP = 0
    POSITIONS = 1
