# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/worker/mamba_utils.py``: addresses of states are not overwritten before they are read.

When a request begins a block, its state is copied to that block. The addresses are written into
pinned buffers, which are uploaded without waiting. The next step waits for an event before it
writes. vLLM uploads before it records that event. vLLM-Ascend uploads after it has recorded the
event (``vllm_ascend/worker/model_runner_v1.py``, ``execute_model``), so the next step may write
before the upload has read. Only workers import the upstream module, and the import takes half a
second. So the function is wrapped when a worker imports the module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, Patch

if TYPE_CHECKING:
    from vllm.v1.utils import CpuGpuBuffer
    from vllm.v1.worker.mamba_utils import MambaCopyBuffers


def leave_buffers_to_the_upload(
    wrapped: Callable[[MambaCopyBuffers], None], _instance: None, copy_bufs: MambaCopyBuffers
) -> None:
    """Give the next step new buffers. The allocator keeps the old buffers until they are read."""
    wrapped(copy_bufs)
    if copy_bufs.offset and copy_bufs.sizes.gpu.device.type == "npu":
        for buffer in (copy_bufs.src_ptrs, copy_bufs.dst_ptrs, copy_bufs.sizes):
            _exchange(buffer)


def _exchange(buffer: CpuGpuBuffer) -> None:
    import torch

    with torch.inference_mode(False):
        buffer.cpu = torch.empty_like(buffer.cpu, pin_memory=buffer.cpu.is_pinned())
    buffer.np = buffer.cpu.numpy()


PATCHES = (
    Patch(
        id="KVX-128",
        target="vllm.v1.worker.mamba_utils:do_mamba_copy_block",
        feature="state-copies",
        vllm=BEFORE_0_30,
        wrapper=leave_buffers_to_the_upload,
        why="vLLM-Ascend uploads the addresses of states after the event that the next step waits "
        "for. That step may overwrite the addresses first. Then states of other blocks are copied.",
        retire_when="0.23 is not supported any more: vLLM-Ascend 0.30 uploads before "
        "`synchronize_input_prep` ends",
        ascend=("vllm_ascend.patch.worker.patch_mamba_utils:preprocess_mamba",),
        when_imported=True,
    ),
)
