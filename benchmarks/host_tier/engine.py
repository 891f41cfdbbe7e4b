# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""vLLM's real scheduler on a layout of the benchmark, with or without a KV connector.

The engine is that of ``vllm_ascend_kvext.replay``. The module knows no trace.
"""

from __future__ import annotations

from typing import Any

from retention.layouts import HASH_TOKENS, BenchLayout
from support.scheduler.layouts import Attention, Group, Layout
from support.scheduler.options import EngineOptions, build_vllm_config
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_ascend_kvext.layout.model import KVLayout
from vllm_ascend_kvext.replay import engine
from vllm_ascend_kvext.replay.engine import HostMemory, HostTier, ScheduledModel

MAX_RUNNING = 16
MAX_MODEL_TOKENS = 1 << 20
STEP_S = 0.1
"""The time of a step on the engine's clock. It is not measured, so no result depends on it."""


def host_memory(
    pages: KVLayout,
    num_bytes: int,
    store_policy: str | None = None,
    hole_reuse: bool | None = False,
    more_options: tuple[tuple[str, Any], ...] = (),
    plans: bool = True,
) -> HostMemory:
    """The host tier of KvextConnector.

    Args:
        num_bytes: Its size. It is only counted, and not allocated.
        store_policy: See ``StorePolicy``. None is the connector's default.
        hole_reuse: Whether chunks behind a missing chunk are loaded. None is the connector's
            default.
        more_options: Further options of the connector, as pairs.
        plans: Whether transfers are planned, see ``PlanningWorker``.
    """
    options = {"store_policy": store_policy, "hole_reuse": hole_reuse, **dict(more_options)}
    is_set = {name: value for name, value in options.items() if value is not None}
    return HostMemory(pages, num_bytes, is_set, plans=plans)


class Engine(engine.Engine):
    """A scheduler, and a stand-in for the connector's worker, with a clock of steps."""

    def __init__(self, layout: BenchLayout, num_blocks: int, host: HostTier | None) -> None:
        vllm_config = build_vllm_config(
            _named_like(layout),
            EngineOptions(
                num_blocks=num_blocks,
                max_num_seqs=MAX_RUNNING,
                max_num_batched_tokens=layout.max_num_batched_tokens,
                max_model_len=MAX_MODEL_TOKENS,
                events=False,
                match_unit_tokens=HASH_TOKENS.get(layout.name),
            ),
        )
        vllm_config.lora_config = None
        model = ScheduledModel(
            vllm_config,
            layout.to_config(num_blocks),
            layout.scheduler_block_tokens,
            layout.hash_block_tokens,
        )
        super().__init__(model, host)
        self._num_steps = 0

    def schedule(self) -> SchedulerOutput:
        self._num_steps += 1
        self.clock.now_s = self._num_steps * STEP_S
        return super().schedule()


def _named_like(layout: BenchLayout) -> Layout:
    """The facts of a layout that the configuration of an engine needs."""
    block_tokens = layout.state_block_tokens or layout.hash_block_tokens
    attention = Attention.MAMBA if layout.state_block_tokens else Attention.FULL
    return Layout(layout.name, (Group(attention, block_tokens),))
