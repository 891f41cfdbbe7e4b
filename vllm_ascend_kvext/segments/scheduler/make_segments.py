# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Decides whether an engine reuses segments, and with which options, once its workers are known."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from vllm_ascend_kvext.connector.common.messages import WorkerLayout
from vllm_ascend_kvext.connector.scheduler.parts import SchedulerParts
from vllm_ascend_kvext.segments.counters import SegmentCounters
from vllm_ascend_kvext.segments.messages import SegmentsOfWorker
from vllm_ascend_kvext.segments.options import SegmentOptions, Selector
from vllm_ascend_kvext.segments.scheduler.blended_requests import BlendedRequests, BlendOptions
from vllm_ascend_kvext.segments.scheduler.key_checks import KeyChecks
from vllm_ascend_kvext.segments.scheduler.questions import Questions
from vllm_ascend_kvext.segments.scheduler.segment_contexts import SegmentContexts
from vllm_ascend_kvext.segments.scheduler.segment_learning import SegmentLearning, WantedSegment
from vllm_ascend_kvext.segments.scheduler.segment_store import SegmentStore
from vllm_ascend_kvext.segments.scheduler.segment_stores import SegmentStores
from vllm_ascend_kvext.segments.scheduler.segments_side import SegmentsSide
from vllm_ascend_kvext.segments.segment_tokens import SegmentTokens
from vllm_ascend_kvext.store.entries import Entry

logger = logging.getLogger("vllm.ascend_kvext.segments")

HEAD_TOKENS = 16
"""The default of ``head_tokens`` if only heads are computed; see docs/blending_contexts.md."""

HEAD_TOKENS_WITH_QUESTION = 4
"""The default of ``head_tokens`` if the question chooses further tokens."""

MIN_REUSED_TOKENS = 32
"""The minimum length of a reused run; shorter runs are computed. The number is twice the default
head, and so also the minimum length of a reused segment. docs/blending.md measured no shorter
runs."""


def make_segments(
    parts: SchedulerParts,
    options: SegmentOptions,
    learns_new: bool,
    segment_tokens: SegmentTokens,
    workers: Sequence[WorkerLayout],
    on_used: Callable[[Entry], None] = lambda _: None,
) -> SegmentsSide | None:
    """Make the scheduler side of segments. None if segments are off; the log says why.

    Args:
        learns_new: Whether segments are learned that no client has stored.
        on_used: Called with each used entry that other engines may have.
    """
    of_workers: list[SegmentsOfWorker] = [each.extras for each in workers]
    refusal = _why_no_segments(parts, of_workers)
    if refusal is not None:
        logger.warning("KvextConnector: segments are off: %s.", refusal)
        return None
    layouts = [each.layout for each in of_workers if each.layout is not None]
    counters = SegmentCounters()
    questions = _make_questions(parts, options, of_workers, counters)
    # If only heads are computed, some models answer what a context says.
    has_context = questions is not None and options.learn is not False
    if options.context is not None:
        has_context = options.context
    contexts = SegmentContexts[WantedSegment](
        segment_tokens.sink_ids,
        parts.view.max_model_len if has_context else 0,
        MIN_REUSED_TOKENS,
        reads_prompts=options.sink is None,
    )
    store = SegmentStore(parts.tier, layouts[0], contexts)
    window_tokens = max(each.window_tokens for each in layouts)
    head_tokens = HEAD_TOKENS if questions is None else HEAD_TOKENS_WITH_QUESTION
    if options.head_tokens is not None:
        head_tokens = options.head_tokens
    blend_options = BlendOptions(
        head_tokens,
        max(0, window_tokens - 1),
        MIN_REUSED_TOKENS,
        segment_tokens.separator_ids,
    )
    learning = _make_learning(parts, store, options, learns_new, has_context, counters)
    logger.info(
        "KvextConnector: segments are on: they are computed behind %d tokens%s, and reused "
        "without their first %d%s. It is approximate. Ask once whether it suits the "
        "model: `python -m vllm_ascend_kvext check-model MODEL`.",
        len(contexts.sink_ids),
        ", what prompts begin with and the first documents" if has_context and learning else "",
        max(blend_options.head_tokens, blend_options.min_head_tokens),
        "" if questions is None else ", and without what the question attends to",
    )
    checks = KeyChecks(len(workers), learning)
    stores = SegmentStores(
        parts, store, learning, checks, counters, segment_tokens.first_ids, on_used
    )
    blended = BlendedRequests(
        parts, store, blend_options, questions, learning, checks, counters, on_used
    )
    sharing = parts.layout.sharing
    num_sharing = 1 if sharing is None else sharing.num_ranks
    return SegmentsSide(parts.view, store, stores, blended, learning, checks, counters, num_sharing)


def _why_no_segments(parts: SchedulerParts, of_workers: Sequence[SegmentsOfWorker]) -> str | None:
    if not parts.computes_holes:
        return "the tokens between segments are computed as holes, and hole_reuse is off"
    if parts.view.has_draft_layers:
        return "draft tokens (EAGLE, MTP) would be computed behind the blocks of its rows"
    for rank, worker in enumerate(of_workers):
        if worker.layout is None:
            return f"worker {rank}: {worker.refusal}"
        first = of_workers[0].layout
        if first is not None and worker.layout.row_bytes != first.row_bytes:
            return f"worker {rank} has other bytes per token than worker 0"
        if first is not None and worker.layout.num_sections != first.num_sections:
            return (
                f"worker {rank} is on a host with {worker.layout.num_sections} different contents "
                f"of pages, and worker 0 on a host with {first.num_sections}: place as many ranks "
                "on each host"
            )
    if parts.view.has_other_connectors:
        return "other connectors of a MultiConnector would take approximate KV for exact"
    return None


def _make_learning(
    parts: SchedulerParts,
    store: SegmentStore,
    options: SegmentOptions,
    learns_new: bool,
    has_context: bool,
    counters: SegmentCounters,
) -> SegmentLearning | None:
    """Make the learning. Even if no segment is learned, it computes the text that checks keys."""
    view = parts.view
    if view.num_data_parallel > 1:
        if not (learns_new or has_context):
            return None
        logger.log(
            logging.WARNING if learns_new or options.context else logging.INFO,
            "KvextConnector: segments: %s is off: the %d data-parallel engines of a mixture of "
            "experts take their steps together, and learning would make one of them begin steps "
            "alone. Let clients store segments, and set it to false.",
            "learn" if learns_new else "context",
            view.num_data_parallel,
        )
        return None
    return SegmentLearning(store, view.max_model_len, counters, learns_new, view.on_extra_work)


def _make_questions(
    parts: SchedulerParts,
    options: SegmentOptions,
    of_workers: Sequence[SegmentsOfWorker],
    counters: SegmentCounters,
) -> Questions | None:
    """Make the object that compares questions with segments; None if questions are not compared."""
    if options.selector is Selector.HEADS:
        return None
    is_by_default = options.selector is None and options.check_layer is None
    for rank, worker in enumerate(of_workers):
        if worker.probe_refusal:
            logger.log(
                logging.INFO if is_by_default else logging.WARNING,
                "KvextConnector: segments: selector is heads: worker %d: %s",
                rank,
                worker.probe_refusal,
            )
            return None
    return Questions(parts.view, options.ratio, counters)
