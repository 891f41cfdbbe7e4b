# SPDX-License-Identifier: Apache-2.0
"""What copies in host memory take from the model's CPU, by where they run.

    python benchmarks/copies_beside_model.py [--rounds N]

vLLM binds its CPU worker's main thread, and a thread that is started there inherits that one CPU. A
loop of 4 ms of CPU time, bound to one CPU, stands for a decode step. Beside it run: no copies,
copies on that same CPU, copies where `default_placement` puts them. They take turns in one process.
Prints the time of a step by the clock, as ratios to the step without copies.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from vllm_ascend_kvext.transfer.page_transfer import page_transfer
from vllm_ascend_kvext.transfer.placement import CopyPlacement, default_placement
from vllm_ascend_kvext.transfer.pools import Pools
from vllm_ascend_kvext.transfer.schema import Direction

STEP_CPU_S = 0.004
STEPS_PER_TURN = 5
PAGE_BYTES = 16 * 1024 * 1024
NUM_PAGES = 8


class Stores:
    """Stores pages over and over while it is asked to."""

    def __init__(self, placement: CopyPlacement) -> None:
        self._placement = placement
        self._pages = torch.ones(NUM_PAGES * PAGE_BYTES, dtype=torch.uint8)
        self._host = torch.ones(PAGE_BYTES, dtype=torch.uint8)
        self._pools = Pools.of([self._pages])
        self._planes = np.array([(0, 0, 0, PAGE_BYTES, 0, PAGE_BYTES, 1, NUM_PAGES, 0)], np.int64)
        self._is_wanted = threading.Event()
        self.num_stores = 0
        threading.Thread(target=self._run, daemon=True).start()

    @contextmanager
    def running(self) -> Iterator[None]:
        self._is_wanted.set()
        time.sleep(0.01)
        try:
            yield
        finally:
            self._is_wanted.clear()
            time.sleep(0.03)  # The last store ends.

    def _run(self) -> None:
        while True:
            self._is_wanted.wait()
            runs = np.array([(0, 1 + self.num_stores % (NUM_PAGES - 1), 0, 1, 0)], np.int64)
            page_transfer(
                self._pools,
                self._host,
                self._planes,
                runs,
                Direction.PAGES_TO_HOST,
                placement=self._placement,
            )
            self.num_stores += 1


def step_s() -> float:
    """A decode step by the clock: `STEP_CPU_S` of this thread's CPU time."""
    numbers = np.ones((256, 256), np.float32)
    started_s = time.perf_counter()
    end_ns = time.thread_time_ns() + int(STEP_CPU_S * 1e9)
    while time.thread_time_ns() < end_ns:
        numbers.sum()
    return time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        sys.exit("Needs two CPUs: one for the model, one for copies.")
    # As vLLM's CPU worker is started: one variable says where OpenMP has bound it.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = os.environ["GOMP_CPU_AFFINITY"] = str(cpus[0])
    os.sched_setaffinity(0, cpus[:1])
    sys.setswitchinterval(0.0005)
    stores = {
        "copies on the model's CPU": Stores(CopyPlacement.on(cpus[:1])),
        "copies where they run by default": Stores(default_placement()),
    }
    steps_s: dict[str, list[float]] = {"no copies": [], **{name: [] for name in stores}}
    for _ in range(options.rounds):
        steps_s["no copies"] += [step_s() for _ in range(STEPS_PER_TURN)]
        for name, of_name in stores.items():
            with of_name.running():
                steps_s[name] += [step_s() for _ in range(STEPS_PER_TURN)]
    alone_s = statistics.median(steps_s["no copies"])
    for name, found_s in steps_s.items():
        median_s = statistics.median(found_s)
        copied_gb = stores[name].num_stores * PAGE_BYTES / 1e9 if name in stores else 0
        print(
            f"{name:34} step {median_s * 1e3:6.1f} ms  {median_s / alone_s:5.2f} x  "
            f"{copied_gb:6.1f} GB copied"
        )


if __name__ == "__main__":
    main()
