# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Both sides of KvextConnector on vLLM's real scheduler, with real pages, but no model.

The scheduler, its patches, and the connector's sides, threads and copies are those of an engine.
The model is replaced: bytes are written that depend on all tokens before them, and every byte is
checked that attention would read.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from support.connector.blended_stream import BlendedStream
from support.connector.held import Held, held_by
from support.connector.meetings import Meeting, in_threads
from support.connector.page_contents import Digests, PageContents, Shifts, WrongBytesError
from support.connector.paged_layouts import PagedLayout
from support.connector.scripted_transfers import ScriptedTransfers, TransferScript
from support.connector.simulated_segments import SimulatedSegments
from support.scheduler.engine import SchedulerEngine
from support.scheduler.model_runner import ModelRunner, ReadCheck, _Row
from support.scheduler.options import EngineOptions
from support.scheduler.releases import block_copies
from vllm_ascend_kvext import loaded_models
from vllm_ascend_kvext.connector.kvext_connector import KvextConnector
from vllm_ascend_kvext.connector.scheduler.connector_scheduler import ConnectorScheduler
from vllm_ascend_kvext.connector.worker import worker_side
from vllm_ascend_kvext.connector.worker.shared_arena import HostPeers
from vllm_ascend_kvext.connector.worker.worker_side import WorkerSide
from vllm_ascend_kvext.layout.build import build_layout
from vllm_ascend_kvext.patches.connector.core import drain_before_reset
from vllm_ascend_kvext.patches.segments.core import hold_learning
from vllm_ascend_kvext.segments.worker import segments_worker
from vllm_ascend_kvext.shared_tier.worker.shared_worker import SharedWorker
from vllm_ascend_kvext.store.entries import Entry
from vllm_ascend_kvext.store.tier import HostTier

_PLAIN = TransferScript()


class SimulatedWorker:
    """Real pages and the connector's real worker side. It is called like vLLM's runner calls it.

    See ``v1/worker/gpu_model_runner.py`` and ``kv_connector_model_runner_mixin.py``. Messages in
    both directions are pickled, as between processes.

    Args:
        writers: See `PageContents`; the rank by default.
        meet: See `WorkerSide`.
    """

    def __init__(
        self,
        layout: PagedLayout,
        num_blocks: int,
        vllm_config: Any,
        script: TransferScript,
        writers: Sequence[int] | None = None,
        meet: Callable[[], HostPeers] | None = None,
    ) -> None:
        rank = vllm_config.parallel_config.rank
        self.pages = pages = layout.make(num_blocks)
        self.writers = rank if writers is None else writers
        self.contents = PageContents(pages, self.writers)
        self.transfers = ScriptedTransfers(script, rank)
        self._connector = KvextConnector(vllm_config, KVConnectorRole.WORKER, pages.config)
        extension = self._connector.extension
        secondary = self._connector.secondary
        self.shared = None if secondary is None else secondary.worker_side(pages.config)
        self.side = self._connector.worker_side = WorkerSide(
            vllm_config,
            pages.config,
            self._connector.options,
            move=self.transfers.move,
            meet=meet,
            extension=None if extension is None else extension.worker_side(vllm_config),
            secondary=self.shared,
        )
        # The model computes nothing. It has the weights of the model's folder.
        self._model = torch.nn.Identity()
        loaded_models.remember(self._model)
        loaded_models.note_files(Path(vllm_config.model_config.model).glob("*.safetensors"))

    def register(self) -> None:
        """Register the pages, within `stand_ins` of this worker or of one like it."""
        self._connector.register_kv_caches(self.pages.kv_caches)

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """What is not there when pages are registered."""
        # A real device decides whether rows can be addressed. Here it is a CPU for all layouts.
        build = partial(build_layout, addressing=self.pages.addressing)
        with (
            mock.patch.object(worker_side, "build_layout", build),
            mock.patch.object(segments_worker, "WorkerSegments", self.segments),
        ):
            yield

    def segments(self, *of_worker: object) -> SimulatedSegments:
        """What replaces `WorkerSegments`. There is no model that shows how keys are rotated."""
        return SimulatedSegments(self.pages, self.transfers, *of_worker)

    def handshake(self) -> Any:
        with mock.patch.object(SharedWorker, "_layers", lambda _: [self._model]):
            return _sent(self._connector.get_handshake_metadata())

    def begin(self, scheduler_output: Any) -> None:
        """Do the worker's part before the forward."""
        metadata = _sent(scheduler_output.kv_connector_metadata)
        self._connector.handle_preemptions(metadata)
        self._connector.bind_connector_metadata(metadata)
        if _loads_before_forward(scheduler_output):
            self._connector.start_load_kv(None)

    def end(self, scheduler_output: Any) -> KVConnectorOutput:
        """Do the worker's part after the forward, if there was a forward."""
        connector = self._connector
        if not _loads_before_forward(scheduler_output):
            connector.start_load_kv(None)
        if scheduler_output.total_num_scheduled_tokens:
            connector.wait_for_save()
        self.transfers.end_some(self.side)
        output = KVConnectorOutput()
        if hasattr(output, "failed_recving"):  # Since vLLM 0.30.
            results = connector.get_transfer_results(scheduler_output.finished_req_ids)
            vars(output).update(vars(results))
        else:
            output.finished_sending, output.finished_recving = connector.get_finished(
                scheduler_output.finished_req_ids
            )
        output.invalid_block_ids = connector.get_block_ids_with_load_errors()
        output.kv_connector_stats = connector.get_kv_connector_stats()
        output.kv_cache_events = connector.get_kv_connector_kv_cache_events()
        output.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        return _sent(output)

    def shutdown(self) -> None:
        self.transfers.open()
        self._connector.shutdown()


