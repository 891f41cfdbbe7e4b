# SPDX-License-Identifier: Apache-2.0
"""Names below ``torch_npu._C``, and modules that need the device's toolkit to be built."""

from __future__ import annotations

import sys
from types import ModuleType

import torch


class ProcessGroupHCCL:
    """Only its options are asked for."""

    class Options:
        def __init__(self) -> None:
            self.hccl_config: dict[str, object] = {}
            self.is_high_priority_stream = False
            self._timeout = None
            self.global_ranks_in_group: list[int] = []
            self.group_name = ""


def _weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def install() -> ModuleType:
    """Put the modules where imports find them; return ``torch_npu._C``."""
    c10d = _module("torch_npu._C._distributed_c10d", ProcessGroupHCCL=ProcessGroupHCCL)
    made = _module(
        "torch_npu._C",
        _weak_ref_tensor=_weak_ref_tensor,
        _NPUTaskGroupHandle=object,
        _distributed_c10d=c10d,
    )
    # vLLM-Ascend's compiled library; `custom_operators` has what it defines.
    _module(
        "vllm_ascend.vllm_ascend_C",
        init_module=None,
        python_create_and_map=None,
        python_unmap_and_release=None,
    )
    # Its kernels without data serve graphs only, and want every operator to be defined.
    _module("vllm_ascend.meta_registration")
    return made


def _module(name: str, **attributes: object) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = None
    vars(module).update(attributes)
    sys.modules[name] = module
    return module
