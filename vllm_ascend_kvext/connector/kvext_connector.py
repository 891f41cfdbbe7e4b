# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The connector as vLLM calls it. The class translates, and decides nothing.

    --kv-transfer-config '{"kv_connector": "KvextConnector", "kv_role": "kv_both"}'

vLLM makes one connector in the process of the scheduler, and one in each worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from vllm_ascend_kvext.connector.ascend_binding import planned_cpus
from vllm_ascend_kvext.connector.common.events import TierEvents
from vllm_ascend_kvext.connector.common.messages import (
    ConnectorMetadata,
    WorkerLayout,
    WorkerOutput,
)
from vllm_ascend_kvext.connector.common.scheduler_view import SchedulerView
from vllm_ascend_kvext.connector.common.stats import KvextPromMetrics, KvextStats
from vllm_ascend_kvext.connector.extension import known_extensions, read_configuration
from vllm_ascend_kvext.connector.scheduler.connector_scheduler import ConnectorScheduler
from vllm_ascend_kvext.connector.secondary_tier import secondary_tier_of
from vllm_ascend_kvext.connector.worker.shared_arena import HostPeers, host_id
from vllm_ascend_kvext.connector.worker.worker_side import EndedJobs, WorkerSide
from vllm_ascend_kvext.errors import ConnectorError
from vllm_ascend_kvext.groups.kinds import is_all_full_attention

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.ascend_kvext.connector")

_ENDS_OF_TURNS = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"})
"""Names of ``RequestStatus``. After an error or an abort, the content of the pages is unknown."""

_IDLE_WAIT_S = 0.001
"""The longest time that a step without a forward waits for a transfer, so that no loop spins."""


@dataclass(slots=True)
class KvextMetadata(KVConnectorMetadata):  # type: ignore[misc]  # mypy does not follow vLLM's imports
    """The message to the workers, in every step."""

    jobs: ConnectorMetadata


