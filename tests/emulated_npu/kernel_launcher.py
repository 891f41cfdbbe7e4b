# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Builds the launcher of the AscendC kernel for the emulated NPU, and counts its launches.

CMake file, launcher and kernel are the real ones of ``csrc/ascend``. The kernel is compiled for
the host against the shim. ``kernel_runtime.cpp`` provides the functions of CANN that they call.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).parent
KERNELS = "libkvext_ascend_kernels.so"
COUNTS = ("launches", "ended", "written bytes", "mappings")
"""Names of the counts, in the order of ``emulated_launches_counts``."""


def build(folder: Path) -> Path:
    """Build the libraries in an empty folder, and return the folder that holds them."""
    from support.transfer.stand_in_cann import install, write_cann

    runtime = f'#include "include/acl/acl.h"\n#include "{HERE / "kernel_runtime.cpp"}"\n'
    emulator = importlib.util.find_spec("_emulated_npu")
    assert emulator is not None and emulator.origin is not None
    return install(
        folder,
        write_cann(folder / "cann", runtime),
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DCMAKE_CXX_STANDARD_LIBRARIES={emulator.origin}",
    )


class KernelLaunches:
    """Counts what the libraries in a folder launched in this process; can turn loads off."""

    def __init__(self, folder: Path) -> None:
        """Have the package find the launcher, as in a build with the kernel."""
        import vllm_ascend_kvext

        assert "torch_npu" in sys.modules, "the emulated NPU comes first: the kernels link it"
        vllm_ascend_kvext.__path__.append(str(folder))
        self._library = ctypes.CDLL(str(folder / KERNELS))

    def counts(self) -> dict[str, int]:
        """The counts, by the names in `COUNTS`."""
        counts = (ctypes.c_int64 * len(COUNTS))()
        self._library.emulated_launches_counts(counts)
        return dict(zip(COUNTS, counts, strict=True))

    def skip_loads(self, is_skipping: bool) -> None:
        """Have kernels that load copy nothing (true), or copy as usual (false)."""
        self._library.emulated_launches_skip_loads(ctypes.c_int32(is_skipping))