def _loads_before_forward(scheduler_output: Any) -> bool:
    """Whether loads begin before the forward. Since vLLM 0.30, the step has this fact."""
    return getattr(scheduler_output, "has_sync_kv_loads", True)


def _sent(message: Any) -> Any:
    return pickle.loads(pickle.dumps(message))


class PagedModelRunner(ModelRunner):
    """A `ModelRunner` whose KV lies in the pages of workers."""

    def __init__(
        self, layout: PagedLayout, workers: Sequence[SimulatedWorker], num_draft_tokens: int
    ) -> None:
        super().__init__(layout.groups, num_draft_tokens, ReadCheck.ALL)
        self._workers = workers
        self._aggregator = KVOutputAggregator(len(workers))

    def execute(self, scheduler_output: Any) -> ModelRunnerOutput:
        for worker in self._workers:
            worker.begin(scheduler_output)
        for request_id in scheduler_output.finished_req_ids:
            self._states.pop(request_id, None)
        self._update_states(scheduler_output)
        for source, target in block_copies(scheduler_output):
            for worker in self._workers:
                worker.contents.copy(source, target)
        rows = list(self._make_rows(scheduler_output))
        contents = [_content_of(row) for row in rows]
        for worker in self._workers:
            _compute(worker, rows, contents)
        sampled = [self._sample(row) for row in rows]
        outputs = [
            ModelRunnerOutput(
                req_ids=[row.request_id for row in rows],
                req_id_to_index={row.request_id: i for i, row in enumerate(rows)},
                sampled_token_ids=sampled,
                kv_connector_output=worker.end(scheduler_output),
            )
            for worker in self._workers
        ]
        output = self._aggregator.aggregate(outputs) if len(outputs) > 1 else outputs[0]
        assert output is not None
        return output


class _Content(NamedTuple):
    """The expected contents of a row's pages, by token.

    Attributes:
        digests: The digests of what was computed.
        shifts: By how many positions it was moved since then. None if nothing was moved.
    """

    digests: Digests
    shifts: Shifts | None


def _content_of(row: _Row) -> _Content:
    digests = np.array(row.digests, np.uint64)
    stream = row.state.stream
    if not isinstance(stream, BlendedStream):
        return _Content(digests, None)
    shifts = np.zeros(len(digests), np.int64)
    shifts[: len(stream)] = stream.shifts  # The tokens behind these are drafts.
    computed = range(row.start, row.end)
    assert not any(map(computed.__contains__, stream.placed)), f"{row.request_id}: {computed}"
    return _Content(digests, shifts)


def _compute(worker: SimulatedWorker, rows: Sequence[_Row], expected: Sequence[_Content]) -> None:
    """Write and check a step. For all requests, every layer writes before any layer reads."""
    contents = worker.contents
    row = None
    try:
        for row, content in zip(rows, expected, strict=True):
            contents.check_states(row.state.block_tables, content.digests, row.start)
        for row, content in zip(rows, expected, strict=True):
            contents.write(row.state.block_tables, content.digests, row.start, row.end)
        for row, content in zip(rows, expected, strict=True):
            tables = row.state.block_tables
            contents.check_rows(tables, content.digests, row.start, row.end, content.shifts)
    except WrongBytesError as error:
        assert row is not None
        raise WrongBytesError(
            f"{row.request_id} computes tokens {row.start} to {row.end - 1}: {error}"
        ) from error