@dataclass(slots=True)
class KvextWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The message from the workers after a step."""

    results: WorkerOutput

    @property
    def failed_recving(self) -> frozenset[str]:
        """Requests whose load failed. The repair ``failed-loads`` reads this attribute."""
        return frozenset(self.results.failed_loads)

    def aggregate(self, other: KvextWorkerMetadata) -> KvextWorkerMetadata:
        self.results.add(other.results)
        return self


@dataclass(slots=True)
class KvextHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """The message from each worker to the scheduler side, once."""

    worker: WorkerLayout


class KvextConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Keeps KV of every cache group in host memory, and brings it back.

    Attributes:
        clock: The time in seconds, for the scheduler side. A replay sets its own.
        has_tokens: Whether requests have the tokens that their hashes are of. Requests of a replay
            have hashes only.

    Raises:
        ConnectorError: If it cannot work with this configuration.
        SettingsError: If ``kv_role`` or ``kv_connector_extra_config`` is wrong.
    """

    forgets_failed_loads = True  # See the repair ``failed-loads``.
    requires_kv_delivery = (
        False  # No client waits for a store: a preempted request may be answered.
    )

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer_config = vllm_config.kv_transfer_config
        options, extension = read_configuration(
            transfer_config.kv_role,
            transfer_config.kv_connector_extra_config,
            vllm_config.parallel_config.world_size,
        )
        self.options = options
        self.extension = extension
        self.secondary = secondary = secondary_tier_of(vllm_config, options)
        self.scheduler_side: ConnectorScheduler | None = None
        self.worker_side: WorkerSide | None = None
        self.clock: Callable[[], float] = time.monotonic
        self.has_tokens = True
        self._names_blocks = is_all_full_attention(kv_cache_config)
        self._ended: EndedJobs | None = None
        self._view: SchedulerView | None = None
        self._on_ready: Callable[[ConnectorScheduler], object] | None = None
        self._has_warned = False
        if role is KVConnectorRole.SCHEDULER:
            events_config = vllm_config.kv_events_config
            has_events = events_config is not None and events_config.enable_kv_cache_events
            self._events = TierEvents.of(kv_cache_config) if has_events else TierEvents()
            if extension is not None:
                extension.read_model(vllm_config.model_config)
        else:
            of_worker = None
            if extension is not None:
                of_worker = extension.worker_side(vllm_config)
            self.worker_side = WorkerSide(
                vllm_config,
                kv_cache_config,
                options,
                meet=_meet if options.world_size > 1 else None,
                extension=of_worker,
                secondary=None if secondary is None else secondary.worker_side(kv_cache_config),
                planned_cpus=planned_cpus,
            )

    # Scheduler side.

    def bind_scheduler(
        self, view: SchedulerView, on_ready: Callable[[ConnectorScheduler], object]
    ) -> None:
        """Take note of the scheduler. ``patches.connector`` calls this method.

        Args:
            on_ready: Called when the workers have said what their pages look like.
        """
        self._view = view
        self._on_ready = on_ready

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        of_workers = [metadata[rank] for rank in sorted(metadata)]
        if not all(isinstance(each, KvextHandshake) for each in of_workers):
            raise ConnectorError(
                "KvextConnector: expected its workers' layouts, found what another connector of "
                "the same MultiConnector has to say; leave the repair multi-connector-handshakes "
                "on (VLLM_ASCEND_KVEXT_DISABLE), or list KvextConnector first"
            )
        if self._view is None or self._on_ready is None:
            raise ConnectorError(
                "KvextConnector: expected a scheduler that vllm-ascend-kvext has prepared, found "
                "one that it has not; install the package where the engine runs, do not leave its "
                "plugin out of VLLM_PLUGINS, and see `python -m vllm_ascend_kvext status`"
            )
        view = self._view if self.has_tokens else replace(self._view, hash_tokens=None)
        self.scheduler_side = ConnectorScheduler(
            view,
            [each.worker for each in of_workers],
            self.options,
            self._events,
            clock=self.clock,
            extension=self.extension,
            secondary=self.secondary,
        )
        self._on_ready(self.scheduler_side)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        side = self.scheduler_side
        if side is not None:
            num_tokens = side.get_num_new_matched_tokens(request, num_computed_tokens)
            return num_tokens, bool(num_tokens)
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "KvextConnector stores and loads nothing: its workers have not told what their "
                "pages look like. Is another connector of the same MultiConnector before it?"
            )
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self.scheduler_side is not None:
            block_ids = blocks.get_block_ids() if num_external_tokens else ()
            self.scheduler_side.update_state_after_alloc(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self.scheduler_side is None:
            return KvextMetadata(
                ConnectorMetadata(has_forward=bool(scheduler_output.num_scheduled_tokens))
            )
        jobs = self.scheduler_side.build_connector_meta(
            scheduler_output.num_scheduled_tokens, scheduler_output.preempted_req_ids or ()
        )
        has_gets = jobs.secondary is not None and jobs.secondary.has_gets
        if jobs.loads or jobs.extras is not None or has_gets:
            # By default vLLM >= 0.30 calls `start_load_kv` after the forward. But our loads run
            # beside the forward, and an extension may look into the forward.
            scheduler_output.has_sync_kv_loads = True
        return KvextMetadata(jobs)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self.scheduler_side is None:
            return
        metadata = connector_output.kv_connector_worker_meta
        results = metadata.results if isinstance(metadata, KvextWorkerMetadata) else None
        finished = connector_output.finished_recving or frozenset()
        with_holes = self.scheduler_side.update_connector_output(results, finished)
        if with_holes:
            # These requests go on when their holes are computed, see ``patches.connector``.
            connector_output.finished_recving = set(finished) - with_holes

    def update_state_before_preempt(
        self, request: Request, block_ids: tuple[list[int], ...], num_computed_tokens: int
    ) -> bool:
        """Store a request that vLLM-Ascend's recompute scheduler is about to preempt.

        The other way costs a prefill on another node, a transfer, and the queues of both. Nothing
        here measures that, and a decode node measures no prefill either.

        Returns:
            Whether the request can go on from host memory. Otherwise that scheduler ends it, and
            the proxy sends it to a prefill node again.
        """
        side = self.scheduler_side
        return side is not None and side.preempt(request, at_any_cost=True)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        del block_ids  # The scheduler side reads the block tables, which have more than ids.
        if self.scheduler_side is None:
            return False, None
        is_end_of_turn = request.status.name in _ENDS_OF_TURNS
        params = self.scheduler_side.request_finished(request, is_end_of_turn)
        # Stores hold references to their blocks, so vLLM may free the request's blocks now.
        return False, params

    def has_pending_push_work(self) -> bool:
        """Whether steps are needed although no request waits for a step. vLLM >= 0.30 asks this."""
        return self.scheduler_side is not None and self.scheduler_side.has_work

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._events.take() if self.worker_side is None else ()

    def reset_cache(self) -> bool | None:
        if self.scheduler_side is not None:
            self.scheduler_side.reset_cache()
        return True

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return KvextHandshake(self._worker.describe())

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._worker.run_before_step(_jobs_of(kv_connector_metadata))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._worker.begin_step(_jobs_of(self._get_connector_metadata()))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request that loads is not computed before it has loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: pages are stored when all layers are done."""

    def wait_for_save(self) -> None:
        self._worker.end_of_forward()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        has_forward = (
            self.has_connector_metadata() and _jobs_of(self._get_connector_metadata()).has_forward
        )
        if not has_forward:
            self._worker.wait_for_end(_IDLE_WAIT_S)
        self._ended = self._worker.end_step()
        self._ended.results.has_forward = has_forward
        return None, set(self._ended.loads) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """As `get_finished`, for vLLM >= 0.30. The result also names requests whose load failed."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        self._names_blocks = False
        _, loaded = self.get_finished(finished_req_ids)
        assert self._ended is not None
        return KVConnectorTransferResults(
            finished_recving=loaded or set(),
            failed_recving=set(self._ended.results.failed_loads),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        # Block ids tell vLLM where a request can go on only if all groups are full attention.
        # For other models, `failed_recving` names the request, for the repair ``failed-loads``.
        if self._ended is None or not self._names_blocks:
            return set()
        return set(self._ended.failed_pages)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        ended, self._ended = self._ended, None
        return KvextWorkerMetadata(ended.results) if ended and ended.results else None

    def shutdown(self) -> None:
        if self.worker_side is not None:
            self.worker_side.shutdown()
        if self.scheduler_side is not None:
            self.scheduler_side.secondary.shutdown()

    # Both sides.

    def get_kv_connector_stats(self) -> KvextStats | None:
        if self.worker_side is None:
            report = None if self.scheduler_side is None else self.scheduler_side.take_report()
            return KvextStats(report) if report else None
        # The scheduler side counts everything. vLLM asks it only if a worker has sent statistics.
        return KvextStats() if _jobs_of(self._get_connector_metadata()).wants_stats else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvextStats:
        return KvextStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvextPromMetrics:
        tables = [extension.metrics for extension in known_extensions()]
        return KvextPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues, tables
        )

    @property
    def _worker(self) -> WorkerSide:
        assert self.worker_side is not None, "vLLM calls this on workers only"
        return self.worker_side


def _meet() -> HostPeers:
    """The workers of the engine that may share host memory. All workers of the engine call it."""
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()

    def exchange(value: Any) -> list[Any]:
        values: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(values, value, group=group.cpu_group)
        return values

    return HostPeers(group.rank_in_group, exchange, host_id())


def _jobs_of(metadata: KVConnectorMetadata) -> ConnectorMetadata:
    assert isinstance(metadata, KvextMetadata), f"expected KvextMetadata, found {metadata!r}"
    return metadata.jobs
