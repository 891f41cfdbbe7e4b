# SPDX-License-Identifier: Apache-2.0
"""Sharing of device memory between processes is not emulated."""

from __future__ import annotations

from typing import NoReturn


def rebuild_npu_tensor(*args: object) -> NoReturn:
    raise NotImplementedError("torch_npu.multiprocessing: sharing tensors is not emulated")
