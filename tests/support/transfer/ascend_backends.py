# SPDX-License-Identifier: Apache-2.0
"""The Ascend backends for tensors in host memory: the real ones, on `fake_npu` and `ascend_shim`.

For tests that call the op with tensors and do not care how an NPU is simulated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.transfer.ascend_shim import Shim, compile_shim
from support.transfer.fake_npu import FakeNpu, device_tensor, host_tensor, installed_npu
from vllm_ascend_kvext.transfer.ascend.dma import IN_FLIGHT, AscendDmaBackend
from vllm_ascend_kvext.transfer.backend import Backend, Transfer


@contextlib.contextmanager
def simulated_backends(folder: Path) -> Iterator[dict[str, Backend]]:
    """By name. ``folder`` is for the compiled shim, which takes seconds to make."""
    shim = Shim.load(compile_shim(folder))
    with installed_npu() as npu:
        yield {"ascend-dma": _SimulatedDma(npu), "ascend-kernel": _SimulatedKernel(shim)}


@dataclass(frozen=True)
class _SimulatedDma:
    npu: FakeNpu
    name: str = "ascend-dma"

    def run(self, transfer: Transfer) -> None:
        self.npu.host = (transfer.host_address, transfer.host_bytes)
        AscendDmaBackend().run(
            transfer._replace(pool_tensors=(device_tensor(),), host_tensor=host_tensor())
        )
        self.npu.current_stream().synchronize()
        IN_FLIGHT.release_finished()


@dataclass(frozen=True)
class _SimulatedKernel:
    """On 40 cores, with the host buffer at the address that mapping gave it."""

    shim: Shim
    name: str = "ascend-kernel"

    def run(self, transfer: Transfer) -> None:
        self.shim.num_cores = 40
        self.shim.prepare(transfer, is_mapped=True)
        backend = self.shim.backend()
        host = transfer.host_tensor
        backend.map_host(host)
        backend.run(transfer._replace(pool_tensors=(device_tensor(),), host_tensor=host_tensor()))
        backend.unmap_host(host)
