# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Segments as an extension of the connector: reads the option, and makes both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm_ascend_kvext.connector.common.messages import WorkerLayout
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.connector.extension import ConnectorExtension
from vllm_ascend_kvext.connector.scheduler.parts import SchedulerParts
from vllm_ascend_kvext.segments.counters import SEGMENT_METRICS
from vllm_ascend_kvext.segments.options import OPTION, parse_segment_options
from vllm_ascend_kvext.segments.scheduler.make_segments import make_segments
from vllm_ascend_kvext.segments.scheduler.segments_side import SegmentsSide
from vllm_ascend_kvext.segments.segment_tokens import NO_SEGMENT_TOKENS, segment_tokens_of
from vllm_ascend_kvext.segments.worker.cpu_backend import CpuBackend
from vllm_ascend_kvext.segments.worker.segments_worker import SegmentsWorker
from vllm_ascend_kvext.store.entries import Entry


class SegmentsExtension(ConnectorExtension):
    """The segments that the configuration of one connector asks for."""

    key = OPTION
    metrics = SEGMENT_METRICS

    def __init__(self, value: Any, options: ConnectorOptions) -> None:
        self._options = parse_segment_options(value, options)
        self._store_policy = options.store_policy
        self._tokens = NO_SEGMENT_TOKENS

    def read_model(self, model_config: Any) -> None:
        self._tokens = segment_tokens_of(model_config, self._options)

    def scheduler_side(
        self,
        parts: SchedulerParts,
        workers: Sequence[WorkerLayout],
        on_used: Callable[[Entry], None],
    ) -> SegmentsSide | None:
        learns_new = self._options.learns_new(self._store_policy)
        return make_segments(parts, self._options, learns_new, self._tokens, workers, on_used)

    def worker_side(self, vllm_config: Any) -> SegmentsWorker:
        return SegmentsWorker(vllm_config, self._options, CpuBackend(vllm_config))
