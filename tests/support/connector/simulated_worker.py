# SPDX-License-Identifier: Apache-2.0
"""One worker without a model: real pages and the connector's real worker side.

Calls the connector as vLLM's runner does (``v1/worker/gpu_model_runner.py``,
``kv_connector_model_runner_mixin.py``). What it is sent and what it sends is pickled, as between
processes.
"""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any
from unittest import mock

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from support.connector.page_contents import PageContents
from support.connector.paged_layouts import PagedLayout
from support.connector.scripted_transfers import ScriptedTransfers, TransferScript
from support.connector.simulated_segments import SimulatedSegments
from vllm_ascend_kvext.connector.kvext_connector import KvextConnector
from vllm_ascend_kvext.connector.worker import worker_side
from vllm_ascend_kvext.connector.worker.worker_side import WorkerSide
from vllm_ascend_kvext.layout.build import build_layout


class SimulatedWorker:
    """One worker.

    Args:
        layout: Of its pages.
        num_blocks: Of the pool.
        vllm_config: As it has it: with its rank.
        script: How its transfers go.

    Attributes:
        pages: Its tensors.
        contents: Of its pages.
        transfers: See `ScriptedTransfers`.
    """

    def __init__(
        self, layout: PagedLayout, num_blocks: int, vllm_config: Any, script: TransferScript
    ) -> None:
        rank = vllm_config.parallel_config.rank
        self.pages = pages = layout.make(num_blocks)
        self.contents = PageContents(pages, rank)
        self.transfers = ScriptedTransfers(script, rank)
        self._connector = KvextConnector(vllm_config, KVConnectorRole.WORKER, pages.config)
        self.side = self._connector.worker_side = WorkerSide(
            vllm_config, pages.config, self._connector.options, move=self.transfers.move
        )
        # The device would say which rows can be addressed; here it is a CPU for all layouts.
        build = partial(build_layout, addressing=pages.addressing)
        # A model would say how its keys turn; here is none.
        segments = partial(SimulatedSegments, pages, self.transfers)
        with (
            mock.patch.object(worker_side, "build_layout", build),
            mock.patch.object(worker_side, "WorkerSegments", segments),
        ):
            self._connector.register_kv_caches(pages.kv_caches)

    def handshake(self) -> Any:
        return _sent(self._connector.get_handshake_metadata())

    def begin(self, scheduler_output: Any) -> None:
        """Before the forward."""
        metadata = _sent(scheduler_output.kv_connector_metadata)
        self._connector.handle_preemptions(metadata)
        self._connector.bind_connector_metadata(metadata)
        self._connector.start_load_kv(None)

    def end(self, scheduler_output: Any) -> KVConnectorOutput:
        """After the forward, if there was one."""
        connector = self._connector
        if scheduler_output.total_num_scheduled_tokens:
            connector.wait_for_save()
        self.transfers.end_some(self.side)
        output = KVConnectorOutput()
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


def _sent(message: Any) -> Any:
    return pickle.loads(pickle.dumps(message))
