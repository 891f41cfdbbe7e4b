# SPDX-License-Identifier: Apache-2.0
"""Stands in for ``torch_npu`` so that vllm-ascend's platform patches import on a CPU.

Put the folder above this package on ``sys.path`` (or ``PYTHONPATH``). It holds the names that
those patches read while they are imported, and nothing that computes: every function that would
need a device raises. The worker side of vllm-ascend needs far more and is out of reach here.
"""

from __future__ import annotations

import types
from typing import NoReturn

import torch


def _is_available() -> bool:
    # transformers asks this as soon as a module named torch_npu can be found.
    return False


def _needs_a_device(*_args: object, **_kwargs: object) -> NoReturn:
    raise NotImplementedError("torch_npu is a test stub: there is no NPU to ask")


class _Stream:
    """Appears in vllm-ascend's annotations only."""

    __init__ = _needs_a_device


npu = types.ModuleType("torch.npu", doc="The namespace that the real torch_npu adds to torch.")
npu.is_available = _is_available
npu.Stream = _Stream
npu.memory_stats = _needs_a_device
npu.memory_reserved = _needs_a_device
npu.reset_peak_memory_stats = _needs_a_device

torch.npu = npu
# ``torch.device("npu")``, which the platform's configuration makes.
torch.utils.rename_privateuse1_backend("npu")
