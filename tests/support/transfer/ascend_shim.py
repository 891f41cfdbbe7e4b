# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The AscendC kernel on the host. Its source is compiled against the shim of CANN's calls.

The library has the launcher's functions. So the backend is the real one, but needs no device.
"""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from vllm_ascend_kvext.transfer.ascend.kernel import AscendKernelBackend
from vllm_ascend_kvext.transfer.ascend.launcher import KernelLauncher
from vllm_ascend_kvext.transfer.backend import Transfer
from vllm_ascend_kvext.transfer.schema import PoolColumn, Table

SOURCES = Path(__file__).resolve().parents[3] / "csrc" / "ascend"
SHIM = Path(__file__).resolve().parents[2] / "native" / "shim"
KERNEL = SOURCES / "page_transfer_kernel.cpp"


def compile_shim(folder: Path, kernel: Path = KERNEL) -> Path:
    """Compile a kernel and the shim's driver into a library in ``folder``."""
    library = folder / "libkvext_ascend_shim.so"
    command = ["g++", "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    includes = [f"-I{SHIM}", f"-I{SOURCES}"]
    sources = [str(SHIM / "driver.cpp"), str(kernel)]
    subprocess.run([*command, *includes, *sources, "-o", str(library)], check=True)
    return library


@dataclass
class Shim:
    """One compiled shim.

    Attributes:
        num_cores: The number of vector cores of the simulated device.
        launches: The cores and units of each launch so far.
    """

    library: ctypes.CDLL
    num_cores: int = 1
    launches: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> Shim:
        library = ctypes.CDLL(str(path))
        library.kvext_shim_violation.restype = ctypes.c_char_p
        return cls(library)

    def backend(self) -> AscendKernelBackend:
        return AscendKernelBackend(_ShimLauncher(self), upload=self._upload)

    def prepare(self, transfer: Transfer, *, is_mapped: bool) -> None:
        """Register the memory of a transfer: one side to read, the other side to write once."""
        self.library.kvext_shim_reset(ctypes.c_int64(self.num_cores))
        is_store = transfer.direction == 0
        for pool in transfer.pools:
            address = int(pool[PoolColumn.ADDRESS])
            num_bytes = int(pool[PoolColumn.NUM_BYTES])
            self.register(address, num_bytes, is_writable=not is_store)
        self.register(
            transfer.host_address, transfer.host_bytes, is_mapped=is_mapped, is_writable=is_store
        )

    def register(
        self, address: int, num_bytes: int, *, is_mapped: bool = False, is_writable: bool = False
    ) -> None:
        """Make memory accessible to the kernel.

        If it is mapped, the kernel uses another address.
        """
        self.library.kvext_shim_register(
            ctypes.c_void_p(address),
            ctypes.c_uint64(num_bytes),
            ctypes.c_int32(is_mapped),
            ctypes.c_int32(is_writable),
        )

    @property
    def violation(self) -> str:
        """How the latest launch has violated the hardware's rules. Empty if it has not."""
        return self.library.kvext_shim_violation().decode()

    def _upload(self, table: Table, _device: object) -> SimpleNamespace:
        self.register(table.ctypes.data, table.nbytes)
        return SimpleNamespace(data_ptr=lambda: table.ctypes.data, units=int(table[1]))


class _ShimLauncher(KernelLauncher):
    """The real launcher. Its errors also contain the shim's violation."""

    def __init__(self, shim: Shim) -> None:
        super().__init__(shim.library)
        self._shim = shim

    def launch(self, table: SimpleNamespace, num_cores: int, stream: int) -> None:
        self._shim.launches.append((num_cores, table.units))
        try:
            super().launch(table, num_cores, stream)
        finally:
            assert not self._shim.violation, self._shim.violation
