# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The worker side of segments, as the connector's worker side calls it."""

from __future__ import annotations

import logging
from typing import Any

from vllm_ascend_kvext.connector.worker.extension import RegisteredPages, WorkerExtension
from vllm_ascend_kvext.errors import KvextError
from vllm_ascend_kvext.segments.messages import ProbeJob, SegmentOutput, SegmentsOfWorker
from vllm_ascend_kvext.segments.options import SegmentOptions, Selector
from vllm_ascend_kvext.segments.worker.cpu_backend import CpuBackend
from vllm_ascend_kvext.segments.worker.question_probe import QuestionProbe
from vllm_ascend_kvext.segments.worker.segment_mover import SegmentMover
from vllm_ascend_kvext.segments.worker.worker_segments import WorkerSegments
from vllm_ascend_kvext.transfer.placement import PlacementChoice

logger = logging.getLogger("vllm.ascend_kvext.segments")


class SegmentsWorker(WorkerExtension):
    """The segments of one worker, or the reason why it has none.

    Args:
        vllm_config: vLLM's ``VllmConfig``, as the worker has it.
        cpu_backend: Writes pages as vLLM's CPU attention does; None refuses segments on a CPU.
    """

    def __init__(
        self, vllm_config: Any, options: SegmentOptions, cpu_backend: CpuBackend | None
    ) -> None:
        self._vllm_config = vllm_config
        self._options = options
        self._cpu_backend = cpu_backend
        self._segments: WorkerSegments | None = None
        self._refusal = ""
        self._probe: QuestionProbe | None = None
        self._probe_refusal = ""
        self._is_registered = False
        self._mover: SegmentMover | None = None

    @property
    def mover(self) -> SegmentMover | None:
        return self._mover

    @property
    def needs_token_rows(self) -> bool:
        return True

    def register(self, pages: RegisteredPages) -> None:
        if not self._is_registered:
            self._is_registered = True
            self._make(pages)
        elif self._segments is not None and self._mover is not None:
            self._renew(pages, self._segments, self._mover)

    def _make(self, pages: RegisteredPages) -> None:
        try:
            segments = WorkerSegments(
                self._vllm_config,
                pages.layout,
                pages.kv_caches,
                pages.pools,
                # Keys are rotated in host memory, even if the pages are on a device.
                # The variables of OpenMP say nothing of a model on a device.
                pages.placer or PlacementChoice({}),
                self._cpu_backend,
                pages.move,
            )
            self._mover = segments.mover(pages.host, pages.sharing)
            self._segments = segments
        except Exception as error:
            self._refusal = _refusal_of(error)
            return
        if self._options.selector is Selector.HEADS:
            return
        try:
            is_asked_for = self._options.selector is Selector.QUESTION
            self._probe = segments.probe(self._options.check_layer, is_asked_for)
        except Exception as error:
            self._probe_refusal = _refusal_of(error)

    def _renew(
        self, registered: RegisteredPages, segments: WorkerSegments, mover: SegmentMover
    ) -> None:
        """Use the pages that are registered now. If that fails, all jobs with segments fail."""
        mover.pages = None
        try:
            pages = segments.pages_of(registered.kv_caches)
            mover.pages = pages
            if self._probe is not None:
                self._probe.pages = pages
        except Exception as error:
            logger.warning("Segments are not loaded any more: %s", _refusal_of(error))

    def describe(self) -> SegmentsOfWorker:
        layout = None if self._mover is None else self._mover.layout
        return SegmentsOfWorker(layout, self._refusal, self._probe_refusal)

    def begin_step(self, extras: tuple[ProbeJob, ...] | None) -> None:
        if self._probe is not None:
            self._probe.begin_step(extras or ())

    def end_step(self) -> SegmentOutput | None:
        output = SegmentOutput()
        if self._mover is not None:
            output.key_checks, output.key_check_failure = self._mover.take_key_checks()
        if self._probe is not None:
            output.scores = self._probe.end_step()
        return output or None

    def shutdown(self) -> None:
        if self._probe is not None:
            self._probe.shutdown()
        if self._mover is not None:
            self._mover.close()


def _refusal_of(error: Exception) -> str:
    """Why there are no segments. An unexpected error is logged, and the engine goes on."""
    if isinstance(error, KvextError):
        return str(error)
    logger.warning("Segments: this model or its pages are not understood", exc_info=error)
    return f"{type(error).__name__}: {error}. Serve this model without segments, and report it."
