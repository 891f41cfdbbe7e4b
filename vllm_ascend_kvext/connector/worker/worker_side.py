# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

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
from vllm_ascend_kvext.connector.worker.shared_arena import HostPeers
from vllm_ascend_kvext.connector.worker.transfer_thread import TransferThread
from vllm_ascend_kvext.errors import ConnectorError, LayoutError, SettingsError
from vllm_ascend_kvext.layout.build import build_layout
from vllm_ascend_kvext.layout.model import KVLayout
from vllm_ascend_kvext.layout.rank_contents import read_rank_contents
from vllm_ascend_kvext.layout.sharing import HostSharing, share_planes
from vllm_ascend_kvext.layout.views import device_type_of, storage_tensors
from vllm_ascend_kvext.layout.worker_config import read_nz_layers
from vllm_ascend_kvext.settings import parse_is_bundled, parse_uses_ascend_kernel
from vllm_ascend_kvext.transfer.cpus import as_ranges, cpus_of_worker
from vllm_ascend_kvext.transfer.devices import CUDA, transfers_on
from vllm_ascend_kvext.transfer.errors import PlacementError
from vllm_ascend_kvext.transfer.host_cpus import HostCpus, bind_thread
from vllm_ascend_kvext.transfer.page_transfer import page_transfer
from vllm_ascend_kvext.transfer.placement import (
    CopyPlacement,
    PlacementChoice,
    Placer,
    in_calling_thread,
)
from vllm_ascend_kvext.transfer.pools import Pools

