# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Stands in for ``torch_npu`` so that vllm-ascend's platform patches import on a CPU.

Put the folder above this package on ``sys.path`` (or ``PYTHONPATH``). It holds the names that
those patches read while they are imported, and nothing that computes: every function that would
need a device raises. The worker side of vllm-ascend runs in ``tests/emulated_npu``.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import NoReturn

import torch


def _needs_a_device(*_args: object, **_kwargs: object) -> NoReturn:
    raise NotImplementedError("torch_npu is a test stub: there is no NPU to ask")


torch.npu = npu = types.SimpleNamespace(
    # transformers asks for this as soon as a module named torch_npu can be found.
    is_available=lambda: False,
    Stream=type("Stream", (), {"__init__": _needs_a_device}),
    Event=type("Event", (), {"__init__": _needs_a_device}),
    mem_get_info=_needs_a_device,
    memory_stats=_needs_a_device,
    memory_reserved=_needs_a_device,
    reset_peak_memory_stats=_needs_a_device,
)

float4_e2m1fn_x2 = hifloat8 = float8_e8m0fnu = None  # number formats of some devices

_BUILD_INFO = "vllm_ascend._build_info"
if importlib.util.find_spec(_BUILD_INFO) is None:  # A source archive has none.
    build_info = sys.modules[_BUILD_INFO] = types.ModuleType(_BUILD_INFO)
    build_info.__device_type__ = "A2"
