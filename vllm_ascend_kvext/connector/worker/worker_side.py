# SPDX-License-Identifier: Apache-2.0
"""The worker side of the connector: what one worker does with the jobs of a step.

The worker side decides nothing. The scheduler side says what is moved, and where to. A step::

    run_before_step   stores that must have ended before the step overwrites their pages
    begin_step        loads begin, and stores if nothing is computed
    (the forward)     an extension may look into it
    end_of_forward    stores begin
    end_step          what has ended since the last time, also of earlier steps

The last two may come in either order. The model's thread calls all of them. The module does not
import vLLM, and reads its configuration by attributes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vllm_ascend_kvext.connector.common.messages import (
    ConnectorMetadata,
    Direction,
    StoreJob,
    Traffic,
    WorkerLayout,
    WorkerOutput,
)
from vllm_ascend_kvext.connector.common.option_values import CONFIG, wrong_value
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.connector.worker.extension import RegisteredPages, WorkerExtension
from vllm_ascend_kvext.connector.worker.host_buffer import HostBuffer
from vllm_ascend_kvext.connector.worker.job_runner import Job, JobRunner, Move, Moved
from vllm_ascend_kvext.connector.worker.secondary_tier import SecondaryTierWorker
from vllm_ascend_kvext.connector.worker.transfer_thread import TransferThread
from vllm_ascend_kvext.errors import ConnectorError, LayoutError, SettingsError
from vllm_ascend_kvext.layout.build import build_layout
from vllm_ascend_kvext.layout.model import KVLayout
from vllm_ascend_kvext.layout.views import device_type_of, storage_tensors
from vllm_ascend_kvext.layout.worker_config import read_nz_layers
from vllm_ascend_kvext.settings import parse_is_bundled, parse_uses_ascend_kernel
from vllm_ascend_kvext.transfer.cpus import as_ranges
from vllm_ascend_kvext.transfer.devices import CUDA, transfers_on
from vllm_ascend_kvext.transfer.page_transfer import page_transfer
from vllm_ascend_kvext.transfer.placement import CopyPlacement, default_placement, given_cpus
from vllm_ascend_kvext.transfer.pools import Pools

logger = logging.getLogger("vllm.ascend_kvext.connector")


@dataclass(frozen=True, slots=True)
class EndedJobs:
    """The jobs that have ended since the last report. All attributes belong to the same jobs.

    Attributes:
        loads: The requests whose load has ended, well or not.
        failed_pages: The block ids that failed loads should have filled; no null block.
    """

    loads: frozenset[str]
    failed_pages: frozenset[int]
    results: WorkerOutput


class WorkerSide:
    """Stores and loads the pages of one worker.

    Args:
        vllm_config: vLLM's ``VllmConfig``, as the worker has it.
        kv_cache_config: vLLM's ``KVCacheConfig``, as the worker has it.
        options: The options of the connector.
        move: Moves the bytes. By default the transfer op, as the process's settings want it.
        extension: Moves rows of its own; None if nothing does.
        secondary: Moves objects between host memory and the tier behind it; None if there is none.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        options: ConnectorOptions,
        *,
        move: Move | None = None,
        extension: WorkerExtension | None = None,
        secondary: SecondaryTierWorker | None = None,
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._options = options
        self._move = move or _transfer_op(os.environ)
        self._extension = extension or WorkerExtension()
        self._secondary = secondary or SecondaryTierWorker()
        self._thread = TransferThread(self._run, self._move_to_copy_cpus)
        self._placement: CopyPlacement | None = None
        self._host: HostBuffer | None = None
        self._runner: JobRunner | None = None
        self._stores_after_forward: tuple[StoreJob, ...] = ()

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Take note of the tensors that hold the pages, and allocate host memory for them.

        After a reset, a second call takes the pages at their new addresses. Stores and loads that
        have not begun then fail. What lies in host memory stays.

        Raises:
            GroupError: If the config is not understood.
            LayoutError: If config and tensors contradict each other; with pipeline or context
                parallelism; or if the layout of the pages differs from the layout registered first.
            BackendError: If no backend serves the device.
            HostMemoryError: If the host memory cannot be had.
            SettingsError: If the options do not allow the device, copies cannot run on the CPUs
                that they name, or the secondary tier cannot be used.
            CompiledModuleError: If the compiled module cannot be had.
        """
        device_type = device_type_of(kv_caches)
        transfers = transfers_on(device_type)
        if self._runner is None:
            require_allowed(device_type, self._options)
            _warn_of_trial(device_type)
        nz_layers = read_nz_layers(self._vllm_config, kv_caches)
        layout = build_layout(
            self._kv_cache_config,
            kv_caches,
            nz_layers,
            needs_token_rows=self._extension.needs_token_rows,
        )
        tensors = storage_tensors(layout, kv_caches)
        if self._runner is not None:
            _require_same(self._runner.layout, layout)
            self._thread.drop()
            self._runner.pools.register(tensors)
            self._register_extension(self._runner, kv_caches)
            return
        device = tensors[0].device
        fence = transfers.make_fence(device)
        pools = Pools(tensors)
        self._placement = placement = _placement(self._options, device.type)
        self._host = host = HostBuffer.allocate(self._options.host_memory_bytes_per_worker, device)
        self._runner = JobRunner(
            layout, self._options.state_policy, pools, host.tensor, fence, placement, self._move
        )
        pages = self._register_extension(self._runner, kv_caches)
        self._secondary.register(pages, self._move_to_copy_cpus)

    def _register_extension(
        self, runner: JobRunner, kv_caches: Mapping[str, Any]
    ) -> RegisteredPages:
        assert self._host is not None
        pages = RegisteredPages(
            runner.layout,
            kv_caches,
            runner.pools,
            self._host.tensor,
            self._placement,
            self._move,
        )
        self._extension.register(pages)
        runner.mover = self._extension.mover
        return pages

    def describe(self) -> WorkerLayout:
        """What the scheduler side has to know of this worker.

        Raises:
            ConnectorError: If nothing is registered.
        """
        if self._runner is None or self._host is None:
            raise _nothing_registered()
        return WorkerLayout(
            self._runner.layout,
            self._host.num_bytes,
            self._extension.describe(),
            self._secondary.describe(),
        )

    def run_before_step(self, jobs: ConnectorMetadata) -> None:
        """Carry out ``stores_before``. On return, these stores have ended, well or not.

        They do not wait for stores in the queue.
        """
        if jobs.stores_before:
            self._thread.run_now(jobs.stores_before, self._record())

    def begin_step(self, jobs: ConnectorMetadata) -> None:
        """Begin the loads of a step, and also its stores if it computes nothing.

        Stores of an earlier step whose forward did not end are reported as failed, because the
        content of their pages is unknown.
        """
        self._thread.fail(self._stores_after_forward, "the forward of their step did not end")
        self._extension.begin_step(jobs.extras)
        self._stores_after_forward = jobs.stores if jobs.has_forward else ()
        self._submit(jobs.loads if jobs.has_forward else (*jobs.loads, *jobs.stores))
        self._secondary.begin_step(jobs.secondary)

    def end_of_forward(self) -> None:
        """Begin the stores of the step whose forward is enqueued, if there is such a step."""
        stores, self._stores_after_forward = self._stores_after_forward, ()
        self._submit(stores)

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until a job has ended that is not reported yet, or until no job is under way.

        Steps that compute nothing call this, because vLLM would make the next step at once.
        """
        if not self._secondary.wait_for_end(timeout_s):
            self._thread.wait_for_end(timeout_s)

    def end_step(self) -> EndedJobs:
        """What has ended since the last call. Every job is reported once."""
        loads: set[str] = set()
        failed_pages: set[int] = set()
        results = WorkerOutput()
        for job, moved in self._thread.take_ended():
            if isinstance(job, StoreJob):
                results.jobs_ended[job.number] = 1
                if moved is None:
                    results.failed_jobs.add(job.number)
            else:
                loads.add(job.request_id)
                unreadable = job.places if moved is None else set(moved.unreadable)
                if moved is None or (unreadable and not job.may_lack):
                    results.failed_loads.add(job.request_id)
                    if self._runner is not None:
                        failed_pages |= self._runner.pages_to_fill(job)
                if unreadable:
                    results.unreadable[job.request_id] = unreadable
            if moved is not None:
                direction: Direction = "store" if isinstance(job, StoreJob) else "load"
                results.traffic[direction].add(Traffic(moved.num_bytes, moved.seconds, 1))
        results.extras = self._extension.end_step()
        moved_behind = self._secondary.end_step()
        if moved_behind is not None:
            results.add(moved_behind)
        return EndedJobs(frozenset(loads), frozenset(failed_pages), results)

    def end_transfers(self) -> None:
        """Wait for running transfers, and fail queued ones.

        Until the next step, nothing reads or writes a page. So the memory of the pages may be taken
        away, as sleep mode does. What lies in host memory stays.
        """
        self._thread.drop()

    def shutdown(self) -> None:
        """Wait for running transfers, fail queued ones, and end the thread. Idempotent."""
        self._thread.shutdown()
        self._secondary.shutdown()
        self._extension.shutdown()
        if self._host is not None:
            self._host.unmap()

    def _submit(self, jobs: tuple[Job, ...]) -> None:
        if jobs:
            self._thread.submit(jobs, self._record())

    def _record(self) -> object:
        return None if self._runner is None else self._runner.fence.record()

    def _run(self, job: Job, recorded: object) -> Moved:
        if self._runner is None:
            raise _nothing_registered()
        return self._runner.run(job, recorded)

    def _move_to_copy_cpus(self) -> None:
        """Move the calling thread to the CPUs on which copies run.

        A new thread inherits the CPUs of the thread that starts it, and the model may run on them.
        The calling thread makes plans and small copies itself.
        """
        if self._placement is not None:
            os.sched_setaffinity(0, self._placement.cpus)


