# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Ways to get the KV of prompts from files into host memory, and to put it into files."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from shared_tier.geometry import Geometry
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.connector.worker.host_buffer import HostBuffer
from vllm_ascend_kvext.shared_tier.backend import SharedObject
from vllm_ascend_kvext.shared_tier.messages import SharedJobs
from vllm_ascend_kvext.shared_tier.worker.object_ranks import object_ranks
from vllm_ascend_kvext.shared_tier.worker.shared_transfers import SharedTransfers

Direction = Literal["get", "put"]
_COUNTER = time.perf_counter


class Contender(Protocol):
    """One way. `name` is printed. ``move`` returns seconds, and raises if a byte is missing."""

    name: str

    def move(self, direction: Direction, prompts: Sequence[int]) -> float: ...

    def close(self) -> None: ...


def host_memory(num_bytes: int) -> HostBuffer:
    """Host memory as a worker has it, filled with random bytes."""
    host = HostBuffer.allocate(num_bytes, torch.device("cpu"))
    host.tensor.random_(generator=torch.Generator().manual_seed(1))
    return host


def memory_of(host: HostBuffer) -> memoryview:
    return memoryview(host.tensor.numpy())


def check(is_right: bool, name: str) -> None:
    if not is_right:
        raise RuntimeError(f"{name} has lost something")


class _InParts:
    """The parts of prompts in host memory."""

    name = ""

    def __init__(self, geometry: Geometry, memory: memoryview) -> None:
        self.geometry = geometry
        self.memory = memory
        self._offsets = (0, *accumulate(geometry.object_bytes))

    def parts(self, prompts: Sequence[int]) -> list[tuple[int, int]]:
        """The offsets and sizes of the parts."""
        sizes = self.geometry.object_bytes
        first = [number * self.geometry.prompt_bytes for number in prompts]
        return [(f + o, s) for f in first for o, s in zip(self._offsets, sizes, strict=False)]

    def close(self) -> None:
        pass


class Memcpy(_InParts):
    """Copies the same number of bytes from other memory, on one thread."""

    name = "memcpy"

    def __init__(self, geometry: Geometry, memory: memoryview) -> None:
        super().__init__(geometry, memory)
        self._here, self._there = (
            np.asarray(memory),
            np.asarray(memory_of(host_memory(len(memory)))),
        )

    def move(self, direction: Direction, prompts: Sequence[int]) -> float:
        target, source = self._here, self._there
        if direction == "put":
            target, source = source, target
        began_s = _COUNTER()
        for offset, size in self.parts(prompts):
            target[offset : offset + size] = source[offset : offset + size]
        return _COUNTER() - began_s


class PlainFiles(_InParts):
    """Opens, reads or writes, and closes files with the same bytes as ours."""

    name = "plain read, write"

    def __init__(self, geometry: Geometry, memory: memoryview, folder: Path) -> None:
        super().__init__(geometry, memory)
        self._folder = folder
        folder.mkdir()

    def move(self, direction: Direction, prompts: Sequence[int]) -> float:
        flags = os.O_RDONLY if direction == "get" else os.O_CREAT | os.O_WRONLY
        began_s = _COUNTER()
        for offset, size in self.parts(prompts):
            file = os.open(self._folder / str(offset), flags)
            left = self.memory[offset : offset + size]
            while left:
                done = os.readv(file, [left]) if direction == "get" else os.write(file, left)
                check(done > 0, self.name)
                left = left[done:]
            os.close(file)
        return _COUNTER() - began_s


class Ours(_InParts):
    """The files tier behind `SharedTransfers`, with the threads that a worker has."""

    name = "ours, verified"

    def __init__(self, geometry: Geometry, host: HostBuffer, folder: Path) -> None:
        super().__init__(geometry, memory_of(host))
        folder.mkdir(0o700)
        options = ConnectorOptions(shared_tier=f"file://{folder}", shared_tier_bytes=64 << 30)
        self._transfers = SharedTransfers(
            options, object_ranks(0, 1, None), memory_of(host), lambda: None
        )

    def move(self, direction: Direction, prompts: Sequence[int]) -> float:
        objects = [
            SharedObject(offset, f"bench/R0-1024-{offset:032x}", offset, size, (f"N{offset:032x}",))
            for offset, size in self.parts(prompts)
        ]
        moved = tuple(objects)
        jobs = SharedJobs(gets=moved) if direction == "get" else SharedJobs(puts=moved)
        began_s = _COUNTER()
        self._transfers.submit(jobs)
        num_ended = num_failed = 0
        while num_ended < len(objects):
            self._transfers.wait_for_end(30)
            found = self._transfers.take_output()
            num_ended += len(found.jobs_ended)
            num_failed += len(found.failed_jobs)
        seconds = _COUNTER() - began_s
        check(not num_failed, self.name)
        return seconds

    def close(self) -> None:
        self._transfers.shutdown()


