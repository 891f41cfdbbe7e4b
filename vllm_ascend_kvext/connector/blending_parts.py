# SPDX-License-Identifier: Apache-2.0
"""What of the scheduler side exists where segments are reused: made, accepted or refused here."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import NamedTuple

from vllm_ascend_kvext.blending.segment_store import SegmentStore
from vllm_ascend_kvext.connector.blend_counters import BlendCounters
from vllm_ascend_kvext.connector.blended_requests import BlendedRequests, BlendOptions
from vllm_ascend_kvext.connector.block_references import BlockReferences
from vllm_ascend_kvext.connector.engine import Engine
from vllm_ascend_kvext.connector.host_layout import HostLayout
from vllm_ascend_kvext.connector.messages import WorkerLayout
from vllm_ascend_kvext.connector.model_gate import ModelGate
from vllm_ascend_kvext.connector.options import ConnectorOptions, Selector
from vllm_ascend_kvext.connector.questions import QuestionOptions, Questions
from vllm_ascend_kvext.connector.segment_learning import SegmentLearning
from vllm_ascend_kvext.connector.segment_stores import SegmentStores
from vllm_ascend_kvext.connector.segment_tokens import SegmentTokens
from vllm_ascend_kvext.connector.store_jobs import StoreJobs
from vllm_ascend_kvext.holes.hole_queue import HoleQueue
from vllm_ascend_kvext.holes.probe_blocks import ProbeBlocks
from vllm_ascend_kvext.store.tier import HostTier

logger = logging.getLogger("vllm.ascend_kvext.blending")


class BlendingPlace(NamedTuple):
    """The parts of a scheduler side that segments use.

    Attributes:
        engine: The scheduler's parts.
        layout: Of the pages.
        tier: The host tier's books.
        references: To pages.
        jobs: The stores under way.
        holes: Where holes wait to be computed; None if they do not.
        counters: Of the engine.
    """

    engine: Engine
    layout: HostLayout
    tier: HostTier
    references: BlockReferences
    jobs: StoreJobs
    holes: HoleQueue | None
    counters: BlendCounters


class Blending:
    """The segments of one engine.

    Args:
        place: What it works with.
        store: What is stored of segments.
        options: What is reused.
        questions: Compares questions with segments; None if nothing does.
        learning: Has segments computed; None if only clients do.
        num_workers: Whose keys are to be compared.

    Attributes:
        requests: In whose prompts segments are reused.
        stores: Requests that store one.
        learning: See the arguments.
        why_no_reuse: Why nothing is reused for good; empty if something may be.
    """

    def __init__(
        self,
        place: BlendingPlace,
        store: SegmentStore,
        options: BlendOptions,
        questions: Questions | None,
        learning: SegmentLearning | None,
        num_workers: int,
    ) -> None:
        self._place = place
        self._store = store
        self._key_checks_missing = num_workers
        self.learning = learning
        self.why_no_reuse = ""
        self.requests = BlendedRequests(
            place.engine,
            place.layout.window_pages,
            store,
            options,
            place.counters,
            questions,
            learning,
        )
        self.stores = SegmentStores(
            place.engine,
            store,
            place.layout.tokens_per_page,
            place.layout.window_pages(0).keys(),
            place.references,
            place.jobs,
            place.counters,
            learning,
        )

    def stores_prompt(self, request_id: str) -> bool:
        """Whether KV of a request may be stored as that of a prompt."""
        is_exact = self.requests.exact_tokens(request_id) is None
        return is_exact and not self.stores.is_segment(request_id)

    def note_key_checks(self, num_workers: int, failure: str) -> None:
        """Workers have compared keys of equal tokens, see ``blending.key_check``.

        Args:
            num_workers: That found them equal.
            failure: What one of them found that did not; empty if all did.
        """
        if failure:
            self.refuse(failure)
        elif self._key_checks_missing > 0:
            self._key_checks_missing -= num_workers
            self.requests.keys_are_checked = self._key_checks_missing <= 0

    def make_gate(self) -> ModelGate:
        """What asks the model whether its segments may be reused."""
        engine, layout = self._place.engine, self._place.layout
        return ModelGate(
            self.requests,
            self._store.sink_ids,
            self.stores.num_blocks,
            max(layout.tokens_per_page.values()),
            engine.num_blocks,
            engine.most_request_tokens,
            layout.geometry.needs_tails,
            lambda: self.why_no_reuse,
        )

    def facts(self) -> dict[str, object]:
        """What the model's answers to `make_gate` depend on, of workers and options."""
        options = self.requests.options
        return {
            "pages": self._store.fingerprint,
            "sink": self._store.sink_ids,
            "head_tokens": options.head_tokens,
            "least_head_tokens": options.least_head_tokens,
            "min_tokens": options.min_tokens,
        }

    def accept(self) -> None:
        """The model has passed, perhaps in an earlier engine: no keys need to be compared."""
        if not self.why_no_reuse:
            self._key_checks_missing = 0
            self.requests.keys_are_checked = True

    def refuse(self, reason: str) -> None:
        """Reuse nothing from here on. Said once."""
        if self.why_no_reuse:
            return
        self.why_no_reuse = reason
        self.requests.keys_are_checked = False
        if self.learning is not None:
            self.learning.stop()
        logger.error(
            "KvextConnector: blending is off: %s Requests are computed as without segments.", reason
        )


