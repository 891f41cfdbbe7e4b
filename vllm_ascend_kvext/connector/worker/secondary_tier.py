# SPDX-License-Identifier: Apache-2.0
"""The worker side's seam to a tier behind host memory: what it may do, and the defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_ascend_kvext.connector.common.messages import SecondaryJobs, WorkerOutput
from vllm_ascend_kvext.connector.worker.extension import RegisteredPages


class SecondaryTierWorker:
    """The worker side of a secondary tier. The model's thread calls all methods."""

    def register(self, pages: RegisteredPages, begin_thread: Callable[[], object]) -> None:
        """Take note of the pages, and of the host memory. Called once.

        Args:
            begin_thread: Each thread that copies much calls it first.

        Raises:
            SettingsError: If the tier of the options cannot be used.
        """

    def describe(self) -> Any:
        """What its scheduler side has to know of this worker: plain data."""
        return None

    def begin_step(self, jobs: SecondaryJobs | None) -> None:
        """A step begins; ``jobs`` is what the scheduler side has planned for it."""

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait until something has come or ended, or until the timeout.

        Returns:
            False if nothing is under way.
        """
        return False

    def end_step(self) -> WorkerOutput | None:
        """What has ended or come since the last call; None if the tier moves nothing."""
        return None

    def shutdown(self) -> None:
        """The worker ends. Idempotent."""
