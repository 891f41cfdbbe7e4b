# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Rows of tokens in pages that kernels write in the order of the tensors' shapes, as on NPUs.

Such a page has one row per token, so its order need not be learnt. The transfer op moves the rows
as it moves pages. Keys are rotated in host memory, so the device does not rotate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_ascend_kvext.layout.model import Plane
from vllm_ascend_kvext.segments.token_rows import HostRows, Slots, TokenPlane
from vllm_ascend_kvext.transfer.page_transfer import page_transfer
from vllm_ascend_kvext.transfer.placement import Placer, in_calling_thread
from vllm_ascend_kvext.transfer.pools import Pools
from vllm_ascend_kvext.transfer.schema import DTYPE, Direction, Table

_MAX_STAGED_BYTES = 32 << 20
"""The maximum size of the pinned memory that one read takes. torch keeps it."""


class PlacedPlane(NamedTuple):
    """A plane of rows, and the plane of the layout that was registered for it."""

    plane: TokenPlane
    registered: Plane


class DeviceTokenPages:
    """The pages of a worker on a device. `TokenPages` says the order of their planes.

    ``pools`` are the storages of the planes. ``wait`` returns when the copies that this thread has
    enqueued are done. ``move`` moves the rows, as `page_transfer` does.
    """

    def __init__(
        self,
        planes: Sequence[PlacedPlane],
        tokens_per_page: Mapping[int, int],
        num_pages: int,
        pools: Pools,
        placer: Placer = in_calling_thread,
        wait: Callable[[], None] = lambda: None,
        move: Callable[..., None] = page_transfer,
    ) -> None:
        self._placed = tuple(planes)
        self.planes = tuple(placed.plane for placed in planes)
        self.tokens_per_page = dict(tokens_per_page)
        self.num_pages = num_pages
        self._pools = pools
        self._placer = placer
        self._wait = wait
        self._move_pages = move

    def read(self, slots: Slots, rows: HostRows) -> None:
        self._move(self._placed, slots, rows, Direction.PAGES_TO_HOST)

    def write(self, slots: Slots, rows: HostRows) -> None:
        self._move(self._placed, slots, rows, Direction.HOST_TO_PAGES)

    def read_plane(self, index: int, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        import torch

        plane = self.planes[index]
        placed = self._placed[index : index + 1]
        found = np.empty((len(slots), plane.row_bytes), np.uint8)
        max_rows = max(1, _MAX_STAGED_BYTES // plane.row_bytes)
        # A device still writes this memory after a call has returned, so it is pinned.
        staged = torch.empty(
            min(len(slots), max_rows) * plane.row_bytes,
            dtype=torch.uint8,
            pin_memory=self._pools.device_types != ("cpu",),
        )
        for first in range(0, len(slots), max_rows):
            some = slots[first : first + max_rows]
            rows = staged[: len(some) * plane.row_bytes]
            self._move(placed, {plane.group: some}, HostRows(rows, [0]), Direction.PAGES_TO_HOST)
            found[first : first + len(some)] = rows.numpy().reshape(len(some), -1)
        return found

    def _move(
        self, moved: Sequence[PlacedPlane], slots: Slots, rows: HostRows, direction: Direction
    ) -> None:
        planes = [
            (
                plane.group,
                place.storage,
                place.base_bytes,
                place.page_stride_bytes,
                place.region_offset_bytes,
                plane.row_bytes,
                self.tokens_per_page[plane.group],
                self.num_pages,
                offset_bytes,
            )
            for (plane, place), offset_bytes in zip(moved, rows.plane_offsets_bytes, strict=True)
        ]
        runs = [
            runs_of(group, slots[group], self.tokens_per_page[group], rows.first_row)
            for group in sorted({placed.plane.group for placed in moved})
        ]
        try:
            self._move_pages(
                self._pools,
                rows.memory,
                np.array(planes, DTYPE),
                np.concatenate(runs),
                direction,
                placement=self._placer(),
            )
        finally:
            # The caller may overwrite or free the rows in host memory next. This is needed after an
            # error, too: some copies may have been enqueued.
            self._wait()


def runs_of(
    group: int, slots: npt.NDArray[np.int64], tokens_per_page: int, first_row: int
) -> Table:
    """The runs of consecutive slots within one page, in their order. shape: [num_runs, 5]."""
    pages, in_page = np.divmod(slots, tokens_per_page)
    begins = np.flatnonzero(np.diff(slots, prepend=slots[:1] - 2) != 1)
    begins = np.union1d(begins, np.flatnonzero(np.diff(pages, prepend=-1) != 0))
    counts = np.diff(begins, append=len(slots))
    groups = np.full(len(begins), group)
    runs = np.stack([groups, pages[begins], in_page[begins], counts, first_row + begins], axis=1)
    return np.ascontiguousarray(runs, DTYPE)
