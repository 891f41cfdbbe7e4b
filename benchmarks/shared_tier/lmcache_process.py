# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Runs an L2 adapter of LMCache, in LMCache's Python. Standard input says what to move.

python lmcache_process.py KIND FOLDER FILE_BYTES FILES_OF_PROMPT PROMPTS
"""

from __future__ import annotations

import hashlib
import os
import select
import sys
import time
from typing import Any

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import (
    FSNativeL2AdapterConfig,
    _create_fs_native_l2_adapter,
)


class Bytes:
    """A ``MemoryObj`` with the methods that adapters use."""

    def __init__(self, view: memoryview) -> None:
        self.byte_array = view

    def get_size(self) -> int:
        return len(self.byte_array)


def main() -> None:
    kind = sys.argv[1]
    folder = sys.argv[2]
    file_bytes, files_of_prompt, num_prompts = map(int, sys.argv[3:])
    if kind == "fs":
        adapter = FSL2Adapter(FSL2AdapterConfig(folder))
    else:
        adapter = _create_fs_native_l2_adapter(FSNativeL2AdapterConfig(folder))
    num_files = files_of_prompt * num_prompts
    memory = memoryview(torch.randint(0, 255, (num_files * file_bytes,), dtype=torch.uint8).numpy())
    keys = [
        ObjectKey(hashlib.sha256(str(number).encode()).digest(), "bench", 0)
        for number in range(num_files)
    ]
    objects = [
        Bytes(memory[number * file_bytes : (number + 1) * file_bytes])
        for number in range(num_files)
    ]
    for line in sys.stdin:
        direction, *prompts = line.split()
        ids = []
        began_s = time.perf_counter()
        for first in (int(prompt) * files_of_prompt for prompt in prompts):
            chosen = slice(first, first + files_of_prompt)
            if direction == "put":
                ids.append(adapter.submit_store_task(keys[chosen], objects[chosen]))
            else:
                ids.append(adapter.submit_load_task(keys[chosen], objects[chosen]))
        is_whole = wait(adapter, direction, ids, files_of_prompt)
        seconds = time.perf_counter() - began_s
        print(f"took {seconds}" if is_whole else "failed", flush=True)


def wait(adapter: Any, direction: str, ids: list[int], files_of_prompt: int) -> bool:
    """Wait until all tasks have ended, as a controller does. Returns whether all succeeded."""
    left = set(ids)
    is_whole = True
    event = adapter.get_store_event_fd() if direction == "put" else adapter.get_load_event_fd()
    while left:
        if select.select([event], [], [], 30)[0]:
            os.read(event, 8)
        if direction == "put":
            for number, result in adapter.pop_completed_store_tasks().items():
                is_whole &= result.is_successful()
                left.discard(number)
        else:
            for number in [*left]:
                found = adapter.query_load_result(number)
                if found is not None:
                    is_whole &= len(found.get_indices_list()) == files_of_prompt
                    left.discard(number)
    return is_whole


if __name__ == "__main__":
    main()
