# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Builds the table that the AscendC kernel reads. A core can walk it without a search.

The columns are those of ``csrc/ascend/work_table.h``: header, tasks (planes that have runs), runs.
The work of each task is cut into units of about equal size. Units are numbered through all tasks,
and core ``i`` of ``n`` takes every ``n``-th unit. So no core needs to know what another core does.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

import numpy as np

from vllm_ascend_kvext.transfer.backend import Transfer
from vllm_ascend_kvext.transfer.schema import DTYPE, PlaneColumn, PoolColumn, RunColumn, Table


class KernelLimits(ctypes.Structure):
    """The limits that the kernel was compiled with, as the launcher library reports them.

    A unit moves at most one tile. Runs that share a unit begin at multiples of
    ``data_block_bytes``.
    """

    _fields_ = (
        ("tile_bytes", ctypes.c_int64),
        ("data_block_bytes", ctypes.c_int64),
        ("max_runs_per_unit", ctypes.c_int64),
    )


class HeaderColumn(IntEnum):
    NUM_TASKS = 0
    NUM_UNITS = 1
    DIRECTION = 2


class TaskColumn(IntEnum):
    FIRST_UNIT = 0
    FIRST_RUN = 1
    NUM_RUNS = 2
    RUNS_PER_UNIT = 3
    TILES_PER_RUN = 4
    PAGE_ADDRESS = 5
    PAGE_STRIDE = 6
    ROW_BYTES = 7
    HOST_ADDRESS = 8


_RUN_COLUMNS = (RunColumn.PAGE, RunColumn.FIRST_ROW, RunColumn.NUM_ROWS, RunColumn.HOST_ROW)


def build_work_table(
    transfer: Transfer, *, host_address: int, num_cores: int, limits: KernelLimits
) -> Table:
    """The kernel's table for a valid transfer. shape: [3 + 9 * num_tasks + 4 * num_runs].

    Addresses of pools and host buffer are addresses of the device.
    """
    groups, first_runs, num_runs = np.unique(
        transfer.runs[:, RunColumn.GROUP], return_index=True, return_counts=True
    )
    planes = transfer.planes[np.isin(transfer.planes[:, PlaneColumn.GROUP], groups)]
    group_of_plane = np.searchsorted(groups, planes[:, PlaneColumn.GROUP])
    row_bytes = planes[:, PlaneColumn.ROW_BYTES]

    tasks = np.empty((len(planes), len(TaskColumn)), DTYPE)
    tasks[:, TaskColumn.FIRST_RUN] = first_runs[group_of_plane]
    tasks[:, TaskColumn.NUM_RUNS] = num_runs[group_of_plane]
    tasks[:, TaskColumn.PAGE_ADDRESS] = (
        transfer.pools[planes[:, PlaneColumn.POOL], PoolColumn.ADDRESS]
        + planes[:, PlaneColumn.BASE_BYTES]
        + planes[:, PlaneColumn.REGION_OFFSET_BYTES]
    )
    tasks[:, TaskColumn.PAGE_STRIDE] = planes[:, PlaneColumn.PAGE_STRIDE_BYTES]
    tasks[:, TaskColumn.ROW_BYTES] = row_bytes
    tasks[:, TaskColumn.HOST_ADDRESS] = host_address + planes[:, PlaneColumn.HOST_OFFSET_BYTES]

    longest_rows = np.maximum.reduceat(transfer.runs[:, RunColumn.NUM_ROWS], first_runs)
    num_units = _cut_into_units(tasks, longest_rows[group_of_plane] * row_bytes, num_cores, limits)
    header = np.array((len(tasks), num_units, transfer.direction), DTYPE)
    return np.concatenate((header, tasks.ravel(), transfer.runs[:, _RUN_COLUMNS].ravel()))


def _cut_into_units(
    tasks: Table, longest_run_bytes: Table, num_cores: int, limits: KernelLimits
) -> int:
    """Fill the columns that assign work to units, and return the number of units.

    A task whose longest run fills a tile gets one unit per tile of each run. In other tasks several
    runs share a unit: as many as fit, but not so many that some cores have no unit.
    """
    runs = tasks[:, TaskColumn.NUM_RUNS]
    tiles_per_run = -(-longest_run_bytes // limits.tile_bytes)
    blocks_per_run = -(-longest_run_bytes // limits.data_block_bytes)
    fitting_runs = limits.tile_bytes // (blocks_per_run * limits.data_block_bytes)
    fair_runs = max(1, int(runs.sum()) // num_cores)
    runs_per_unit = np.clip(fitting_runs, 1, min(fair_runs, limits.max_runs_per_unit))

    units = -(-runs // runs_per_unit) * tiles_per_run
    tasks[:, TaskColumn.TILES_PER_RUN] = tiles_per_run
    tasks[:, TaskColumn.RUNS_PER_UNIT] = runs_per_unit
    tasks[:, TaskColumn.FIRST_UNIT] = np.cumsum(units) - units
    return int(units.sum())
