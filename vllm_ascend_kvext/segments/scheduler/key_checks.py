# SPDX-License-Identifier: Apache-2.0
"""Whether keys of this model are known to turn with their positions alone.

Nothing is reused before all workers have compared keys of equal tokens once; see
``segments.keys.key_check``.
"""

from __future__ import annotations

import logging

from vllm_ascend_kvext.segments.scheduler.segment_learning import SegmentLearning

logger = logging.getLogger("vllm.ascend_kvext.blending")


class KeyChecks:
    """The checks of one engine.

    Args:
        num_workers: All of them have to compare keys.
        learning: Told of the result; None if nothing is learned.

    Attributes:
        are_passed: Whether all workers have compared keys, and found nothing.
        failure: What is wrong with the keys of some worker; empty if nothing is known.
    """

    def __init__(self, num_workers: int, learning: SegmentLearning | None) -> None:
        self.are_passed = False
        self.failure = ""
        self._num_workers = num_workers
        self._num_missing = num_workers
        self._learning = learning

    @property
    def are_open(self) -> bool:
        """Whether a check is still to come."""
        return not (self.are_passed or self.failure)

    def note(self, num_workers: int, failure: str) -> None:
        """So many workers have compared keys well, or one has found a failure."""
        if failure and not self.failure:
            self.failure = failure
            self.are_passed = False
            if self._learning is not None:
                self._learning.stop()
            logger.error(
                "KvextConnector: segments are off: %s Requests are computed as without segments.",
                failure,
            )
        elif not failure and self._num_missing > 0:
            self._num_missing -= num_workers
            self.are_passed = self._num_missing <= 0 and not self.failure
            if self.are_passed and self._learning is not None:
                self._learning.note_keys_checked()

    def note_elsewhere(self) -> None:
        """An engine like this one has compared keys, and found nothing."""
        self.note(self._num_workers, "")
