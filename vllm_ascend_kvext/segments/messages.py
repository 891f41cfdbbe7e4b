# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Messages between the two sides of segments, in the ``extras`` of the connector's messages.

Messages are plain data that can be pickled, because with tensor parallelism they cross processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_ascend_kvext.layout.transfer_plan import TablePart
from vllm_ascend_kvext.segments.question_selection import Scores
from vllm_ascend_kvext.segments.token_rows import SegmentLayout
from vllm_ascend_kvext.token_range import TokenRange


@dataclass(frozen=True, slots=True)
class SegmentsOfWorker:
    """What a worker tells the scheduler side once, when its caches are registered.

    Attributes:
        layout: None if segments cannot be stored and placed; ``refusal`` says why.
        refusal: Why segments cannot be stored and placed; empty if they can be.
        probe_refusal: Why the worker cannot compare a question with segments; empty if it can.
    """

    layout: SegmentLayout | None
    refusal: str = ""
    probe_refusal: str = ""


@dataclass(frozen=True, slots=True)
class ProbeJob:
    """A row of the step. The queries of its last tokens are compared with keys in pages.

    Attributes:
        row_id: Unique in the engine.
        tokens: The last tokens of the row.
        scored: Tokens before the row whose scores are wanted; ascending and disjoint.
        block_ids: The row's block table, from its first page on, by KV cache group.
    """

    row_id: str
    tokens: TokenRange
    scored: tuple[TokenRange, ...]
    block_ids: tuple[TablePart, ...]


@dataclass(slots=True)
class SegmentOutput:
    """What workers report of segments after a step.

    Attributes:
        key_checks: The number of segment stores whose keys passed the check of
            ``segments.keys.key_check``, summed over workers.
        key_check_failure: What is wrong with the first keys that failed this check; empty if no
            keys failed.
        scores: The scores of the step's probes, by row: one score per scored token, in their order,
            summed over workers. None if some worker has no scores.
    """

    key_checks: int = 0
    key_check_failure: str = ""
    scores: dict[str, Scores | None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is anything to report."""
        return bool(self.key_checks or self.key_check_failure or self.scores)

    def add(self, other: SegmentOutput) -> None:
        """Join the report of another worker. Every worker reports every probe of the step."""
        self.key_checks += other.key_checks
        self.key_check_failure = self.key_check_failure or other.key_check_failure
        for row_id, scores in other.scores.items():
            own = self.scores.get(row_id)
            self.scores[row_id] = None if own is None or scores is None else own + scores
