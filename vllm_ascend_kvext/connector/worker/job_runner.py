# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Carries out one job of a worker: plans it, waits for the model's kernels, and moves the bytes.

A job whose plan lacks rows fails before a byte moves. If the bytes of a load cannot be moved, the
load is made again part by part, which shows the parts that cannot be read. The module knows no
queue and no steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm_ascend_kvext.connector.common.messages import LoadJob, PlaneDigest, StoreJob
from vllm_ascend_kvext.connector.worker.extension import ExtraMover
from vllm_ascend_kvext.connector.worker.plane_digests import PlaneDigests
from vllm_ascend_kvext.errors import ConnectorError
from vllm_ascend_kvext.layout.model import NULL_PAGE, KVLayout, StatePolicy
from vllm_ascend_kvext.layout.planner import TransferPlanner
from vllm_ascend_kvext.layout.row_map import MissingRows
from vllm_ascend_kvext.layout.rows import needed_rows
from vllm_ascend_kvext.layout.sharing import HostSharing
from vllm_ascend_kvext.layout.transfer_plan import TransferPlan
from vllm_ascend_kvext.token_range import TokenRange, union, without
from vllm_ascend_kvext.transfer.compute_fence import ComputeFence
from vllm_ascend_kvext.transfer.page_transfer import page_transfer
from vllm_ascend_kvext.transfer.placement import Placer, in_calling_thread
from vllm_ascend_kvext.transfer.pools import Pools
from vllm_ascend_kvext.transfer.schema import Direction, PlaneColumn, RunColumn

if TYPE_CHECKING:
    import torch

Job = StoreJob | LoadJob
Move = Callable[..., None]
"""A function like `page_transfer`, called with pools, host, planes, runs and direction, and with
``placement`` by name."""


MAX_FAILED_IN_A_ROW = 3
"""After this many failed parts in a row, the other parts of a load are not tried. Each failure may
take as long as a device's time limit. Other transfers, and perhaps a shutdown, wait for it."""


class Moved(NamedTuple):
    """What a job has moved.

    Attributes:
        num_bytes: The bytes of all planes.
        seconds: The time that the copies took.
        unreadable: The host offsets of the parts of a load that could not be read.
        error: Why a load was made part by part; None if it was not.
        digests: Of a store that is compared, see ``WorkerOutput.digests``.
    """

    num_bytes: int
    seconds: float
    unreadable: frozenset[int] = frozenset()
    error: Exception | None = None
    digests: tuple[PlaneDigest, ...] = ()


