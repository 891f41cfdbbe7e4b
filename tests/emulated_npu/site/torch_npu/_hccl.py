# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The backend ``hccl`` of torch.distributed: gloo, on the memory of the npu tensors.

A collective waits for the current stream, and it has ended when it returns. It cannot be enqueued,
because only a waiting host runs enqueued work: a rank whose host does not wait would not take part.
A collective does not wait for other streams.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_npu import _emulator

COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "allgather",
    "_allgather_base",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "alltoall",
    "alltoall_base",
    "barrier",
)
OTHER_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
}
"""Gloo's function for each method that torch 2.13 calls on process groups."""


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _emulator.alias(value)
    if isinstance(value, (list, tuple)):
        return [_on_cpu(item) for item in value]
    return value


class EmulatedHccl(dist.ProcessGroup):
    """A process group that runs the collectives of a gloo group."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = ""

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        pass

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "hccl"

    def _get_backend(self, device: torch.device) -> EmulatedHccl:
        return self

    def get_hccl_comm_name(self, rank: int) -> str:
        """The name under which kernels with collectives find the group. There are none here."""
        return self._name

    def shutdown(self) -> None:
        pass


def _add(name: str, name_in_gloo: str) -> None:
    def collective(self: EmulatedHccl, *arguments: Any, opts: Any = None) -> Any:
        _emulator.synchronize_current_stream()
        call: Callable[..., Any] = getattr(self._gloo, name_in_gloo)
        given = [_on_cpu(argument) for argument in arguments if argument is not None]
        work = call(*given) if opts is None else call(*given, opts)
        work.wait()
        return work

    setattr(EmulatedHccl, name, collective)


for _name in COLLECTIVES:
    _add(_name, _name)
for _name, _name_in_gloo in OTHER_NAMES.items():
    _add(_name, _name_in_gloo)

_groups: list[EmulatedHccl] = []
"""Keeps the groups in memory, because torch keeps no reference to their Python part."""


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> EmulatedHccl:
    group = EmulatedHccl(store, rank, size, timeout)
    _groups.append(group)
    return group


def install() -> None:
    """Register the backend in torch."""
    dist.Backend.register_backend("hccl", _create, devices=["npu"])
    dist.is_hccl_available = lambda: True  # type: ignore[attr-defined]
