# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The module that torch_npu adds to torch as ``torch.npu``."""

from __future__ import annotations

import types

import torch

from torch_npu.npu.devices import *  # noqa: F403
from torch_npu.npu.graphs import *  # noqa: F403
from torch_npu.npu.memory import *  # noqa: F403
from torch_npu.npu.streams import *  # noqa: F403

config = types.SimpleNamespace(allow_internal_format=True)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The types to which `torch.autocast` may turn numbers."""
    return [torch.float16, torch.bfloat16, torch.float32]


def manual_seed(seed: int) -> None:
    """Random numbers on npu are those of the host's generator."""
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed
