# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/worker/mamba_utils.py``: addresses of states are not overwritten before they are read.

A state moves to another block where a request begins one. Addresses are written into pinned
buffers, which are uploaded without waiting. vLLM uploads before it records the event that the next
step waits for, vLLM-Ascend after it (``vllm_ascend/worker/model_runner_v1.py``, ``execute_model``):
the next step may write first. Only workers import the module, which takes half a second: it is
wrapped then.
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
    """Have the next step write into buffers of its own. The allocator keeps those of this one."""
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
        why="vLLM-Ascend uploads the addresses of states behind the event that the next step waits "
        "for. That step may overwrite them first: states of other blocks are copied.",
        retire_when="0.23 is not supported any more: vLLM-Ascend 0.30 uploads before "
        "`synchronize_input_prep` ends",
        ascend=("vllm_ascend.patch.worker.patch_mamba_utils:preprocess_mamba",),
        when_imported=True,
    ),
)
