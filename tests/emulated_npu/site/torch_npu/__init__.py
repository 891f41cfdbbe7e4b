# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Stands for torch_npu on a machine without an NPU: tensors on a device ``npu`` in host memory.

See the README beside this folder. As on a device, ``import torch`` imports this package, because
``torch_npu.dist-info`` says so. The package adds the device to torch, ``torch.npu``, the
communication backend ``hccl``, the operators of torch_npu and the operators of vLLM-Ascend's own
library.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import torch

from torch_npu import _emulator

torch.utils.rename_privateuse1_backend("npu")
_emulator.start(1)

from torch_npu import npu  # noqa: E402 (torch has to know the device before)

torch._register_device_module("npu", npu)
torch.utils.generate_methods_for_privateuse1_backend()
sys.modules.setdefault("torch.npu", npu)

from torch_npu import _C, _hccl, emulation, stand_ins  # noqa: E402, F401
from torch_npu.kernels import register_operators  # noqa: E402

_hccl.install()
stand_ins.install()

__version__ = torch.__version__.partition("+")[0]
float4_e2m1fn_x2 = getattr(torch, "float4_e2m1fn_x2", None)
float8_e8m0fnu = getattr(torch, "float8_e8m0fnu", None)
hifloat8 = None  # an A2 does not have this type

ACL_FORMAT_ND = 2


def get_npu_format(tensor: torch.Tensor) -> int:
    """The format of a tensor. Memory formats are not emulated: all tensors have the plain one."""
    return ACL_FORMAT_ND


_operators = register_operators()
atb = ModuleType("torch_npu.atb")
for _name, _function in _operators.items():
    # An operator "atb.name" belongs to the namespace ``atb``.
    setattr(
        atb if _name.startswith("atb.") else sys.modules[__name__],
        _name.rpartition(".")[2],
        _function,
    )
_emulator.set_memory_limit(npu.MEMORY_BYTES)


def _autoload() -> None:
    """Read the environment. torch calls it when it is imported.

    `tools/preloaded.py` calls it again in a copy of its process that has another environment.
    """
    os.environ["TRITON_INTERPRET"] = "1"  # See `stand_ins.interpreted_kernels`.
    _emulator.start(int(os.environ.get("EMULATED_NPU_DEVICES", "1")))
    seed = os.environ.get("EMULATED_NPU_SEED")
    emulation.set_seed(int(seed) if seed else None)


_autoload()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(f"torch_npu.{name} is not emulated")
