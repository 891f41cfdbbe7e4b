# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Keeps whether the keys of this model have passed the check of ``segments.keys.key_check``.

Segments are reused only after all workers have compared the keys of equal tokens once.
"""

from __future__ import annotations

import logging

from vllm_ascend_kvext.segments.scheduler.segment_learning import SegmentLearning

logger = logging.getLogger("vllm.ascend_kvext.segments")


class KeyChecks:
    """The checks of one engine.

    Args:
        num_workers: The number of workers. All of them have to compare keys.
        learning: Gets the result; None if nothing is learned.

    Attributes:
        are_passed: Whether all workers have compared keys, and found them right.
        failure: What is wrong with the keys of some worker; empty if no failure is known.
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
        """Note ``num_workers`` passed checks, or a failure if ``failure`` is not empty."""
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
        """Note that an equal engine has compared keys, and found them right."""
        self.note(self._num_workers, "")
