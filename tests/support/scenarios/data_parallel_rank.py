# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Controls and counters of a test, inside the process of one rank's engine.

vLLM imports this module there, because it has a worker extension. From then on, vLLM's engines have
a method ``steer``. A client calls it like any other method.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

from vllm.v1.engine.core import EngineCore

from support.scenarios import connector


class WorkerExtension:
    """Methods that all workers get, in any process."""

    def skip_loads(self, is_skipping: bool) -> None:
        """Let copies to the device copy nothing from now on."""
        from torch_npu.operators import block_copies

        block_copies.is_skipping_loads = is_skipping


class Rank(connector.Engine):
    """The engine of this process."""

    def __init__(self, core: Any) -> None:
        self._rank = core.vllm_config.parallel_config.data_parallel_rank
        self._leaving_out, self._failing = ExitStack(), ExitStack()
        self._balanced: Counter[str] = Counter()
        self.take_up(core)
        self._count_what_is_balanced()

    def reset(self, is_host_too: bool = False) -> None:
        if not self.core.reset_prefix_cache(False, is_host_too and self.has_connector):
            raise RuntimeError("the prefix cache was not reset")

    def leave_out_holes(self, is_left_out: bool) -> None:
        """Leave holes out until the next call."""
        self._leaving_out.close()
        self._leaving_out.enter_context(self.leaving_out_holes(is_left_out))

    def fail_loads(self, rank: int | None) -> None:
        """From now on, let every second load fail if this is the given rank."""
        self._failing.close()
        if rank == self._rank:
            self._failing.enter_context(self.failing("load"))

    def is_full(self) -> bool:
        """Whether no more requests can run."""
        return len(self.scheduler.running) == self.scheduler.max_num_running_reqs

    def take_counted(self) -> dict[str, int]:
        """The counts since the last call."""
        counted = dict(self.counted)
        self.counted.clear()
        return counted

    def report(self) -> dict[str, Any]:
        """What is left at the end, and which process did the work."""
        return super().report() | {
            "engine": type(self.core).__name__,
            "schedulers": [each.__name__ for each in type(self.scheduler).__mro__],
            "balanced": dict(self._balanced),
        }

    def _count_what_is_balanced(self) -> None:
        """Count steps that know of other ranks' requests, and steps that therefore admit none."""
        scheduler = self.scheduler
        balanced = self._balanced
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
    """Call a method of `Rank`. Its object lives as long as the engine."""
    if not hasattr(core, "steered"):
        core.steered = Rank(core)
    return getattr(core.steered, method)(*arguments)


EngineCore.steer = steer
