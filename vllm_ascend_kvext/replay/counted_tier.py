# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A shared tier that holds the names of objects, and no bytes. It never fills, and never fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_ascend_kvext.connector.common.events import TierEvents
from vllm_ascend_kvext.connector.common.messages import Traffic, WorkerLayout, WorkerOutput
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.connector.common.scheduler_view import Request
from vllm_ascend_kvext.connector.scheduler.parts import SchedulerParts
from vllm_ascend_kvext.connector.scheduler.request_state import RequestOffloadState
from vllm_ascend_kvext.connector.scheduler.transfer_cost import TransferCost
from vllm_ascend_kvext.connector.secondary_tier import SecondaryTier
from vllm_ascend_kvext.connector.worker.secondary_tier import SecondaryTierWorker
from vllm_ascend_kvext.shared_tier.backend import Answer, SharedObject, SharedTier
from vllm_ascend_kvext.shared_tier.messages import SharedJobs
from vllm_ascend_kvext.shared_tier.scheduler.questions import SharedRequest
from vllm_ascend_kvext.shared_tier.scheduler.shared_side import SharedSide
from vllm_ascend_kvext.store.entries import WantedPiece

COUNTED_URL = "file:///replay"
"""The value of the option ``shared_tier`` of an engine with this tier. No such folder is used."""


_MAX_ANSWER_S = 60.0
"""An answer is a look into a dictionary. A machine that has other work may take long to get there.
"""


class CountedTier(SharedTier):
    """The names of everything that was put.

    Attributes:
        num_bytes: The bytes of all objects.
    """

    def __init__(self) -> None:
        super().__init__(COUNTED_URL)
        self.num_bytes = 0
        self._object_names: dict[str, str] = {}

    def run_jobs(self, jobs: SharedJobs, results: WorkerOutput) -> None:
        """Do what the workers do with the jobs of a step, and report it."""
        for get in jobs.gets:
            is_there = self.get_into(get, lambda _: None) is Answer.WHOLE
            results.jobs_ended[get.number] = 1
            if is_there:
                results.traffic["get"].add(Traffic(get.num_bytes, 0.0, 1))
            else:
                results.failed_jobs.add(get.number)
        for put in jobs.puts:
            self.put(put)
            results.jobs_ended[put.number] = 1
            results.traffic["put"].add(Traffic(put.num_bytes, 0.0, 1))
        for used in jobs.touches:
            results.jobs_ended[used.number] = 1

    def exist(self, names: Sequence[str]) -> list[str]:
        return [self._object_names.get(name, "") for name in names]

    def _put(self, what: SharedObject) -> None:
        if what.name in self._object_names:
            return
        self.num_bytes += what.num_bytes
        namespace, _, name = what.name.partition("/")
        self._object_names[what.name] = name
        for note in what.notes:
            self._object_names.setdefault(f"{namespace}/{note}", name)

    def _get(self, what: SharedObject, on_bytes: Callable[[int], None]) -> Answer:
        return Answer.WHOLE if what.name in self._object_names else Answer.ABSENT

    def _touch(self, names: Sequence[str]) -> list[bool]:
        return [name in self._object_names for name in names]

    def forget(self, name: str) -> None:
        self._object_names.pop(name, None)

    def engines(self) -> dict[str, Mapping[str, Any]]:
        return {}

    def introduce(self, namespace: str, identity: Mapping[str, Any]) -> None:
        """No other engine reads it."""

    def describe(self) -> tuple[str, Mapping[str, str]]:
        return f"{len(self._object_names)} names", {}


class _AnsweredSide(SharedSide):
    """A scheduler side whose questions are answered at once, as by a tier that takes no time.

    The clock of a play knows nothing of the thread that asks the tier.
    """

    def has_to_wait(
        self,
        request: Request,
        state: RequestOffloadState,
        num_computed_tokens: int,
        further_pieces: Callable[[], Sequence[WantedPiece]],
    ) -> bool:
        if not super().has_to_wait(request, state, num_computed_tokens, further_pieces):
            return False
        asked: SharedRequest | None = state.secondary
        if asked is not None and asked.question is not None:
            asked.is_answered.wait(_MAX_ANSWER_S)
        return super().has_to_wait(request, state, num_computed_tokens, further_pieces)


class CountedSecondaryTier(SecondaryTier):
    """Gives a connector a counted tier in place of the tier of its options."""

    def __init__(
        self, vllm_config: Any, options: ConnectorOptions, backend: CountedTier | None = None
    ) -> None:
        self._options = options
        self._backend = backend or CountedTier()

    def scheduler_side(
        self,
        parts: SchedulerParts,
        workers: Sequence[WorkerLayout],
        cost: TransferCost,
        events: TierEvents,
    ) -> SharedSide:
        return _AnsweredSide(parts, self._options, {}, cost, events, self._backend)

    def worker_side(self, kv_cache_config: Any) -> SecondaryTierWorker:
        return SecondaryTierWorker()
