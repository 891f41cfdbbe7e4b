# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of a step lie in the paged cache."""

from __future__ import annotations

import torch

from torch_npu.kernels import kernel
from torch_npu.stand_ins import Launched


def compute_slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    block_size: int,
    slot_mapping: torch.Tensor,
    *,
    TOTAL_CP_WORLD_SIZE: int,  # noqa: N803  # the kernel's names
    TOTAL_CP_RANK: int,  # noqa: N803
    CP_KV_CACHE_INTERLEAVE_SIZE: int,  # noqa: N803
    PAD_ID: int,  # noqa: N803
    BLOCK_SIZE: int,  # noqa: N803
) -> None:
    """Write the slot of each token, and ``PAD_ID`` behind them.

    Args:
        query_start_loc: where each request's tokens begin, shape ``[requests + 1]``.
        positions: of each token in its request, shape ``[tokens]``.
        block_table: shape ``[requests, blocks]``.
        slot_mapping: written, shape ``[max_num_tokens]``.
    """
    if TOTAL_CP_WORLD_SIZE != 1:
        raise NotImplementedError("slot mapping: context parallelism is not emulated")
    lengths = (query_start_loc[1:] - query_start_loc[:-1]).long()
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    at = positions[: len(rows)].long()
    # As on the device, where nothing stops a row: tables of compressed keys have fewer blocks than
    # a request's tokens would take. Nobody uses those slots.
    places = rows * block_table_stride + at // block_size
    table = block_table.as_strided([block_table.shape[0] * block_table_stride], [1])
    blocks = table[places.clamp(max=len(table) - 1)].long()
    slot_mapping[: len(rows)] = (blocks * block_size + at % block_size).to(slot_mapping.dtype)
    slot_mapping[num_tokens:max_num_tokens] = PAD_ID


STAND_INS = {
    ("vllm.v1.worker.block_table", "_compute_slot_mapping_kernel"): Launched(
        kernel("_compute_slot_mapping_kernel", compute_slot_mapping)
    )
}
