# SPDX-License-Identifier: Apache-2.0
"""Whether an engine reuses segments, decided once its workers are known, and with which options."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from vllm_ascend_kvext.blending.segment_contexts import SegmentContexts
from vllm_ascend_kvext.blending.segment_store import SegmentStore
from vllm_ascend_kvext.connector.common.messages import WorkerLayout
from vllm_ascend_kvext.connector.common.options import ConnectorOptions, Selector
from vllm_ascend_kvext.connector.segments.blended_requests import Blending, BlendOptions
from vllm_ascend_kvext.connector.segments.no_segments import NoSegments, SchedulerParts
from vllm_ascend_kvext.connector.segments.questions import Questions
from vllm_ascend_kvext.connector.segments.segment_learning import SegmentLearning, WantedSegment
from vllm_ascend_kvext.connector.segments.segment_tokens import SegmentTokens

logger = logging.getLogger("vllm.ascend_kvext.blending")

HEAD_TOKENS, HEAD_TOKENS_WITH_QUESTION = 16, 4
"""The defaults of ``blend_head_tokens``: see docs/blending_contexts.md."""

MIN_REUSED_TOKENS = 32
"""Fewer tokens of a segment are computed. Twice the default head: a segment has to be as long to be
reused at all. Nothing that docs/blending.md measured is shorter."""


def make_blending(
    parts: SchedulerParts,
    options: ConnectorOptions,
    segment_tokens: SegmentTokens,
    workers: Sequence[WorkerLayout],
) -> NoSegments:
    """What reuses segments in the pages of some workers, or nothing, with the reason in the log."""
    refusal = _why_no_blending(parts, workers)
    if refusal is not None:
        logger.warning("KvextConnector: blending is off: %s.", refusal)
        return NoSegments()
    of_workers = [each.segments for each in workers if each.segments is not None]
    questions = _make_questions(parts, options, workers)
    # Where nothing but heads is computed, what a context says is answered by some models.
    has_context = questions is not None and options.learn_segments is not False
    if options.segment_context is not None:
        has_context = options.segment_context
    contexts = SegmentContexts[WantedSegment](
        segment_tokens.sink_ids,
        parts.view.max_model_len if has_context else 0,
        MIN_REUSED_TOKENS,
        reads_prompts=options.segment_sink is None,
    )
    store = SegmentStore(parts.tier, of_workers[0], contexts)
    window_tokens = max(each.window_tokens for each in of_workers)
    head_tokens = HEAD_TOKENS if questions is None else HEAD_TOKENS_WITH_QUESTION
    if options.blend_head_tokens is not None:
        head_tokens = options.blend_head_tokens
    blend_options = BlendOptions(
        head_tokens,
        max(0, window_tokens - 1),
        MIN_REUSED_TOKENS,
        segment_tokens.separator_ids,
    )
    learning = _make_learning(parts, store, options, has_context)
    logger.info(
        "KvextConnector: blending is on: segments are computed behind %d tokens%s, and reused "
        "without their first %d%s. It is approximate. Ask once whether it suits the "
        "model: `python -m vllm_ascend_kvext check-model MODEL`.",
        len(contexts.sink_ids),
        ", what prompts begin with and the first documents" if has_context and learning else "",
        max(blend_options.head_tokens, blend_options.min_head_tokens),
        "" if questions is None else ", and without what the question attends to",
    )
    return Blending(
        *(parts, store, blend_options, questions, learning, len(workers)),
        segment_tokens.first_ids,
    )


def _why_no_blending(parts: SchedulerParts, workers: Sequence[WorkerLayout]) -> str | None:
    if not parts.computes_holes:
        return "the tokens between segments are computed as holes, and hole_reuse is off"
    for rank, worker in enumerate(workers):
        if worker.segments is None:
            return f"worker {rank}: {worker.segment_refusal}"
    if len({worker.segments.row_bytes for worker in workers if worker.segments}) > 1:
        return "the rows of its workers differ in size"
    if parts.view.has_other_connectors:
        return "other connectors of a MultiConnector would take approximate KV for exact"
    return None


def _make_learning(
    parts: SchedulerParts, store: SegmentStore, options: ConnectorOptions, has_context: bool
) -> SegmentLearning | None:
    """Also where nothing is learned: the text by which keys are compared is computed by it."""
    view, learns_new = parts.view, options.learns_segments
    if view.num_data_parallel > 1:
        if not (learns_new or has_context):
            return None
        logger.log(
            logging.WARNING if learns_new or options.segment_context else logging.INFO,
            "KvextConnector: %s is off: the %d data-parallel engines of a mixture "
            "of experts take their steps together, and one of them would begin some alone. Let "
            "clients store segments, and set it to false.",
            *("learn_segments" if learns_new else "segment_context", view.num_data_parallel),
        )
        return None
    return SegmentLearning(
        store, view.max_model_len, parts.counters.blending, learns_new, view.on_extra_work
    )


def _make_questions(
    parts: SchedulerParts, options: ConnectorOptions, workers: Sequence[WorkerLayout]
) -> Questions | None:
    """None if questions are not compared with segments."""
    if options.blend_selector is Selector.HEADS:
        return None
    is_by_default = options.blend_selector is None and options.blend_check_layer is None
    for rank, worker in enumerate(workers):
        if worker.probe_refusal:
            logger.log(
                logging.INFO if is_by_default else logging.WARNING,
                "KvextConnector: blend_selector is heads: worker %d: %s",
                *(rank, worker.probe_refusal),
            )
            return None
    return Questions(parts.view, options.blend_ratio, parts.counters.blending)
