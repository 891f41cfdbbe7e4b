# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Tokens of segments in the pages of a worker that has no model.

The module replaces ``segments.worker.worker_segments``. The real `SegmentMover` still checks, cuts,
stages and queues. There are no keys to rotate. Instead, a move adds a number to every byte. The
number depends on the shift.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from support.connector.page_contents import moved_bytes, token_axis_of
from support.connector.scripted_transfers import ScriptedTransfers
from support.layout.truth import LayoutFixture
from vllm_ascend_kvext.connector.worker.host_buffer import HostBuffer
from vllm_ascend_kvext.layout.sharing import HostSharing, PlaneShare
from vllm_ascend_kvext.segments.token_rows import (
    HostRows,
    SegmentLayout,
    SegmentRows,
    Slots,
    TokenPlane,
)
from vllm_ascend_kvext.segments.worker.segment_mover import SegmentMover
from vllm_ascend_kvext.transfer.errors import BackendError
from vllm_ascend_kvext.transfer.schema import Direction, RowDtype

_ELEMENT_BYTES = 2


def plain_staging(num_bytes: int) -> HostBuffer:
    return HostBuffer(torch.empty(num_bytes, dtype=torch.uint8))


class SimulatedTokenPages:
    """A `TokenPages` with the pages of a fixture. Each token has one row of a tensor."""

    def __init__(self, pages: LayoutFixture) -> None:
        self._rows = [
            (paged.tensor.movedim(2, 1) if token_axis_of(paged) == 2 else paged.by_row())
            .view(torch.uint8)
            .numpy()
            for paged in pages.tensors
        ]
        self._groups = [paged.group for paged in pages.tensors]
        self.num_pages = len(self._rows[0])
        self.tokens_per_page = {
            group: rows.shape[1] for group, rows in zip(self._groups, self._rows, strict=True)
        }
        self.planes = tuple(
            TokenPlane(
                str(number), group, 1, rows[0, 0].size // _ELEMENT_BYTES, RowDtype.BFLOAT16, None
            )
            for number, (group, rows) in enumerate(zip(self._groups, self._rows, strict=True))
        )

    def read(self, slots: Slots, rows: HostRows) -> None:
        for index, place, pages, in_page in self._places(slots, rows):
            place[:] = self._rows[index][pages, in_page].reshape(place.shape)

    def write(self, slots: Slots, rows: HostRows) -> None:
        for index, place, pages, in_page in self._places(slots, rows):
            of_tensor = self._rows[index]
            of_tensor[pages, in_page] = place.reshape(len(pages), *of_tensor.shape[2:])

    def read_plane(self, index: int, slots: Any) -> Any:
        pages, in_page = divmod(slots, self.tokens_per_page[self._groups[index]])
        return self._rows[index][pages, in_page].reshape(len(slots), -1)

    def _places(self, slots: Slots, rows: HostRows) -> Any:
        """For each plane: its index, its rows in host memory, and the rows' places in pages."""
        memory = rows.memory.numpy()
        for index, (plane, group) in enumerate(zip(self.planes, self._groups, strict=True)):
            first = rows.plane_offsets_bytes[index] + rows.first_row * plane.row_bytes
            num_tokens = len(slots[group])
            place = memory[first : first + num_tokens * plane.row_bytes]
            yield (
                index,
                place.reshape(num_tokens, plane.row_bytes),
                *divmod(slots[group], self.tokens_per_page[group]),
            )


class SimulatedMover(SegmentMover):
    """A `SegmentMover` whose moves follow the script of ``transfers``."""

    def __init__(
        self,
        pages: SimulatedTokenPages,
        host: torch.Tensor,
        layout: SegmentLayout,
        transfers: ScriptedTransfers,
        sharing: HostSharing | None,
        shares: Sequence[PlaneShare],
    ) -> None:
        self._transfers = transfers
        super().__init__(pages, host, layout, plain_staging, sharing=sharing, shares=shares)

    def store(self, rows: Sequence[SegmentRows], block_ids: Any) -> int:
        return self._scripted(super().store, Direction.PAGES_TO_HOST, rows, block_ids)

    def load(self, rows: Sequence[SegmentRows], block_ids: Any) -> int:
        return self._scripted(super().load, Direction.HOST_TO_PAGES, rows, block_ids)

    def check_keys(self, rows: Sequence[SegmentRows]) -> str:
        del rows
        return ""

    def _scripted(
        self,
        move: Callable[[Sequence[SegmentRows], Any], int],
        direction: Direction,
        rows: Sequence[SegmentRows],
        block_ids: Any,
    ) -> int:
        if self._transfers.is_to_fail(direction):
            move(rows[: len(rows) // 2], block_ids)
            raise BackendError("the script lets this move fail")
        return move(rows, block_ids)

    def _stage(self, pages: Any, batch: Any) -> HostRows:
        staged = super()._stage(pages, batch)
        memory = staged.memory.numpy()
        for part in batch:
            for plane, offset_bytes in zip(pages.planes, staged.plane_offsets_bytes, strict=True):
                first = offset_bytes + part.staging_row * plane.row_bytes
                end = first + part.num_tokens * plane.row_bytes
                memory[first:end] += moved_bytes(part.rows.shift_tokens)
        return staged


class SimulatedSegments:
    """Replaces `WorkerSegments`.

    It takes the worker's pages and transfers, and then the arguments of `WorkerSegments`.
    """

    def __init__(
        self, pages: LayoutFixture, transfers: ScriptedTransfers, *of_worker: object
    ) -> None:
        del of_worker
        self._fixture = pages
        self._transfers = transfers
        self.pages = SimulatedTokenPages(pages)

    def pages_of(self, kv_caches: Mapping[str, Any]) -> SimulatedTokenPages:
        del kv_caches
        return self.pages

    def mover(self, host: torch.Tensor, sharing: HostSharing | None) -> SimulatedMover:
        layout = SegmentLayout(
            tuple(plane.row_bytes for plane in self.pages.planes),
            max(paged.reach.window_tokens for paged in self._fixture.tensors),
        )
        shares = [share for group in (sharing.planes if sharing else ()) for share in group]
        return SimulatedMover(self.pages, host, layout, self._transfers, sharing, shares)
