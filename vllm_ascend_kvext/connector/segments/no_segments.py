# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side asks about segments, and the answers where none are reused.

Which of the two an engine has is decided once, when its workers are known: this, or `Blending`,
which answers all of it, partly as `SegmentStores`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from vllm_ascend_kvext.blending.question_selection import Scores
from vllm_ascend_kvext.blending.segment_store import SegmentPrefix, SegmentStore
from vllm_ascend_kvext.connector.common.block_references import BlockReferences
from vllm_ascend_kvext.connector.common.counters import ConnectorCounters
from vllm_ascend_kvext.connector.common.host_layout import HostLayout
from vllm_ascend_kvext.connector.common.messages import StoreJob
from vllm_ascend_kvext.connector.common.scheduler_view import Block, Request, SchedulerView
from vllm_ascend_kvext.connector.common.store_jobs import StoreJobs
from vllm_ascend_kvext.connector.segments.questions import Questions
from vllm_ascend_kvext.connector.segments.segment_learning import SegmentLearning
from vllm_ascend_kvext.holes.hole_queue import HoleQueue
from vllm_ascend_kvext.holes.load_plan import LoadPlan
from vllm_ascend_kvext.store.entries import Entry, Piece
from vllm_ascend_kvext.store.lookup import Hit
from vllm_ascend_kvext.store.tier import HostTier
from vllm_ascend_kvext.token_range import TokenRange


class SchedulerParts(NamedTuple):
    """The parts of a scheduler side that loads, stores and segments share.

    Without ``computes_holes``, no hole may be computed: a load stops at the first one.
    """

    view: SchedulerView
    layout: HostLayout
    tier: HostTier
    references: BlockReferences
    jobs: StoreJobs
    holes: HoleQueue
    computes_holes: bool
    counters: ConnectorCounters


class NoSegments:
    """An engine that reuses no segments.

    Attributes:
        is_on: Whether segments are reused.
        learning: Has segments computed that no client has asked for; None if nothing does.
        questions: Compares questions of requests with their segments; None if nothing does.
        store: The segments in host memory; None if there are none.
        put: Puts an entry of a segment into the shared tier; None without one.
    """

    is_on = False
    learning: SegmentLearning | None = None
    questions: Questions | None = None
    store: SegmentStore | None = None
    put: Callable[[Entry], None] | None = None

    # Admission.

    def add_request(self, request: Request) -> None:
        """A request has arrived, and nobody has looked at it yet. It may be changed."""

    def has_to_wait(self, request: Request) -> bool:
        """Whether a request cannot be admitted yet, because its store would not have room."""
        return False

    def stores_prompt(self, request_id: str) -> bool:
        """Whether KV of a request may be stored as that of a prompt."""
        return True

    def is_segment(self, request_id: str) -> bool:
        """Whether the prompt of a request is a segment, of which nothing is loaded."""
        return False

    def lacking(self, request_id: str) -> Sequence[tuple[SegmentPrefix, Piece]]:
        """What host memory lacks of segments that a request might reuse."""
        return []

    def plan(self, request: Request, hit: Hit) -> LoadPlan | None:
        """The plan of a request that reuses segments behind what is exact; None if none does."""
        return None

    def refuse_for_room(self, request_id: str) -> None:
        """There is no room for what was planned."""

    def cached_windows(
        self, request: Request, exact_tokens: int
    ) -> dict[int, Sequence[Block]] | None:
        """What the device has of the windows before a token, by KV cache group with windows.

        Returns:
            None if it lacks some of it.
        """
        return None

    def begin(self, request: Request, plan: LoadPlan) -> None:
        """A request has got blocks for a plan of `plan`."""

    def restart(self, request_id: str) -> None:
        """A request has lost its blocks, or its load has failed."""

    def has_room(self, num_segment_tokens: int) -> bool:
        """Whether a segment of so many tokens would not have to wait, if it was asked for now."""
        return False

    # Steps.

    def note_step(self, request: Request, num_scheduled_tokens: int) -> StoreJob | None:
        """A request computes in the step that is being planned; what is stored after it."""
        return None

    def preempted(self, request_id: str) -> None:
        """The pages of a request are gone."""

    def note_key_checks(self, num_workers: int, failure: str) -> None:
        """Workers have compared keys of equal tokens; see ``blending.key_check``."""

    def choose(self, request_id: str, scores: Scores | None) -> tuple[TokenRange, ...]:
        """What of a request is computed and not reused, as its question has it."""
        return ()

    # What is told to others.

    def shared_tokens(self, request_id: str) -> int | None:
        """Before which token blocks of a request are for everyone; None if all of them are."""
        return None

    def params(self, request: Request) -> Mapping[str, int] | None:
        """What the response says of a request that ends."""
        return None

    # Ends.

    def forget(self, request_id: str) -> None:
        """A request has ended."""

    def release_all_held(self) -> None:
        """Let go of the pages that no store reads yet."""

    def clear(self) -> None:
        """What is stored is forgotten."""
