# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Names that vllm-ascend takes from torch_npu's own extension module."""

from __future__ import annotations

from torch_npu import _emulator

_NPUTaskGroupHandle = _emulator.TaskGroup
_weak_ref_tensor = _emulator.weak_reference
