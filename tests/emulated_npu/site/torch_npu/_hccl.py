# SPDX-License-Identifier: Apache-2.0
"""The communication backend ``hccl``: gloo, on the same memory.

A collective has the host wait for the current stream first, and runs at once. On a device it is put in
a stream of its own; what this hides is said in the README.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torch_npu import _emulator

_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "allgather", "_allgather_base", "gather"),
    *("scatter", "reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base"),
    *("send", "recv"),
)


class EmulatedHccl(dist.ProcessGroup):
    """A process group whose tensors are on the device."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._timeout = timeout
        self._name = self._description = ""

    group_name = property(lambda self: self._name)
    group_desc = property(lambda self: self._description)

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "hccl"

    def get_hccl_comm_name(self, rank: int = 0, **options: Any) -> str:
        return f"emulated-{id(self)}"

    def all_gather_single(self, output: Any, given: Any, timeout: Any = None) -> Any:
        return self._allgather_base(output, given)

    def barrier(self, *options: Any) -> Any:
        _emulator.synchronize_stream(_emulator.current_stream())
        return self._gloo.barrier()

    def shutdown(self) -> None:
        pass

    def abort(self) -> None:
        pass


def _collective(name: str) -> Any:
    def call(self: EmulatedHccl, *args: Any) -> Any:
        given = [_on_cpu(arg) for arg in args if arg is not None]
        return getattr(self._gloo, name)(*given)

    call.__name__ = name
    return call


for _name in _COLLECTIVES:
    setattr(EmulatedHccl, _name, _collective(_name))


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _emulator.as_cpu(value)
    if isinstance(value, (list, tuple)):
        return [_on_cpu(item) for item in value]
    return value


_groups: list[EmulatedHccl] = []
"""torch's C++ side does not keep the Python part of a process group alive."""


def _create(store: Any, rank: int, size: int, timeout: Any) -> EmulatedHccl:
    group = EmulatedHccl(store, rank, size, timeout)
    _groups.append(group)
    return group


def install() -> None:
    """Let torch know the backend."""
    dist.Backend.register_backend("hccl", _create, devices=["npu"])
    dist.is_hccl_available = lambda: True
