# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""vLLM-Ascend 0.30.0rc2 ignores the interval at which vLLM caches windows.

Its coordinator reads an environment variable that vLLM 0.30 no longer has
(``patch/platform/patch_kv_cache_coordinator.py``, line 138). So it caches at every boundary where a
hit can end. vLLM's own coordinator reads the configuration. With this package vLLM-Ascend's
coordinator reads the configuration, too, if the configured interval is not the default of 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from compressed_attention_model import write_model
from emulated_plans import IS_0_23
from support.scenarios.processes import NPU, PLUGIN_OFF, LazyReports, Plan

pytestmark = pytest.mark.skipif(IS_0_23, reason="vLLM 0.23.0 has the variable")

INTERVAL = "prefix_cache_retention_interval"
ENGINE = {
    "max_model_len": 8192,
    "num_gpu_blocks_override": 3000,
    "enable_prefix_caching": True,
    "distributed_executor_backend": "support.scenarios.own_config.OwnConfigExecutor",
}


@pytest.fixture(scope="module")
def served(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> LazyReports:
    def compressed() -> Path:
        folder = tmp_path_factory.mktemp("model")
        write_model(folder)
        return folder

    models = {
        "windows": (partial(folder_of, "windows"), {INTERVAL: 4096}),
        "DeepSeek-V4": (compressed, {"block_size": 32, INTERVAL: 8192}),
    }
    processes = [
        (environ, {f"{name}, {label}": Plan(model, ["window_blocks"], "models", ENGINE | engine)})
        for label, environ in (("stock", PLUGIN_OFF), ("default", {}))
        for name, (model, engine) in models.items()
    ]
    return LazyReports(tmp_path_factory, processes, NPU)


@pytest.mark.parametrize(
    ("model", "found", "expected"),
    [
        # Five groups of windows of 200 tokens, in blocks of 128. Windows are cached at four
        # multiples and at the end.
        ("windows", {128: [156] * 5}, {128: [10] * 5}),
        # Windows of 128 tokens in blocks of 32, and states of compressors. Hits have 4,096 tokens.
        (
            "DeepSeek-V4",
            {32: [16, 16], 2: [16], 8: [64]},
            {32: [8, 8], 2: [8], 8: [32]},
        ),
    ],
)
def test_windows_are_cached_as_configured_by_default_and_not_by_stock(
    served: LazyReports, model: str, found: dict[int, list[int]], expected: dict[int, list[int]]
) -> None:
    stock = served[f"{model}, stock"].report["facts"]
    assert blocks_by_size(stock["cached blocks, as it is"]) == found
    assert blocks_by_size(stock["cached blocks, by the configuration"]) == expected
    default = served[f"{model}, default"].report["facts"]
    assert blocks_by_size(default["cached blocks, as it is"]) == expected


def blocks_by_size(groups: list[list]) -> dict[int, list[int]]:
    """Cached blocks of groups of windows, summed by block size."""
    found: dict[int, list[int]] = {}
    for spec, block_tokens, num_blocks in groups:
        if "SlidingWindow" in spec:
            found.setdefault(block_tokens, []).append(num_blocks)
    return found
