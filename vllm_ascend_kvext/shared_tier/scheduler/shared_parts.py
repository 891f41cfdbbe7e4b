# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The objects that the parts of the shared tier's scheduler side share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from vllm_ascend_kvext.connector.scheduler.parts import SchedulerParts
from vllm_ascend_kvext.connector.scheduler.worker_jobs import WorkerJobs
from vllm_ascend_kvext.shared_tier.backend import SharedTier
from vllm_ascend_kvext.shared_tier.scheduler import limits


class TierJobs:
    """The gets, puts and touches that the workers make.

    Args:
        clock: Seconds that only grow.

    Attributes:
        num_under_way: The number of jobs that have not ended on all workers.
    """

    def __init__(self, jobs: WorkerJobs, clock: Callable[[], float]) -> None:
        self._jobs = jobs
        self._clock = clock
        self._last_change_s = 0.0
        self.num_under_way = 0

    def begin(self, on_end: Callable[[bool], None]) -> int:
        """A job is handed to the workers. Returns its number. See ``WorkerJobs.begin``."""
        self.num_under_way += 1
        return self._jobs.begin(partial(self._end, on_end))

    def drop(self, number: int) -> None:
        """End a job that the workers have not been told of. It has failed."""
        self._jobs.end(number, self._jobs.num_workers, has_failed=True)

    def _end(self, on_end: Callable[[bool], None], has_failed: bool) -> None:
        self.num_under_way -= 1
        self.note_change()
        on_end(has_failed)

    def note_change(self) -> None:
        """Note that a job has begun or ended, or that bytes have come."""
        self._last_change_s = self._clock()

    @property
    def are_moving(self) -> bool:
        """Whether jobs are under way that do not hang."""
        is_quiet = self._clock() - self._last_change_s > limits.MAX_QUIET_S
        return self.num_under_way > 0 and not is_quiet


@dataclass(slots=True)
class SharedParts:
    """The parts that asking, getting, putting and touching share.

    Attributes:
        core: The parts of the connector's scheduler side.
        backend: The tier, as rank 0 uses it.
        namespace: The name space of the engine. It changes if workers begin to keep their bytes
            apart, because entries then have other bytes.
    """

    core: SchedulerParts
    backend: SharedTier
    namespace: str
    jobs: TierJobs

    def full_name(self, name: str) -> str:
        """The name of an object or a note, with the name of the name space."""
        return f"{self.namespace}/{name}"
