# SPDX-License-Identifier: Apache-2.0
"""What a test steers and counts within the process of an engine, one of several ranks.

vLLM imports this module there, because a worker extension is in it. From then on its engines have a
method ``steer``, which a client calls as any other.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vllm.v1.engine.core import EngineCore

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import connector_workload

BLOCK_TOKENS = 128
"""vLLM-Ascend takes no other for these models."""


class WorkerExtension:
    """Methods that the workers get, wherever they are."""

    def skip_loads(self, is_skipping: bool) -> None:
        """Copies to the device copy nothing from now on, as with EMULATED_NPU_SKIPPED_LOADS."""
        from torch_npu.custom_operators import block_copies

        block_copies.is_skipping_loads = is_skipping


class Rank(connector_workload.Engine):
    """The engine of this process, as the workload of tests/engine knows it."""

    def __init__(self, core: Any) -> None:
        connector_workload.BLOCK_TOKENS = BLOCK_TOKENS
        self._rank = core.vllm_config.parallel_config.data_parallel_rank
        self._leaving_out, self._failing = ExitStack(), ExitStack()
        self._balanced: Counter[str] = Counter()
        self._take_up(core)
        self._count_what_is_balanced()

    def reset(self, is_host_too: bool = False) -> None:
        if not self._core.reset_prefix_cache(False, is_host_too and self.has_connector):
            raise RuntimeError("the prefix cache was not reset")

    def leave_out_holes(self, is_left_out: bool) -> None:
        """Until the next call."""
        self._leaving_out.close()
        self._leaving_out.enter_context(self.leaving_out_holes(is_left_out))

    def fail_loads(self, rank: int | None) -> None:
        """Every second one from now on, if this is the rank."""
        self._failing.close()
        if rank == self._rank:
            self._failing.enter_context(self.failing("load"))

    def is_full(self) -> bool:
        """Whether no further request can run."""
        return len(self.scheduler.running) == self.scheduler.max_num_running_reqs

    def take_counted(self) -> dict[str, int]:
        """What was counted since the last call."""
        counted = dict(self._counted)
        self._counted.clear()
        return counted

    def report(self) -> dict[str, Any]:
        """What is left when all is done, and by whom it was done."""
        from torch_npu.custom_operators import block_copies

        return super().report() | {
            "engine": type(self._core).__name__,
            "schedulers": [each.__name__ for each in type(self.scheduler).__mro__],
            "balanced": dict(self._balanced),
            "batched copies": dict(block_copies.counts),
        }

    def _count_what_is_balanced(self) -> None:
        """Steps that know of requests elsewhere, and those that start none because of them."""
        scheduler, balanced = self.scheduler, self._balanced
        queue = getattr(scheduler, "balance_queue", None)
        if queue is None:
            return
        schedule = scheduler.schedule

        def schedule_and_count(*args: Any, **more: Any) -> Any:
            running = [int(each) for number, each in enumerate(queue) if number != self._rank]
            others = max(running)
            balanced["steps beside running requests"] += others > 0
            balanced["steps that held requests back"] += (
                others == scheduler.max_num_running_reqs
                and len(scheduler.running) < others
                and len(scheduler.waiting) > 0
            )
            return schedule(*args, **more)

        scheduler.schedule = schedule_and_count


def steer(core: Any, method: str, arguments: list[Any]) -> Any:
    """Call a method of `Rank`, whose object lives as long as the engine."""
    if not hasattr(core, "steered"):
        core.steered = Rank(core)
    return getattr(core.steered, method)(*arguments)


EngineCore.steer = steer
