# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The scheduler side's seam to a tier behind host memory: what it may do, and the defaults.

A secondary tier brings what host memory lacks, and is given what host memory has. What it brings
becomes entries of the host tier: loads do not know where an entry is from. The scheduler side calls
it in this order::

    has_to_wait ── on_request_begun ── on_stored      for each request
    on_step ── on_output ── on_jobs_ended             in each step

An engine without a secondary tier has the defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_ascend_kvext.connector.common.messages import SecondaryJobs, SecondaryOutput
from vllm_ascend_kvext.connector.common.scheduler_view import Request
from vllm_ascend_kvext.connector.scheduler.request_state import RequestOffloadState
from vllm_ascend_kvext.store.entries import Entry, WantedPiece


class SecondaryTierScheduler:
    """The scheduler side of a secondary tier, for one engine.

    ``WorkerJobs`` gives its jobs their numbers, and calls back when all workers have ended a job.
    """

    @property
    def has_transfers(self) -> bool:
        """Whether steps are needed for what it moves."""
        return False

    @property
    def needs_whole_tails(self) -> bool:
        """Whether no tails may continue others, because each entry is found by itself."""
        return False

    def has_to_wait(
        self,
        request: Request,
        state: RequestOffloadState,
        num_computed_tokens: int,
        further_pieces: Callable[[], Sequence[WantedPiece]],
    ) -> bool:
        """Whether to look at a request later, because something may still come for it.

        The scheduler side asks this in every step.

        Args:
            state: The state of the request. The tier writes its ``secondary``.
            num_computed_tokens: The tokens of the request that the device has.
            further_pieces: What host memory lacks of other prefixes that the request may use.
        """
        return False

    def got_tokens(self, state: RequestOffloadState) -> int:
        """Tokens whose rows the tier has brought for a request, and that are in host memory."""
        return 0

    def on_request_begun(self, request: Request, computed_tokens: int) -> None:
        """A request begins to compute behind tokens that the device has from other requests."""

    def on_stored(self, entry: Entry, request: Request) -> None:
        """A store of the engine's own has ended well."""

    def on_entry_used(self, entry: Entry) -> None:
        """A request uses an extension's entry. The entry has another key space than prompts."""

    def on_step(self, may_wait: bool) -> SecondaryJobs | None:
        """The jobs that the workers begin for the tier with this step; None if there are none.

        Args:
            may_wait: Whether the step computes nothing, so that it may take a little longer.
        """
        return None

    def on_output(self, output: SecondaryOutput) -> None:
        """Take note of what the worker sides of the tier report of a step, joined.

        Called before the jobs of the same report end, and before an extension is told of the
        report.
        """

    def on_jobs_ended(self) -> None:
        """The jobs of the workers' latest report have ended."""

    def keep_apart(self) -> None:
        """Workers that share host memory keep their bytes apart in it from now on.

        Entries have other bytes and sizes, and all that were stored are being forgotten. Called in
        place of `reset`, before the workers are told.
        """

    def reset(self) -> None:
        """Forget what is stored. The reason may be that the weights are replaced."""

    def shutdown(self) -> None:
        """The engine ends. Idempotent."""
