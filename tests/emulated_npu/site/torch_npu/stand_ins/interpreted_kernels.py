# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Triton kernels that have no stand-in run in Triton's interpreter.

vLLM's second model runner prepares its inputs and samples with Triton kernels. It asks its
configuration for Triton. ``HAS_TRITON`` stays false everywhere else, so vLLM-Ascend runs its code
without Triton where it has some. vLLM's kernels run where vLLM-Ascend has its own ones
(``patch/worker/patch_v2/patch_triton.py``).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from torch_npu.kernels import kernel
from torch_npu.npu.devices import CUBE_CORES, VECTOR_CORES

# With this variable, functions of Triton's language are interpreted as well.
os.environ["TRITON_INTERPRET"] = "1"
import triton
from triton.runtime.interpreter import InterpretedFunction


class Kernel(InterpretedFunction):  # type: ignore[misc]
    """A kernel that runs on the emulated device. Other kernels call it as a function."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def body(*args: Any, **named: Any) -> None:
            self.run(*args, grid=grid, warmup=False, **named)

        return kernel(self.__name__, body)


class Triton(ModuleType):
    """The module ``triton`` with other decorators."""

    __getattr__ = staticmethod(functools.partial(getattr, triton))

    @staticmethod
    def jit(function: Callable[..., None] | None = None, **options: Any) -> Any:
        return Triton.jit if function is None else Kernel(function)

    @staticmethod
    def autotune(*args: Any, **options: Any) -> Any:
        """Does nothing. Kernels that need this decorator lack arguments and cannot run here."""
        return lambda function: function

    heuristics = autotune


STAND_INS = {
    ("vllm.triton_utils", "triton"): Triton("triton"),
    ("vllm.triton_utils", "tl"): triton.language,
    ("vllm.triton_utils", "tldevice"): SimpleNamespace(
        log1p=lambda x: triton.language.log(1.0 + x)
    ),
    ("vllm_ascend.ops.triton.triton_utils", "_NUM_AICORE"): CUBE_CORES,
    ("vllm_ascend.ops.triton.triton_utils", "_NUM_VECTORCORE"): VECTOR_CORES,
    ("vllm.config.vllm", "HAS_TRITON"): os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1",
}
