# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Engines that sleep and wake up on the emulated NPU.

One process has memory for only one engine that sleeps.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

from support.scenarios import scenario
from support.scenarios.engine import random_tokens, wrong_bytes

PROMPTS_TOKENS = (700, 300)


@scenario
def sleeps(engine: Any) -> None:
    """The same prompts before and after a sleep, and after the device has forgotten them.

    An engine without sleep mode only answers.
    """
    import torch

    rng = random.Random("sleep")
    prompts = [random_tokens(rng, length) for length in PROMPTS_TOKENS]
    llm = engine.llm
    can_sleep = engine.plan["engine"].get("enable_sleep_mode", False)

    def sleep(level: int) -> None:
        engine.note("awake bytes", torch.npu.memory_allocated())
        llm.sleep(level=level)
        engine.note("asleep bytes", torch.npu.memory_allocated())

    def load(label: str) -> None:
        engine.spoil_pages()
        engine.ask(label, prompts)

    engine.ask("before", prompts)
    if can_sleep:
        sleep(1)
        llm.wake_up()
    engine.ask("after a sleep", prompts)
    engine.store(prompts)
    load("loaded after a sleep")
    if can_sleep:
        sleep(2)
        llm.wake_up(tags=["weights"])
        engine.note("has no weights", llm.apply_model(_are_weights_poison)[0])
        llm.apply_model(partial(_load_weights, folder=Path(engine.plan["model"])))
        llm.wake_up(tags=["kv_cache"])
    engine.ask("after new weights", prompts)
    engine.store(prompts)
    load("loaded after new weights")
    side = engine.worker_side
    with wrong_bytes([] if side is None else [side._host.tensor]):
        load("zeroed host memory")


def _are_weights_poison(model: Any) -> bool:
    return all(parameter.isnan().all().item() for parameter in model.parameters())


def _load_weights(model: Any, folder: Path) -> None:
    """Load weights like trainers do. vLLM-Ascend 0.23.0's worker has no `reload_weights`."""
    from safetensors.torch import load_file

    for file in folder.glob("*.safetensors"):
        model.load_weights(load_file(file).items())