def require_allowed(device_type: str, options: ConnectorOptions) -> None:
    """Raise `SettingsError` for a device that no test has had, unless the options allow it."""
    if device_type == CUDA and not options.allow_cuda:
        raise wrong_value(
            "allow_cuda",
            False,
            "true, to use the connector with pages on a GPU, which it has never run on",
            "Set it to true to try it, or leave the connector out.",
        )


def _warn_of_trial(device_type: str) -> None:
    if device_type == CUDA:
        logger.warning(
            "KvextConnector has never run on a GPU (allow_cuda). Compare answers with those of an "
            "engine without it before you rely on it."
        )


def require_given(options: ConnectorOptions) -> None:
    """Raise `SettingsError` if copies cannot run on the CPUs that the options name."""
    if options.copy_cpus is None:
        return
    given = given_cpus()
    missing = frozenset(options.copy_cpus) - given
    if missing:
        raise SettingsError(
            f"{CONFIG}: copy_cpus: expected CPUs that the kernel gives to this worker, which "
            f"are {as_ranges(given)}, found {as_ranges(missing)} among them. Leave these out, "
            "or widen the process's cpuset."
        )


def _transfer_op(environ: Mapping[str, str]) -> Move:
    return partial(
        page_transfer,
        is_bundled=parse_is_bundled(environ),
        uses_kernel=parse_uses_ascend_kernel(environ),
    )


def _placement(options: ConnectorOptions, device_type: str) -> CopyPlacement | None:
    """Where transfers run; None if a device copies, and no CPUs are named for the thread."""
    require_given(options)
    if options.copy_cpus is not None:
        return CopyPlacement.on(options.copy_cpus)
    return default_placement(os.environ) if device_type == "cpu" else None


def _require_same(registered: KVLayout, found: KVLayout) -> None:
    """Refuse pages that do not fit what was planned and stored so far."""
    layouts = [
        replace(each, storages=tuple(replace(storage, address=0) for storage in each.storages))
        for each in (registered, found)
    ]
    if layouts[0] != layouts[1]:
        raise LayoutError(
            f"kv_caches: expected the pages registered first at other addresses "
            f"({registered.num_pages} pages, {registered.num_planes} planes), found pages that are "
            f"laid out otherwise ({found.num_pages} pages, {found.num_planes} planes); start a new "
            "engine for another layout"
        )


def _nothing_registered() -> ConnectorError:
    return ConnectorError(
        "kv_caches: expected the tensors of a worker, found none; call register before a step"
    )