class VllmFiles:
    """vLLM's own file tier with its region. As in its manager, there is one job per request.

    Args:
        is_direct: Whether the tier may bypass the page cache. By default it does if it can.
    """

    def __init__(self, geometry: Geometry, folder: Path, is_direct: bool = True) -> None:
        from vllm.v1.kv_offload.base import OffloadingSpec, ReqContext, make_offload_key
        from vllm.v1.kv_offload.config import (
            OffloadingCacheConfig,
            OffloadingConfig,
            OffloadingGroupConfig,
            OffloadingModelConfig,
            OffloadingParallelConfig,
        )
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        class Spec(OffloadingSpec):
            get_manager = get_worker = None

        Spec.__abstractmethods__ = frozenset()
        size = geometry.vllm_file_bytes
        self._files_of_prompt = geometry.equal_files(size)
        num_files = self._files_of_prompt * geometry.num_prompts
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(16, ("layer",), 0),),
            worker_kv_bytes_per_block=size,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="bench",
            model=OffloadingModelConfig("bench", "bfloat16"),
            cache=OffloadingCacheConfig(16, 1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
        name = f"kvext-bench-{os.getpid()}-{folder.name}"
        self._region = SharedOffloadRegion(name, num_files, 0, size, size)
        memory = self._region.create_kv_memoryview()
        np.asarray(memory).view(np.uint8)[:] = np.random.default_rng(1).integers(
            0, 256, size, np.uint8
        )
        folder.mkdir()
        self._tier: Any = FileSystemTierManager(Spec(config), memory, "fs", str(folder))
        if not is_direct:
            self._tier._use_o_direct = False
        how = "O_DIRECT" if self._tier._use_o_direct else "page cache"
        self.name = f"vLLM's fs, {how}"
        self._request = ReqContext("bench")
        numbers = range(num_files)
        # The keys are random like hashes, so that files spread over folders.
        hashes = np.random.default_rng(2).bytes(32 * num_files)
        self._keys = [make_offload_key(hashes[32 * n : 32 * n + 32], 0) for n in numbers]
        self._num_jobs = 0

    def move(self, direction: Direction, prompts: Sequence[int]) -> float:
        from vllm.v1.kv_offload.tiering.base import TransferJob

        jobs = []
        for number in prompts:
            first = number * self._files_of_prompt
            files = np.arange(first, first + self._files_of_prompt)
            keys = [self._keys[each] for each in files]
            self._num_jobs += 1
            jobs.append(TransferJob(self._num_jobs, keys, files, direction == "get", self._request))
        submit = self._tier.submit_load if direction == "get" else self._tier.submit_store
        began_s = _COUNTER()
        for job in jobs:
            submit(job)
        self._tier.drain_jobs()
        results = list(self._tier.get_finished_jobs())
        seconds = _COUNTER() - began_s
        check(len(results) == len(jobs) and all(each.success for each in results), self.name)
        return seconds

    def close(self) -> None:
        self._tier.shutdown()
        self._tier._primary_kv_view = None
        self._region.cleanup()


class LmcacheFiles:
    """An L2 adapter of LMCache's server in its own process, without the server's messages."""

    def __init__(self, python: Path, kind: str, geometry: Geometry, folder: Path) -> None:
        self.name = f"LMCache's {kind}"
        folder.mkdir()
        size = geometry.lmcache_file_bytes
        numbers = (size, geometry.equal_files(size), geometry.num_prompts)
        script = Path(__file__).with_name("lmcache_process.py")
        self._process = subprocess.Popen(
            [str(python), "-I", str(script), kind, str(folder), *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "LMCACHE_TRACK_USAGE": "false"},
            text=True,
        )

    def move(self, direction: Direction, prompts: Sequence[int]) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(direction, *prompts, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        check(line.startswith("took "), f"{self.name}: {line!r}: it")
        return float(line.split()[1])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
