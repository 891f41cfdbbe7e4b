# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The AscendC backend: one kernel launch per transfer, for many small scattered runs.

The vector cores read and write the host buffer themselves. So the buffer must be device memory, or
`map_host` must have mapped it for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.transfer.accelerator.device import device_module, device_of
from vllm_ascend_kvext.transfer.ascend.launcher import KernelLauncher, installed_launcher
from vllm_ascend_kvext.transfer.ascend.work_table import HeaderColumn, build_work_table
from vllm_ascend_kvext.transfer.backend import Transfer
from vllm_ascend_kvext.transfer.errors import BackendError
from vllm_ascend_kvext.transfer.schema import Table

if TYPE_CHECKING:
    import torch

_NPU = "npu"


def upload(table: Table, device: torch.device) -> torch.Tensor:
    """Copy a table to the device on its current stream, without waiting for the copy.

    The caching allocators of torch_npu know the stream. They reuse neither the pinned copy nor the
    result before the stream has done its work.
    """
    import torch

    return torch.from_numpy(table).pin_memory().to(device, non_blocking=True)


class AscendKernelBackend:
    """Copies between pools on one NPU and a host buffer that is mapped for it.

    The copies are asynchronous. The bytes have arrived once the stream that was current has done
    its work. Until then the caller keeps pools and host buffer alive.
    """

    name = "ascend-kernel"

    def __init__(
        self,
        launcher: KernelLauncher | None = None,
        upload: Callable[[Table, torch.device], torch.Tensor] = upload,
    ) -> None:
        """Raise `BackendError` if the package was built without the kernel."""
        self._launcher = launcher or installed_launcher()
        self._upload = upload

    def map_host(self, host: torch.Tensor) -> None:
        """Map a buffer, see `KernelLauncher.map_host`. Transfers may use any part of it.

        The call takes long. It is meant for one buffer at start-up.
        """
        num_bytes = host.numel() * host.element_size()
        self._launcher.map_host(host.data_ptr(), num_bytes, owner=host)

    def unmap_host(self, host: torch.Tensor) -> None:
        """Undo `map_host`. The caller has waited for every transfer that uses the buffer."""
        self._launcher.unmap_host(host.data_ptr())

    def can_reach(self, transfer: Transfer) -> bool:
        """Whether the transfer's host buffer is mapped or is device memory."""
        return self._host_address(transfer) is not None

    def run(self, transfer: Transfer) -> None:
        device = device_of(transfer, _NPU, self.name)
        host_address = self._host_address(transfer)
        if host_address is None:
            raise BackendError(
                f"{self.name}: host buffer at {transfer.host_address:#x}, {transfer.host_bytes} "
                "bytes: expected memory that the device can reach, found none mapped around it. "
                "Call map_host on the buffer, once."
            )
        native().validate(*transfer.descriptors)
        if not len(transfer.runs):
            return
        npu = device_module(_NPU)
        with npu.device(device):
            num_cores = self._launcher.num_cores()
            table = build_work_table(
                transfer,
                host_address=host_address,
                num_cores=num_cores,
                limits=self._launcher.limits,
            )
            num_cores = min(num_cores, int(table[HeaderColumn.NUM_UNITS]))
            device_table = self._upload(table, device)
            # torch_npu submits its operators from a thread of its own. The handle of a stream is
            # returned only when that thread has submitted all of them. So the upload is submitted
            # before the launch.
            stream = npu.current_stream().npu_stream
            self._launcher.launch(device_table, num_cores, stream)

    def _host_address(self, transfer: Transfer) -> int | None:
        """The device's address of the host buffer; None if the device cannot reach it."""
        if transfer.host_tensor.device.type == _NPU:
            return transfer.host_address
        return self._launcher.device_address(transfer.host_address, transfer.host_bytes)
