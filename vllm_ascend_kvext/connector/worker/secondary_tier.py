# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The worker side's seam to a tier behind host memory: what it may do, and the defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_ascend_kvext.connector.common.messages import SecondaryJobs, WorkerOutput
from vllm_ascend_kvext.connector.worker.extension import RegisteredPages


class SecondaryTierWorker:
    """The worker side of a secondary tier. The model's thread calls all methods.

    Attributes:
        why_torch: Why torch has to allocate the host memory if it is to be pinned; None if it need
            not.
    """

    why_torch: str | None = None

    def register(self, pages: RegisteredPages, place_thread: Callable[[], object]) -> None:
        """Take note of the pages, and of the host memory. Called once.

        Args:
            place_thread: Binds the calling thread to the CPUs of copies. Threads that copy much
                call it before each copy, because all threads may be bound elsewhere meanwhile.

        Raises:
            SettingsError: If the tier of the options cannot be used.
        """

    def describe(self) -> Any:
        """What its scheduler side has to know of this worker: plain data."""
        return None

    def keep_apart(self) -> None:
        """Workers that share host memory keep their bytes apart in it from now on.

        Calls of earlier steps that have not begun fail, because their places are those of bytes
        that workers share. Calls of the next `begin_step` do not fail.
        """

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
