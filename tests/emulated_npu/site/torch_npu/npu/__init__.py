# SPDX-License-Identifier: Apache-2.0
"""What torch_npu adds to torch as ``torch.npu``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from torch_npu import _emulator
from torch_npu.npu.memory_counts import (  # noqa: F401
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_peak_memory_stats,
)
from torch_npu.npu.properties import (  # noqa: F401
    can_device_access_peer,
    get_amp_supported_dtype,
    get_device_capability,
    get_device_name,
    get_device_properties,
    get_soc_version,
    is_bf16_supported,
    utilization,
)
from torch_npu.npu.streams import (  # noqa: F401
    Event,
    ExternalEvent,
    Stream,
    current_stream,
    default_stream,
    set_stream,
    stream,
    synchronize,
)

_in_bad_fork = False
config = SimpleNamespace(allow_internal_format=True)
memory = SimpleNamespace(
    NPUPluggableAllocator=None, MemPool=None, use_mem_pool=None, memory_snapshot=list
)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def init() -> None:
    pass


_lazy_init = init


def device_count() -> int:
    return int(_emulator.device_count())


def current_device() -> int:
    return int(_emulator.current_device())


def set_device(device: Any) -> None:
    _emulator.set_device(device_index(device))


def device_index(device: Any) -> int:
    """The number of a device, however it is named; None is the current one."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


class device:  # noqa: N801  # torch's name
    """Makes a device the current one for a block."""

    def __init__(self, device: Any) -> None:
        self._index = device_index(device)

    def __enter__(self) -> None:
        self._before = current_device()
        _emulator.set_device(self._index)

    def __exit__(self, *error: object) -> None:
        _emulator.set_device(self._before)


def manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """The device draws from the generator of the host."""


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


def set_compile_mode(**modes: Any) -> None:
    pass


def is_current_stream_capturing() -> bool:
    return False


def graph_pool_handle() -> None:
    return None


def _refuse(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"torch.npu.{name}: graphs are not emulated")

    return refuse


class NPUGraph:
    """A name for annotations: graphs are not emulated."""

    __init__ = _refuse("NPUGraph")


graph = _refuse("graph")
graph_task_group_begin = _refuse("graph_task_group_begin")
graph_task_group_end = _refuse("graph_task_group_end")
graph_task_update_begin = _refuse("graph_task_update_begin")
graph_task_update_end = _refuse("graph_task_update_end")
