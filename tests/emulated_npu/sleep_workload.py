# SPDX-License-Identifier: Apache-2.0
"""Engines that sleep and wake up on the emulated NPU.

    python sleep_workload.py REPORT PLANS

A process has memory for one engine that sleeps. See ``connector_workload.py``.
"""

from __future__ import annotations

import json
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import connector_workload

BLOCK_TOKENS = 128
PROMPTS_TOKENS = (700, 300)


def serve(plan: dict[str, Any]) -> dict[str, Any]:
    """Ask the same prompts before and after a sleep, and when the device has forgotten them.

    An engine without sleep mode only answers.
    """
    import torch

    engine = connector_workload.Engine(plan["model"], plan["engine"])
    llm = engine._llm
    sleeps = plan["engine"].get("enable_sleep_mode", False)
    rng = random.Random("sleep")
    prompts = [connector_workload.random_tokens(rng, length) for length in PROMPTS_TOKENS]
    bytes_of: dict[str, int] = {}

    def ask(label: str) -> None:
        engine.ask(label, prompts)

    def sleep(level: int) -> None:
        bytes_of["awake"] = torch.npu.memory_allocated()
        llm.sleep(level=level)
        bytes_of["asleep"] = torch.npu.memory_allocated()

    def load(label: str) -> None:
        engine.spoil_pages()
        ask(label)

    ask("before")
    if sleeps:
        sleep(1)
        llm.wake_up()
    ask("after a sleep")
    engine.store(prompts)
    load("loaded after a sleep")
    has_no_weights = False
    if sleeps:
        sleep(2)
        llm.wake_up(tags=["weights"])
        has_no_weights = llm.apply_model(_are_weights_poison)[0]
        llm.apply_model(partial(_load_weights, folder=Path(plan["model"])))
        llm.wake_up(tags=["kv_cache"])
    ask("after new weights")
    engine.store(prompts)
    load("loaded after new weights")
    if engine.worker_side is not None:
        engine.worker_side._host.tensor.zero_()
    load("zeroed rows")
    return {"asked": engine._asked, "bytes": bytes_of, "has no weights": has_no_weights}


def _are_weights_poison(model: Any) -> bool:
    return all(parameter.isnan().all().item() for parameter in model.parameters())


def _load_weights(model: Any, folder: Path) -> None:
    """As trainers do: the worker of vLLM-Ascend 0.23.0 has no `reload_weights`."""
    from safetensors.torch import load_file

    for file in folder.glob("*.safetensors"):
        model.load_weights(load_file(file).items())


def main() -> None:
    connector_workload.BLOCK_TOKENS = BLOCK_TOKENS
    report, plans = map(Path, sys.argv[1:])
    reports = {name: serve(plan) for name, plan in json.loads(plans.read_text()).items()}
    report.write_text(json.dumps(reports, default=bytes.hex))


if __name__ == "__main__":
    main()