if TYPE_CHECKING:
    import torch

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
        meet: Finds the workers that may share host memory with this one; None if there are none.
            All workers of the engine call it.
        extension: Moves rows of its own; None if nothing does.
        secondary: Moves objects between host memory and the tier behind it; None if there is none.
        host_cpus: The machine; None for this one.
        planned_cpus: The CPUs to which the worker of a device will be bound, by the device's index.
            No CPU if it will not be bound, or if that is not known.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        options: ConnectorOptions,
        *,
        move: Move | None = None,
        meet: Callable[[], HostPeers] | None = None,
        extension: WorkerExtension | None = None,
        secondary: SecondaryTierWorker | None = None,
        host_cpus: HostCpus | None = None,
        planned_cpus: Callable[[int], frozenset[int]] = lambda _: frozenset(),
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._options = options
        self._move = move or _transfer_op(os.environ)
        self._meet = meet
        self._extension = extension or WorkerExtension()
        self._secondary = secondary or SecondaryTierWorker()
        self._no_sharing = _why_no_sharing(self._secondary) if meet is not None else None
        if self._no_sharing is not None:
            self._meet = None
        self._thread = TransferThread(self._run, self._place_thread)
        self._placer: Placer | None = None
        self._host_cpus = host_cpus or HostCpus()
        self._planned_cpus = planned_cpus
        self._has_warned = False
        self._host: HostBuffer | None = None
        self._sharing: HostSharing | None = None
        self._is_apart = False
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
        if self._runner is not None or self._meet is None:
            self._register(kv_caches, None)
            return
        peers, self._meet = self._meet(), None
        with peers:
            self._register(kv_caches, peers)

    def _register(self, kv_caches: Mapping[str, Any], peers: HostPeers | None) -> None:
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
        self._placer = self._choose_placer(device.type)
        node = self._memory_node(device)
        if peers is not None:
            self._share_memory(layout, device, peers, node)
        self._host = host = self._host or HostBuffer.allocate(
            self._options.host_memory_bytes_per_worker, device, node, self._secondary.why_torch
        )
        try:
            self._runner = JobRunner(
                layout,
                self._options.state_policy,
                pools,
                host.tensor,
                fence,
                self._placer or in_calling_thread,
                self._move,
                self._sharing,
            )
            pages = self._register_extension(self._runner, kv_caches)
            self._secondary.register(pages, self._place_thread)
        except BaseException:
            # The process may go on without this engine.
            self._host = self._runner = self._sharing = None
            host.unmap()
            raise

    def _share_memory(
        self, layout: KVLayout, device: torch.device, peers: HostPeers, node: int | None
    ) -> None:
        """Take memory together with the other workers of this host, if they have equal bytes.

        Raises:
            HostMemoryError: See `HostBuffer.share`.
        """
        contents = read_rank_contents(self._vllm_config, self._kv_cache_config)
        sharing = share_planes(
            layout,
            lambda name: contents.get(name, peers.num_ranks),
            peers.rank,
            peers.num_ranks,
            peers.ranks_of_host,
        )
        # On another host, other ranks may have equal bytes.
        is_same = peers.are_equal(
            None if sharing is None else (sharing.num_ranks, sharing.num_copies)
        )
        if not is_same:
            self._no_sharing = "on some hosts, other bytes are equal than on the first"
        elif sharing is not None:
            num_bytes = sharing.num_ranks * self._options.host_memory_bytes_per_worker
            shared = HostBuffer.share(num_bytes, device, peers, node)
            if isinstance(shared, HostBuffer):
                self._host = shared
                self._sharing = sharing
            else:
                self._no_sharing = shared
        elif not peers.knows_host:
            self._no_sharing = "the kernel does not say which workers are on one host"
        peers.end()

    def _register_extension(
        self, runner: JobRunner, kv_caches: Mapping[str, Any]
    ) -> RegisteredPages:
        assert self._host is not None
        pages = RegisteredPages(
            runner.layout,
            kv_caches,
            runner.pools,
            self._host.tensor,
            self._placer,
            self._move,
            self._sharing,
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
            self._sharing,
            self._no_sharing,
        )

    def run_before_step(self, jobs: ConnectorMetadata) -> None:
        """Carry out ``stores_before``. On return, these stores have ended, well or not.

        They do not wait for stores in the queue.
        """
        self._follow(jobs)
        if jobs.stores_before:
            self._thread.run_now(jobs.stores_before, self._record())

    def begin_step(self, jobs: ConnectorMetadata) -> None:
        """Begin the loads of a step, and also its stores if it computes nothing.

        Stores of an earlier step whose forward did not end are reported as failed, because the
        content of their pages is unknown.
        """
        self._follow(jobs)
        self._thread.fail(self._stores_after_forward, "the forward of their step did not end")
        self._extension.begin_step(jobs.extras)
        self._stores_after_forward = jobs.stores if jobs.has_forward else ()
        self._submit(jobs.loads if jobs.has_forward else (*jobs.loads, *jobs.stores))
        self._secondary.begin_step(jobs.secondary)

    def _follow(self, jobs: ConnectorMetadata) -> None:
        """Keep the bytes of workers apart if the scheduler side says so; see ``keeps_apart``.

        The places of earlier jobs are too small for all workers, so these jobs are given up.
        """
        if not jobs.keeps_apart or self._is_apart:
            return
        self._is_apart = True
        self._thread.fail(self._stores_after_forward, "what workers share is not equal")
        self._stores_after_forward = ()
        self._thread.drop()
        if self._runner is not None:
            self._runner.keep_apart()
        self._secondary.keep_apart()

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
                if moved is not None and moved.digests and self._sharing is not None:
                    results.digests[job.number] = {self._sharing.rank: moved.digests}
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

    def _choose_placer(self, device_type: str) -> Placer | None:
        """Says where copies run; None if a device copies, and no CPUs are named for its thread."""
        require_given(self._options)
        if self._options.copy_cpus is not None:
            named = CopyPlacement.on(self._options.copy_cpus)
            return lambda: named
        return PlacementChoice(os.environ, self._host_cpus) if device_type == "cpu" else None

    def _memory_node(self, device: torch.device) -> int | None:
        """The memory node of this worker; None if it is not known, or if there is only one.

        It is the node of the CPUs to which the model is bound, or will be. If these are not known,
        or on several nodes, it is the node of the CPUs that are named for copies.
        """
        topology = self._host_cpus.topology()
        if len(topology.nodes) < 2:
            return None
        environ = os.environ if device.type == "cpu" else {}
        model = cpus_of_worker(environ) or self._host_cpus.of_main_thread()
        node = topology.node_of(model)
        if node is None and device.type == "npu":
            node = topology.node_of(self._planned_cpus(device.index or 0))
        if node is None:
            node = topology.node_of(frozenset(self._options.copy_cpus or ()))
        if node is None:
            logger.info(
                "Host memory lies on whichever of %d memory nodes the kernel takes it from: this "
                "worker is not bound to one when it registers its KV caches. To have it on one "
                "node, name CPUs of that node in copy_cpus.",
                len(topology.nodes),
            )
        else:
            logger.info("Host memory is taken from memory node %d.", node)
        return node

    def _place_thread(self) -> None:
        """Bind the calling thread to the CPUs on which copies run, unless it is bound to them.

        A new thread inherits the CPUs of the thread that starts it, and the model may run on them.
        The calling thread makes plans and small copies itself. Between two jobs, vLLM-Ascend may
        have bound all threads elsewhere.
        """
        if self._placer is None:
            return
        try:
            bind_thread(frozenset(self._placer().cpus))
        except (OSError, PlacementError) as error:
            if not self._has_warned:
                logger.warning("Copies run where their threads are: %s", error)
            self._has_warned = True


def _why_no_sharing(secondary: SecondaryTierWorker) -> str | None:
    """Why the workers of this engine have host memory of their own; None if they may share it."""
    if parse_uses_ascend_kernel(os.environ):
        return "the AscendC kernel reads memory of one worker only"
    if secondary.why_torch is not None:
        return f"torch does not share what it allocates: {secondary.why_torch.rstrip('.')}"
    return None


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
    given = HostCpus().given()
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
