# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The tables that describe a transfer.

There is one row per plane, per run and per pool. A transfer that rotates keys also has one row per
rotated plane and one per group. All tables are numpy arrays of `DTYPE`, two-dimensional and
C-contiguous. The enumerations name their columns, in order.

The C++ side reads the same columns (``csrc/include/kvext/descriptors.h``,
``csrc/include/kvext/rotation.h``). Only the C++ side decides which rows are valid.
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
    """The direction in which the bytes move."""

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

    Runs are sorted by group. A run applies to every plane of its group. Page 0 is the null page,
    which no run may name.
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
    """The types of keys that can be rotated. The rotation of each is computed in float32."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2

    @property
    def element_bytes(self) -> int:
        return 4 if self is RowDtype.FLOAT32 else 2


class PairStyle(IntEnum):
    """Says which two elements of a rotated part with ``n`` pairs are pair ``i``."""

    HALVES = 0
    """Elements ``i`` and ``n + i``, as in NeoX."""
    NEIGHBOURS = 1
    """Elements ``2 * i`` and ``2 * i + 1``, as in GPT-J."""


class RotationColumn(IntEnum):
    """Columns of ``rotations``, shape ``[num_rotations, 8]``: one plane whose rows are keys.

    A row of the plane has ``NUM_HEADS`` heads of ``HEAD_BYTES``. In each head, ``NUM_PAIRS`` pairs
    from byte ``OFFSET_BYTES`` on are rotated, by the frequencies from ``FIRST_FREQUENCY`` on.
    ``PLANE`` is a row of ``planes``. A plane without a row here moves unchanged.
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

    Rows ascend by group. Every group with rotated planes has a row. A shift of 0 keeps every bit.
    """

    GROUP = 0
    POSITIONS = 1
