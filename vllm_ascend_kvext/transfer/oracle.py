# SPDX-License-Identifier: Apache-2.0
"""What a transfer means, in torch indexing: slow and obviously right. For tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_ascend_kvext.transfer.schema import Direction, Table

if TYPE_CHECKING:
    import torch


def oracle_transfer(
    pools: Sequence[torch.Tensor],
    host: torch.Tensor,
    planes: Table,
    runs: Table,
    direction: Direction,
) -> None:
    """Move the bytes of a valid transfer, run by run. Arguments as of `page_transfer`."""
    for group, pool, base, stride, region, row_bytes, rows, pages, offset in planes.tolist():
        start = pools[pool].storage_offset() + base + region
        paged = pools[pool].as_strided((pages, rows, row_bytes), (stride, row_bytes, 1), start)
        for run_group, page, first, count, host_row in runs.tolist():
            if run_group != group:
                continue
            in_page = paged[page, first : first + count]
            begin, end = (offset + row * row_bytes for row in (host_row, host_row + count))
            in_host = host[begin:end].view(count, row_bytes)
            if direction == Direction.PAGES_TO_HOST:
                in_host.copy_(in_page)
            else:
                in_page.copy_(in_host)
