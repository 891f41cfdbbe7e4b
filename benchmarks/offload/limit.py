# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The limit: a streaming copy of the same number of bytes within one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from vllm_ascend_kvext.native import native


class StreamingCopy:
    """Copies one buffer to another past the caches, which hold no byte of either buffer."""

    def __init__(self, num_bytes: int) -> None:
        # The buffers are written before the measurement, so that no page is new to the process.
        self._source = torch.ones(num_bytes, dtype=torch.uint8)
        self._destination = torch.ones(num_bytes, dtype=torch.uint8)

    def run_s(self, num_threads: int, cpus: Sequence[int] = ()) -> float:
        """Copy once. Returns the seconds."""
        copy = native().copy
        num_bytes = self._source.numel()
        addresses = self._destination.data_ptr(), self._source.data_ptr()
        started_s = time.perf_counter()
        copy(*addresses, num_bytes, num_threads, 1, cpus)
        return time.perf_counter() - started_s

    @contextmanager
    def repeated(self, cpu: int) -> Iterator[None]:
        """Copy over and over on one CPU."""
        is_done = threading.Event()

        def run() -> None:
            while not is_done.is_set():
                self.run_s(1, (cpu,))

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            is_done.set()
            thread.join()