class SimulatedEngine(SchedulerEngine):
    """One scheduler, and its workers.

    Args:
        num_contents: By group, how many different contents the ranks have. The workers then share
            host memory. None if each has memory of its own, and other contents.
        hosts: The host of each worker that shares memory; one for all by default.

    Attributes:
        clock: The clock of the scheduler side, in seconds. It never goes back.
    """

    layout: PagedLayout

    def __init__(
        self,
        layout: PagedLayout,
        options: EngineOptions,
        script: TransferScript = _PLAIN,
        num_contents: Sequence[int] | None = None,
        hosts: Sequence[str] | None = None,
    ) -> None:
        self._script = script
        self._num_contents = num_contents
        self._hosts = hosts or ["here"] * options.num_workers
        self.workers: list[SimulatedWorker] = []
        self.clock: Callable[[], float] = time.monotonic
        super().__init__(layout, options)
        self.scheduler.connector.clock = lambda: self.clock()
        self._shake_hands()

    def _shake_hands(self) -> None:
        connector = self.scheduler.connector
        connector.set_xfer_handshake_metadata(
            {rank: worker.handshake() for rank, worker in enumerate(self.workers)}
        )

    def _new_runner(self, num_draft_tokens: int, read_check: ReadCheck) -> ModelRunner:
        num_workers = self.options.num_workers
        meeting = Meeting(num_workers)
        for rank in range(num_workers):
            vllm_config = copy.copy(self.scheduler.vllm_config)
            vllm_config.parallel_config = copy.copy(vllm_config.parallel_config)
            vllm_config.parallel_config.rank = rank
            writers = meet = None
            if self._num_contents is not None:
                writers = [rank * each // num_workers for each in self._num_contents]
                meet = partial(HostPeers, rank, partial(meeting.exchange, rank), self._hosts[rank])
            self.workers.append(
                SimulatedWorker(
                    self.layout,
                    self.options.num_blocks,
                    vllm_config,
                    self._script,
                    writers,
                    meet,
                )
            )
        self._register()
        return PagedModelRunner(self.layout, self.workers, num_draft_tokens)

    def _register(self) -> None:
        """Let the workers register their pages: at the same time if they share host memory."""
        if self._num_contents is None:
            for worker in self.workers:
                with worker.stand_ins():
                    worker.register()
            return
        by_layer = {
            name: self._num_contents[index]
            for index, group in enumerate(self.workers[0].pages.config.kv_cache_groups)
            for name in group.layer_names
        }
        contents = mock.patch.object(worker_side, "read_rank_contents", lambda *_: by_layer)
        # Each worker has stand-ins of its own for what is rank by rank.
        segments = mock.patch.object(
            segments_worker,
            "WorkerSegments",
            lambda config, *of_worker: self.workers[config.parallel_config.rank].segments(
                config, *of_worker
            ),
        )
        with self.workers[0].stand_ins(), segments, contents:
            failed = in_threads(lambda rank: self.workers[rank].register(), len(self.workers))
        for each in failed:
            if each is not None:
                raise each

    @property
    def side(self) -> ConnectorScheduler:
        side: ConnectorScheduler | None = self.scheduler.connector.scheduler_side
        assert side is not None
        return side

    @property
    def tier(self) -> HostTier:
        return self.side.tier

    @property
    def held(self) -> Held:
        """What the scheduler side holds for requests."""
        return held_by(self.side)

    @property
    def entries(self) -> list[Entry]:
        """The entries of the tier, the oldest first. Entries that are being stored are included."""
        return list(self.tier._entries.values())

    def reset(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Reset the prefix cache like `EngineCore.reset_prefix_cache` does."""
        core = SimpleNamespace(
            scheduler=self.scheduler,
            step_fn=lambda: (self.step(), True),
            post_step=lambda is_executed: None,
        )
        drain = partial(drain_before_reset, self.scheduler.reset_prefix_cache, core)
        return hold_learning(drain, core, reset_running_requests, reset_connector)

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        super().shutdown()
