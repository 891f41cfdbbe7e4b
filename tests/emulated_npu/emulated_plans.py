# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Constants and plans of the tests that serve on the emulated NPU."""

from __future__ import annotations

from functools import partial
from importlib import metadata
from typing import Any

from support.scenarios import processes

IS_0_23 = metadata.version("vllm-ascend").startswith("0.23.")

RUNNERS = {"V1": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}
"""The environment that selects each model runner of vLLM-Ascend, by name of the runner."""
if not IS_0_23:
    RUNNERS["V2"] = {"VLLM_USE_V2_MODEL_RUNNER": "1"}

GROUPS = {
    "full attention": 1,
    "windows": 6,
    "sinks, windows, experts": 2,
    "latent attention, experts": 1,
    "states": 4,
    "full attention, EAGLE": 1,
    "latent attention, MTP": 1,
}
"""Number of KV cache groups, by model of `random_models` and `draft_models`."""
FULL_POOL_BLOCKS = {1: 120, 2: 240, 4: 400, 6: 700}
CROWDED_BLOCKS = {1: 24, 2: 44, 4: 64, 6: 130}
"""Blocks by the number of KV cache groups. They are too few for the scenario ``storm``."""

connector = partial(processes.connector, host_memory_gib=0.25, store_policy="all")
"""See `processes.connector`."""
small_connector = partial(connector, host_memory_gib=1 / 256)

SLEEPING = {
    "enable_sleep_mode": True,
    "additional_config": {"weight_nz_mode": 0},  # vLLM-Ascend can wake up with this value only.
}
"""Arguments of an engine that can sleep."""


def graphs(mode: str, *sizes: int) -> dict[str, Any]:
    """Arguments of an engine that captures graphs.

    Args:
        mode: A name of vLLM's ``CUDAGraphMode``. Those with pieces need `PIECES`.
        sizes: The numbers of tokens for which graphs are captured. Smaller batches are padded.
    """
    compilation = {"cudagraph_mode": mode, "cudagraph_capture_sizes": sizes}
    return {"enforce_eager": False, "compilation_config": compilation}


PIECES = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}
"""The environment in which vLLM captures pieces of models that it has not compiled."""


def pool_of(model: str, blocks: dict[int, int] = FULL_POOL_BLOCKS) -> dict[str, Any]:
    return {"num_gpu_blocks_override": blocks[GROUPS[model]]}
