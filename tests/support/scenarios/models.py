# SPDX-License-Identifier: Apache-2.0
"""Prompts that are answered three times; the last time the values of a layer are lost.

The first answers are greedy; those after it are by ``top_k``, which takes the path of a sampled
token.
"""

from __future__ import annotations

import random
from typing import Any

from support.scenarios import engine, scenario
from support.scenarios.engine import random_tokens

PROMPTS_TOKENS = (37, 300, 1100, 700)
"""Below a block, over some, over a step, beside another."""
BEST_OF_ONE = {"temperature": 1, "top_k": 1, "top_p": 0.9}


class Engine(engine.Engine):
    """An engine that computes prompts in chunks, beside decode."""

    def report(self) -> dict[str, Any]:
        return super().report() | {
            "is_async": self.scheduler.vllm_config.scheduler_config.async_scheduling,
            "runner": type(self.runner).__name__,
        }

    @property
    def runner(self) -> Any:
        worker = self.core.model_executor.driver_worker
        return getattr(worker, "worker", worker).model_runner


@scenario
def three_times(engine: Engine) -> None:
    rng = random.Random(0)
    prompts = [random_tokens(rng, length) for length in PROMPTS_TOKENS]
    engine.ask("first", prompts)
    engine.ask("cached", prompts, **BEST_OF_ONE)
    forget_values(engine.runner.kv_caches[1])
    engine.ask("spoiled", prompts, **BEST_OF_ONE)


def forget_values(cached: Any) -> None:
    """Set the values that a layer has cached to zero.

    Latent attention has its latents first, which hold the values; others have them last. Linear
    attention has the tokens of its convolution first, and its states last.
    """
    is_latent = cached[0].dim() == 4 and cached[0].shape[-1] != cached[1].shape[-1]
    cached[0 if is_latent else 1].zero_()