class JobRunner:
    """Moves bytes between the pages and the host memory of one worker. Threads may share it.

    Args:
        layout: The layout of the pages.
        states: Whether states are moved.
        pools: The storages of the pages.
        host: The host buffer. dtype: uint8, shape: [num_bytes].
        fence: Lets copies wait for the kernels of the model.
        placer: Says where copies on the host run; asked before each.
        move: The function that moves bytes. Tests pass another function.
        sharing: How the worker shares the host buffer; None if it does not.

    Attributes:
        mover: Moves the rows that jobs carry for an extension; None if it moves none.
    """

    def __init__(
        self,
        layout: KVLayout,
        states: StatePolicy,
        pools: Pools,
        host: torch.Tensor,
        fence: ComputeFence,
        placer: Placer = in_calling_thread,
        move: Move = page_transfer,
        sharing: HostSharing | None = None,
    ) -> None:
        self.layout = layout
        self.pools = pools
        self.fence = fence
        self.mover: ExtraMover | None = None
        self._states = states
        self._host = host
        self._placer = placer
        self._move = move
        self._sharing = sharing
        self._planner = TransferPlanner(layout, states, sharing)
        self._digests = None
        if sharing is not None:
            is_pinned = any(tensor.device.type != "cpu" for tensor in pools.tensors)
            self._digests = PlaneDigests(layout, states, sharing, is_pinned)

    def keep_apart(self) -> None:
        """From the next job on, keep the bytes of this worker apart from those of others.

        The caller has waited for running jobs.
        """
        if self._sharing is not None:
            self._planner = TransferPlanner(self.layout, self._states, self._sharing.apart())
        self._digests = None
        if self.mover is not None:
            self.mover.keep_apart()

    def run(self, job: Job, recorded: Any) -> Moved:
        """Move the bytes of a job, after the recorded kernels (see `ComputeFence`).

        Raises:
            ConnectorError: Rows are missing; nothing has been written.
            KvextError: Rows of an extension do not fit; none of these rows has been written.
            TokenRangeError: The job does not fit the layout; nothing has been written.
            DescriptorError: The job does not fit the layout; nothing has been written.
            BackendError: The device refused; the destination may have been written in part.
        """
        plans, missing = plan_job(self._planner, job)
        if missing:
            raise _incomplete(job, missing)
        if isinstance(job, StoreJob):
            moved = self._move_all(job, plans, recorded)
            if job.extras:
                self._mover().after_store(job.extras)
            if job.is_compared and self._digests is not None:
                digests = self._digests.of(job, partial(self._read, recorded))
                moved = moved._replace(digests=digests + self._digests_of_extras(job, recorded))
            return moved
        try:
            return self._move_all(job, plans, recorded)
        except Exception as error:
            return self._load_apart(job, recorded, error)

    def _digests_of_extras(self, job: StoreJob, recorded: Any) -> tuple[PlaneDigest, ...]:
        found: list[PlaneDigest] = []
        if job.extras:
            digests = self._mover().digests
            self.fence.run(recorded, lambda: found.extend(digests(job.extras, job.block_ids)))
        return tuple(found)

    def _read(self, recorded: Any, plan: TransferPlan, buffer: torch.Tensor) -> None:
        move = partial(self._move, self.pools, buffer, plan.planes, plan.runs)
        self.fence.run(recorded, partial(move, Direction.PAGES_TO_HOST, placement=self._placer()))

    def _move_all(self, job: Job, plans: Iterable[TransferPlan], recorded: Any) -> Moved:
        is_store = isinstance(job, StoreJob)
        direction = Direction.PAGES_TO_HOST if is_store else Direction.HOST_TO_PAGES
        num_bytes = 0
        seconds = 0.0
        for plan in plans:
            if not len(plan.runs):
                continue
            num_bytes += _num_bytes(plan)
            seconds += self.fence.run(
                recorded,
                partial(
                    self._move,
                    self.pools,
                    self._host,
                    plan.planes,
                    plan.runs,
                    direction,
                    placement=self._placer(),
                ),
            )
        if not job.extras:
            return Moved(num_bytes, seconds)
        mover = self._mover()
        move = mover.store if is_store else mover.load
        of_extras: list[int] = []
        seconds += self.fence.run(
            recorded, lambda: of_extras.append(move(job.extras, job.block_ids))
        )
        return Moved(num_bytes + sum(of_extras), seconds)

    def _mover(self) -> ExtraMover:
        if self.mover is None:
            raise ConnectorError(
                "extras: expected a worker that can move the rows of an extension, found one that "
                "has refused to. Plan no such rows for it."
            )
        return self.mover

    def _load_apart(self, job: LoadJob, recorded: Any, error: Exception) -> Moved:
        """Load each part by itself after the load of all parts has failed.

        Raises:
            Exception: The given error, if no part can be read.
        """
        num_bytes = 0
        seconds = 0.0
        num_in_a_row = 0
        unreadable: set[int] = set()
        for part in _parts_of(job):
            moved = self._try(part, recorded) if num_in_a_row < MAX_FAILED_IN_A_ROW else None
            if moved is None:
                num_in_a_row += 1
                unreadable |= part.places
                continue
            num_in_a_row = 0
            num_bytes += moved.num_bytes
            seconds += moved.seconds
        if unreadable == job.places:
            raise error
        return Moved(num_bytes, seconds, frozenset(unreadable), error)

    def _try(self, part: LoadJob, recorded: Any) -> Moved | None:
        """Load one part of a load. Returns what it has moved; None if it cannot be read.

        Rows that the plan of the part lacks are rows of the other parts, so they are no error.
        """
        try:
            plans, _ = plan_job(self._planner, part)
            return self._move_all(part, plans, recorded)
        except Exception:
            return None

    def pages_to_fill(self, job: LoadJob) -> set[int]:
        """The block ids of the pages that a load is to fill, if its tables have them.

        The method never raises, even if the job is wrong.
        """
        found: set[int] = set()
        for group in self.layout.groups:
            if group.kv_cache_group_id >= len(job.block_ids):
                continue
            table = job.block_ids[group.kv_cache_group_id]
            rows = needed_rows(group, job.tokens, self._states)
            filled = [(each.first_tokens, each.end_tokens) for each in job.extras]
            filled.append((rows.start * group.tokens_per_row, rows.stop * group.tokens_per_row))
            for first_tokens, end_tokens in filled:
                first_page = first_tokens // group.tokens_per_page - table.first_page
                end_page = -(-end_tokens // group.tokens_per_page) - table.first_page
                found.update(table.ids[max(0, first_page) : max(0, end_page)])
        return found - {NULL_PAGE}


def plan_job(planner: TransferPlanner, job: Job) -> tuple[list[TransferPlan], list[MissingRows]]:
    """The transfers of a job, in the order of its calls, and the rows that are missing."""
    if isinstance(job, StoreJob):
        if not job.chunks:
            return [], []
        store = planner.plan_store(job.chunks, job.block_ids)
        return [store], list(store.missing)
    load = planner.plan_load(job.stored, job.tokens, job.block_ids)
    holes = union(job.holes)
    missing = [rows for rows in load.missing if without([rows.tokens], holes)]
    of_holes = [
        planner.plan_load(
            tails.stored, TokenRange(0, tails.boundary_tokens), tails.block_ids, tails.groups
        )
        for tails in job.hole_tails
    ]
    missing += [rows for plan in of_holes for rows in plan.missing]
    return [load, *of_holes], missing


def _incomplete(job: Job, missing: list[MissingRows]) -> ConnectorError:
    what = "store" if isinstance(job, StoreJob) else "load"
    first = missing[0]
    return ConnectorError(
        f"{what}: expected all rows that resuming needs, found {len(missing)} ranges without, the "
        f"first is tokens {first.tokens.first_tokens} to {first.tokens.end_tokens - 1} of KV cache "
        f"group {first.kv_cache_group_id}: no page or no stored chunk has them; compute "
        "these tokens"
    )


def _parts_of(job: LoadJob) -> Iterator[LoadJob]:
    """Divide a load into one load job per entry."""
    nothing = replace(job, stored=(), hole_tails=(), extras=())
    for stored in job.stored:
        yield replace(nothing, stored=(stored,))
    for tails in job.hole_tails:
        for stored in tails.stored:
            yield replace(nothing, hole_tails=(replace(tails, stored=(stored,)),))
    for rows in job.extras:
        yield replace(nothing, extras=(rows,))


def _num_bytes(plan: TransferPlan) -> int:
    """The bytes of a plan: the rows of each group times the row bytes of its planes."""
    group_of_plane = plan.planes[:, PlaneColumn.GROUP]
    rows_of_group = np.zeros(int(group_of_plane.max()) + 1, np.int64)
    np.add.at(rows_of_group, plan.runs[:, RunColumn.GROUP], plan.runs[:, RunColumn.NUM_ROWS])
    return int((rows_of_group[group_of_plane] * plan.planes[:, PlaneColumn.ROW_BYTES]).sum())
