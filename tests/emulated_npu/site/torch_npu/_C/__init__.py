# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Names that vllm-ascend takes from torch_npu's own extension module."""

from __future__ import annotations

import torch


class _NPUTaskGroupHandle:
    """State of graphs, which are not emulated."""


def _weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
