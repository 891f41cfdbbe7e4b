# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Slots of a step's tokens in the paged cache."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from torch_npu.kernels import kernel
from torch_npu.stand_ins import Launched


def compute_slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: Tensor,
    positions: Tensor,
    block_table: Tensor,
    block_table_stride: int,
    block_size: int,
    slot_mapping: Tensor,
    *,
    TOTAL_CP_WORLD_SIZE: int,  # noqa: N803  # the kernel's names
    TOTAL_CP_RANK: int,  # noqa: N803
    CP_KV_CACHE_INTERLEAVE_SIZE: int,  # noqa: N803
    PAD_ID: int,  # noqa: N803
    IS_CIRCULAR: bool = False,  # noqa: N803
    **sizes: int,
) -> None:
    """Write the slot of each token, and ``PAD_ID`` behind the last slot.

    Args:
        query_start_loc: first token of each request, shape ``[requests + 1]``.
        positions: position of each token in its request, shape ``[tokens]``.
        block_table: shape ``[requests, blocks]``.
        slot_mapping: written, shape ``[max_num_tokens]``.
        sizes: sizes of the kernel's tiles.
    """
    if TOTAL_CP_WORLD_SIZE != 1 or IS_CIRCULAR:
        raise NotImplementedError("slot mapping: no context parallelism, no rings are emulated")
    lengths = (query_start_loc[1:] - query_start_loc[:-1]).long()
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    at = positions[: len(rows)].long()
    # A place may lie behind the end of its row, as on the device. Tables of compressed keys have
    # fewer blocks than a request's tokens would take. Such slots are not used.
    places = rows * block_table_stride + at // block_size
    table = block_table.as_strided([block_table.shape[0] * block_table_stride], [1])
    blocks = table[places.clamp(max=len(table) - 1)].long()
    slot_mapping[: len(rows)] = (blocks * block_size + at % block_size).to(slot_mapping.dtype)
    slot_mapping[num_tokens:max_num_tokens] = PAD_ID


def compute_slot_mapping_of_groups(
    group_count: int,
    num_reqs: int,
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: Tensor,
    positions: Tensor,
    block_table_addrs: Tensor,
    slot_mapping_addrs: Tensor,
    block_table_strides: Tensor,
    block_sizes: Tensor,
    min_block_size: int,
    *,
    pad_id: int,
    is_circular_ptr: Tensor | None = None,
) -> None:
    """Write the slots for all groups. Addresses, strides and block sizes have one entry per group.

    Args:
        is_circular_ptr: whether a group is a ring, whose single block is written again and again.
    """
    if is_circular_ptr is not None and is_circular_ptr.any():
        raise NotImplementedError("slot mapping: rings are not emulated")
    for table, slots, stride, block_size in zip(
        block_table_addrs.tolist(),
        slot_mapping_addrs.tolist(),
        block_table_strides.tolist(),
        block_sizes.tolist(),
        strict=True,
    ):
        compute_slot_mapping(
            num_tokens,
            max_num_tokens,
            query_start_loc[: num_reqs + 1],
            positions,
            _integers_at(table, num_reqs * stride).view(num_reqs, stride),
            stride,
            block_size,
            _integers_at(slots, max_num_tokens),
            TOTAL_CP_WORLD_SIZE=1,
            TOTAL_CP_RANK=0,
            CP_KV_CACHE_INTERLEAVE_SIZE=1,
            PAD_ID=pad_id,
        )


def _integers_at(address: int, count: int) -> Tensor:
    return torch.frombuffer((ctypes.c_int32 * count).from_address(address), dtype=torch.int32)


_SLOT_MAPPING = Launched(kernel("_compute_slot_mapping_kernel", compute_slot_mapping))
_ASCEND = "vllm_ascend.ops.triton.compute_slot_mapping"
STAND_INS = {
    ("vllm.v1.worker.block_table", "_compute_slot_mapping_kernel"): _SLOT_MAPPING,  # 0.23.0
    (_ASCEND, "_compute_slot_mapping_kernel"): _SLOT_MAPPING,
    (_ASCEND, "compute_slot_mapping_fused_groups"): kernel(
        "compute_slot_mapping_fused_groups", compute_slot_mapping_of_groups
    ),
}
