# SPDX-License-Identifier: Apache-2.0
"""Carries out one job of a worker: plans it, lets the model's kernels finish, moves the bytes.

All or nothing: a job whose plan lacks anything fails before a byte moves. Knows no queue and no
steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm_ascend_kvext.connector.errors import ConnectorError
from vllm_ascend_kvext.connector.messages import LoadJob, StoreJob
from vllm_ascend_kvext.layout.model import KVLayout, StatePolicy
from vllm_ascend_kvext.layout.page_runs import NULL_PAGE
from vllm_ascend_kvext.layout.planner import TransferPlanner
from vllm_ascend_kvext.layout.rows import TokenRange, needed_rows
from vllm_ascend_kvext.layout.stored_rows import MissingRows
from vllm_ascend_kvext.layout.transfer_plan import LoadPlan, StorePlan
from vllm_ascend_kvext.transfer.compute_fence import ComputeFence
from vllm_ascend_kvext.transfer.page_transfer import page_transfer
from vllm_ascend_kvext.transfer.placement import CopyPlacement
from vllm_ascend_kvext.transfer.pools import Pools
from vllm_ascend_kvext.transfer.schema import Direction, PlaneColumn, RunColumn

if TYPE_CHECKING:
    import torch

Job = StoreJob | LoadJob
Move = Callable[..., None]
"""As `page_transfer`: pools, host, planes, runs, direction; ``placement`` by its name."""


class IncompleteJobError(ConnectorError, LookupError):
    """A job would leave out rows that resuming needs; nothing has been written."""


class Moved(NamedTuple):
    """What a job has moved.

    Attributes:
        num_bytes: Of all planes.
        seconds: That the copies took.
    """

    num_bytes: int
    seconds: float


class JobRunner:
    """Moves bytes between the pages and the host memory of one worker. Threads may share it.

    Args:
        layout: Of the pages.
        states: What becomes of state groups.
        pools: The storages of the layout.
        host: The host buffer. dtype: uint8, shape: [num_bytes].
        fence: Between the model's kernels and copies.
        placement: Where copies on the host run; None is the default of `page_transfer`.
        move: Moves the bytes; tests hand in another.
    """

    def __init__(
        self,
        layout: KVLayout,
        states: StatePolicy,
        pools: Pools,
        host: torch.Tensor,
        fence: ComputeFence,
        placement: CopyPlacement | None = None,
        move: Move = page_transfer,
    ) -> None:
        self.layout = layout
        self.pools = pools
        self.fence = fence
        self._states = states
        self._host = host
        self._placement = placement
        self._move = move
        self._planner = TransferPlanner(layout, states)
        self._planning = threading.Lock()  # A planner remembers what it has planned.

    def run(self, job: Job, recorded: Any) -> Moved:
        """Move what a job names, after the kernels that were recorded.

        Args:
            job: What to move.
            recorded: See `ComputeFence`.

        Raises:
            IncompleteJobError: Rows are missing; nothing has been written.
            TokenRangeError: The job does not fit the layout; nothing has been written.
            RowMapError: The same.
            DescriptorError: The same.
            BackendError: The device refused; its destination may have been written in part.
        """
        plan: StorePlan | LoadPlan
        if isinstance(job, StoreJob):
            direction = Direction.PAGES_TO_HOST
            with self._planning:
                plan = self._planner.plan_store(job.chunks, job.block_ids)
            missing = [rows for of_chunk in plan.missing for rows in of_chunk]
        else:
            direction = Direction.HOST_TO_PAGES
            with self._planning:
                plan = self._planner.plan_load(job.stored, job.tokens, job.block_ids)
            missing = [rows for rows in plan.missing if not _is_in(rows, job.holes)]
        if missing:
            raise _incomplete(job, missing)
        if not len(plan.runs):
            return Moved(0, 0.0)
        seconds = self.fence.run(
            recorded,
            partial(
                self._move,
                self.pools,
                self._host,
                plan.planes,
                plan.runs,
                direction,
                placement=self._placement,
            ),
        )
        return Moved(_num_bytes(plan), seconds)

    def pages_to_fill(self, job: LoadJob) -> set[int]:
        """Block ids of the pages that a load is to fill, as far as its tables name them.

        Does not raise, whatever is wrong with the job.
        """
        found: set[int] = set()
        for group in self.layout.groups:
            rows = needed_rows(group, job.tokens, self._states)
            if rows and group.scheduler_group < len(job.block_ids):
                table = job.block_ids[group.scheduler_group]
                first_page = rows.start // group.rows_per_page - table.first_page
                end_page = -(-rows.stop // group.rows_per_page) - table.first_page
                found.update(table.ids[max(0, first_page) : max(0, end_page)])
        return found - {NULL_PAGE}


def _incomplete(job: Job, missing: list[MissingRows]) -> IncompleteJobError:
    what = "store" if isinstance(job, StoreJob) else "load"
    first = missing[0]
    return IncompleteJobError(
        f"{what}: expected all rows that resuming needs, found {len(missing)} ranges without, the "
        f"first is tokens {first.tokens.first} to {first.tokens.end - 1} of KV cache group "
        f"{first.scheduler_group}: no page or no stored chunk has them; compute these tokens"
    )


def _is_in(rows: MissingRows, holes: tuple[TokenRange, ...]) -> bool:
    tokens = rows.tokens
    return any(hole.first <= tokens.first and tokens.end <= hole.end for hole in holes)


def _num_bytes(plan: StorePlan | LoadPlan) -> int:
    """Every run of a group times every plane of that group."""
    group_of_plane = plan.planes[:, PlaneColumn.GROUP]
    rows_of_group = np.zeros(int(group_of_plane.max()) + 1, np.int64)
    np.add.at(rows_of_group, plan.runs[:, RunColumn.GROUP], plan.runs[:, RunColumn.NUM_ROWS])
    return int((rows_of_group[group_of_plane] * plan.planes[:, PlaneColumn.ROW_BYTES]).sum())
