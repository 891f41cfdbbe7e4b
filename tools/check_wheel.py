# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Check an installed wheel: its compiled module uses what the CPU can do, and moves bytes exactly.

It needs nothing but the package and its requirements.
"""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.transfer.schema import DTYPE, Direction

PAGES, ROWS_PER_PAGE, ROW_BYTES = 40, 16, 2048
RUN_PAGES = (5, 2, 30, 7)

KERNELS = {"avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"}, "avx2": {"avx2", "fma"}}
"""The features of x86_64 that each kernel needs, the best kernel first."""


def best_kernel() -> str:
    """The rotation kernel that this CPU should have."""
    text = Path("/proc/cpuinfo").read_text()
    flags = set(text.partition("flags")[2].partition("\n")[0].split())
    return next((name for name, needed in KERNELS.items() if needed <= flags), "plain")


def move(direction: Direction) -> None:
    random = np.random.default_rng(0)
    pages = random.integers(0, 256, (PAGES, ROWS_PER_PAGE, ROW_BYTES), np.uint8)
    host = random.integers(0, 256, (len(RUN_PAGES) * ROWS_PER_PAGE, ROW_BYTES), np.uint8)
    wanted_pages, wanted_host = pages.copy(), host.copy()
    for index, page in enumerate(RUN_PAGES):
        rows = slice(index * ROWS_PER_PAGE, (index + 1) * ROWS_PER_PAGE)
        if direction is Direction.PAGES_TO_HOST:
            wanted_host[rows] = pages[page]
        else:
            wanted_pages[page] = host[rows]
    page_bytes = ROWS_PER_PAGE * ROW_BYTES
    planes = [(0, 0, 0, page_bytes, 0, ROW_BYTES, ROWS_PER_PAGE, PAGES, 0)]
    runs = [
        (0, page, 0, ROWS_PER_PAGE, index * ROWS_PER_PAGE) for index, page in enumerate(RUN_PAGES)
    ]
    native().page_transfer(
        np.array([(pages.ctypes.data, pages.nbytes)], DTYPE),
        host.ctypes.data,
        host.nbytes,
        np.array(planes, DTYPE),
        np.array(runs, DTYPE),
        direction,
        2,
        1,
    )
    assert np.array_equal(pages, wanted_pages) and np.array_equal(host, wanted_host), direction


def main() -> None:
    described = native().describe()
    if platform.machine() == "x86_64":
        assert described["rotation_kernel"] == best_kernel(), described
    for direction in Direction:
        move(direction)
    print(f"Python {platform.python_version()} on {platform.machine()}: {described}")


if __name__ == "__main__":
    main()