def make_blending(
    place: BlendingPlace,
    options: ConnectorOptions,
    segment_tokens: SegmentTokens,
    workers: Sequence[WorkerLayout],
) -> Blending | None:
    """Make it, or say in the log why segments are not reused.

    Args:
        place: What it works with.
        options: Of the connector.
        segment_tokens: What stands before and between segments.
        workers: That have registered their pages.
    """
    refusal = _why_no_blending(place, workers)
    if refusal is not None:
        logger.warning("KvextConnector: blending is off: %s.", refusal)
        return None
    of_workers = [each.segments for each in workers if each.segments is not None]
    fingerprint = hashlib.sha256("".join(each.fingerprint for each in of_workers).encode())
    sink_ids = segment_tokens.sink_ids
    store = SegmentStore(place.tier, of_workers[0], fingerprint.hexdigest(), sink_ids)
    window_tokens = max(each.window_tokens for each in of_workers)
    blend_options = BlendOptions(
        options.blend_head_tokens,
        0 if options.blend_across_windows else max(0, window_tokens - 1),
        options.blend_min_tokens,
        segment_tokens.separator_ids,
    )
    questions = _make_questions(place, options, workers)
    learning = _make_learning(place, store) if options.learn_segments else None
    logger.info(
        "KvextConnector: blending is on: segments are computed behind %d tokens, and reused "
        "without their first %d%s. It is approximate.",
        len(sink_ids),
        max(blend_options.head_tokens, blend_options.least_head_tokens),
        "" if questions is None else ", and without what the question attends to",
    )
    if place.engine.num_data_parallel > 1:
        logger.warning(
            "KvextConnector: the model is not asked whether its segments may be reused: the %d "
            "data-parallel engines of a mixture of experts take their steps together. Only the "
            "keys of the first stored segments are compared.",
            place.engine.num_data_parallel,
        )
    return Blending(place, store, blend_options, questions, learning, len(workers))


def _why_no_blending(place: BlendingPlace, workers: Sequence[WorkerLayout]) -> str | None:
    if place.holes is None:
        return "the tokens between segments are computed as holes, and hole_reuse is off"
    for rank, worker in enumerate(workers):
        if worker.segments is None:
            return f"worker {rank}: {worker.segment_refusal}"
    if len({worker.segments.row_bytes for worker in workers if worker.segments}) > 1:
        return "the rows of its workers differ in size"
    if place.engine.has_other_connectors:
        return "other connectors of a MultiConnector would take approximate KV for exact"
    return None


def _make_learning(place: BlendingPlace, store: SegmentStore) -> SegmentLearning | None:
    engine = place.engine
    if engine.num_data_parallel > 1:
        logger.warning(
            "KvextConnector: learn_segments is off: the %d data-parallel engines of a mixture "
            "of experts take their steps together, and one of them would begin some alone.",
            engine.num_data_parallel,
        )
        return None
    return SegmentLearning(store, engine.most_request_tokens, place.counters)


def _make_questions(
    place: BlendingPlace, options: ConnectorOptions, workers: Sequence[WorkerLayout]
) -> Questions | None:
    """None if questions are not compared with segments."""
    if options.blend_selector is not Selector.QUESTION:
        return None
    for rank, worker in enumerate(workers):
        if worker.probe_refusal:
            logger.warning(
                "KvextConnector: blend_selector is heads: worker %d: %s", rank, worker.probe_refusal
            )
            return None
    assert place.holes is not None
    place.holes.probe_blocks = ProbeBlocks(place.references, place.layout.tokens_per_page)
    question_options = QuestionOptions(options.blend_ratio, options.blend_run_tokens)
    return Questions(place.engine, question_options, place.counters)
