# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The program in ``docs/transfer.md`` stores and loads."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace

import torch
from support.layout.fixtures import keys_then_values

PAGE = Path(__file__).parents[2] / "docs" / "transfer.md"
NUM_TOKENS = 256


def test_the_example_of_the_page_brings_back_what_it_stored() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    store, comment, load = program.replace("4096", str(NUM_TOKENS)).partition("# Load")
    assert comment
    worker = keys_then_values()
    worker.fill(seed=1)
    stored = worker.copy_of_storages()
    fresh = itertools.count(1)
    tokens_per_page = [
        next(iter(worker.reaches(group))).tokens_per_page for group in range(worker.num_groups)
    ]
    names = {
        "torch": torch,
        "kv_cache_config": worker.config,
        "kv_caches": worker.kv_caches,
        "vllm_config": SimpleNamespace(parallel_config=SimpleNamespace()),
        "block_ids": [
            [next(fresh) for _ in range(math.ceil(NUM_TOKENS / tokens))]
            for tokens in tokens_per_page
        ],
    }
    exec(store, names)
    for storage in worker.storages():
        storage.zero_()
    exec(f"{comment}{load}", names)
    assert not names["load"].missing
    num_loaded_bytes = 0
    for found, before in zip(worker.storages(), stored, strict=True):
        is_loaded = found != 0
        num_loaded_bytes += int(is_loaded.sum())
        assert torch.equal(found[is_loaded], before[is_loaded])
    assert num_loaded_bytes > names["store"].host_bytes * 0.9
