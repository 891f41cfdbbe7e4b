# SPDX-License-Identifier: Apache-2.0
"""Where the rows of a chunk lie in its host buffer, and how large that is.

Plane-major: all rows of a plane are adjacent, and every plane begins at a multiple of 64 bytes
from the start of the buffer. Only the rows that the chunk keeps have room.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_ascend_kvext.layout.model import KVLayout, LayoutGroup, StatePolicy
from vllm_ascend_kvext.layout.rows import TokenRange, dense_rows, kept_rows
from vllm_ascend_kvext.transfer.schema import HOST_ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class HostLayout:
    """Attributes:
    num_bytes: Size of the buffer, a multiple of 64.
    group_rows: Rows that each group keeps, by group.
    plane_offsets_bytes: By group, then by plane.
    """

    num_bytes: int
    group_rows: tuple[range, ...]
    plane_offsets_bytes: tuple[tuple[int, ...], ...]


def host_layout(
    layout: KVLayout, tokens: TokenRange, states: StatePolicy = StatePolicy.EXACT
) -> HostLayout:
    """The host buffer of one chunk.

    Raises:
        TokenRangeError: See ``kept_rows``.
    """
    return _arrange(layout, lambda group: kept_rows(group, tokens, states))


def dense_host_bytes(layout: KVLayout, tokens: TokenRange) -> int:
    """Bytes of a buffer that keeps every row of every group."""
    return _arrange(layout, lambda group: dense_rows(group, tokens)).num_bytes


def _arrange(layout: KVLayout, rows_of: Callable[[LayoutGroup], range]) -> HostLayout:
    end_bytes = 0
    group_rows = []
    group_offsets = []
    for group in layout.groups:
        rows = rows_of(group)
        offsets = []
        for plane in group.planes:
            offsets.append(end_bytes)
            end_bytes += _aligned(plane.row_bytes * len(rows))
        group_rows.append(rows)
        group_offsets.append(tuple(offsets))
    return HostLayout(end_bytes, tuple(group_rows), tuple(group_offsets))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // HOST_ALIGNMENT_BYTES) * HOST_ALIGNMENT_BYTES
