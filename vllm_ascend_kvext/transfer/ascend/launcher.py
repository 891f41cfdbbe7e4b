# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Calls the launcher library of the AscendC kernel through ctypes.

The library is built with ``-DKVEXT_ASCEND=ON`` (``csrc/ascend``). This module knows addresses,
streams and error codes. What a table means is defined in `work_table`.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import vllm_ascend_kvext
from vllm_ascend_kvext.transfer.ascend.work_table import KernelLimits
from vllm_ascend_kvext.transfer.errors import BackendError

if TYPE_CHECKING:
    import torch

LIBRARY_NAME = "libkvext_ascend.so"


class KernelLauncher:
    """One launcher library (``csrc/ascend/launcher.h``) and the host memory it has mapped."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        # By the first address of a mapping: its size, its address on the device, and its owner.
        self._mapped: dict[int, tuple[int, int, object]] = {}
        library.kvext_ascend_limits.restype = None
        self.limits = KernelLimits()
        library.kvext_ascend_limits(ctypes.byref(self.limits))

    def num_cores(self) -> int:
        """The number of vector cores of the current device."""
        count = ctypes.c_int64()
        self._check("kvext_ascend_num_cores", ctypes.byref(count))
        return count.value

    def map_host(self, address: int, num_bytes: int, owner: object) -> None:
        """Let the current device access host memory until `unmap_host`, in the whole process.

        The launcher keeps the owner alive until then. Otherwise the memory could be freed, and
        memory that is not mapped could be allocated at the same address.

        Raises:
            BackendError: A part of the memory is mapped already.
        """
        for first, (mapped_bytes, _, _) in self._mapped.items():
            if first < address + num_bytes and address < first + mapped_bytes:
                raise BackendError(
                    f"ascend-kernel: map_host: expected memory that is not mapped, found "
                    f"{mapped_bytes} bytes at {first:#x} mapped, which overlap {num_bytes} "
                    f"bytes at {address:#x}. Map a buffer once, and unmap_host it before it is "
                    "mapped again."
                )
        mapped = ctypes.c_void_p()
        self._check(
            "kvext_ascend_map_host",
            ctypes.c_void_p(address),
            ctypes.c_uint64(num_bytes),
            ctypes.byref(mapped),
        )
        self._mapped[address] = num_bytes, mapped.value or 0, owner

    def unmap_host(self, address: int) -> None:
        """End the mapping that begins at an address; raises `BackendError` if none begins there."""
        if self._mapped.pop(address, None) is None:
            raise BackendError(
                f"ascend-kernel: unmap_host: expected the first address of mapped memory, found "
                f"{address:#x}. Pass what map_host was called with."
            )
        self._check("kvext_ascend_unmap_host", ctypes.c_void_p(address))

    def device_address(self, address: int, num_bytes: int) -> int | None:
        """The device's address of host memory; None if the memory is not inside one mapping."""
        for first, (mapped_bytes, device_address, _) in self._mapped.items():
            offset = address - first
            if offset >= 0 and offset + num_bytes <= mapped_bytes:
                return device_address + offset
        return None

    def launch(self, table: torch.Tensor, num_cores: int, stream: int) -> None:
        """Enqueue the kernel. ``table`` is on the device, and outlives the stream's work."""
        self._check(
            "kvext_ascend_page_transfer",
            ctypes.c_uint32(num_cores),
            ctypes.c_void_p(stream),
            ctypes.c_void_p(table.data_ptr()),
        )

    def _check(self, function: str, *arguments: object) -> None:
        code = getattr(self._library, function)(*arguments)
        if code != 0:
            raise BackendError(
                f"{LIBRARY_NAME}: {function}: expected 0, found error code {code} of CANN's "
                "runtime. Its log (ASCEND_PROCESS_LOG_PATH) has the cause; the DMA backend needs "
                "none of this."
            )


@functools.cache
def installed_launcher() -> KernelLauncher:
    """The launcher library of this package.

    Raises:
        BackendError: There is no library, or it does not load.
    """
    # A package that is imported from a checkout has several folders, see its __init__.
    folders = [Path(folder) for folder in vllm_ascend_kvext.__path__]
    for folder in folders:
        path = folder / LIBRARY_NAME
        if path.is_file():
            try:
                return KernelLauncher(ctypes.CDLL(str(path)))
            except OSError as error:
                raise BackendError(
                    f"{path} does not load: {error}. Source CANN's set_env.sh before the process "
                    "starts."
                ) from error
    raise BackendError(
        f"ascend-kernel: expected {LIBRARY_NAME} in {', '.join(map(str, folders))}, found none. "
        "Build the package where CANN is installed, with -DKVEXT_ASCEND=ON, or use the DMA backend."
    )
