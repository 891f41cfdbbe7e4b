# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Digests of what a worker has in its pages for the planes that it shares with other workers.

The configuration says that these planes are equal on several ranks. The digests of the first stores
show whether that is so, before anything of them is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.connector.common.messages import PlaneDigest, StoreJob
from vllm_ascend_kvext.layout.host_arrangement import HostArrangement
from vllm_ascend_kvext.layout.model import KVLayout, StatePolicy
from vllm_ascend_kvext.layout.planner import TransferPlanner
from vllm_ascend_kvext.layout.row_map import RowMap
from vllm_ascend_kvext.layout.sharing import HostSharing
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk, TransferPlan
from vllm_ascend_kvext.transfer.schema import PlaneColumn

if TYPE_CHECKING:
    import torch

_DIGEST_BYTES = 16
"""Bytes that differ have the same digest with a probability of 2 to the power of -128."""

Read = Callable[[TransferPlan, "torch.Tensor"], None]
"""Moves the bytes of a plan from the pages to a buffer, and waits for them."""
_new_hash = partial(hashlib.blake2b, digest_size=_DIGEST_BYTES)


def digest_of(content: bytes) -> bytes:
    """The digest of the rows of one plane."""
    return _new_hash(content).digest()


class PlaneDigests:
    """Makes the digests of one worker. Only one thread uses it at a time.

    Args:
        sharing: How the worker shares its host memory.
        is_pinned: Whether the pages are on a device that needs pinned memory.
    """

    def __init__(
        self, layout: KVLayout, states: StatePolicy, sharing: HostSharing, is_pinned: bool
    ) -> None:
        self._sharing = sharing
        self._is_pinned = is_pinned
        self._planner = TransferPlanner(layout, states)
        self._arrangement = HostArrangement(layout)

    def of(self, job: StoreJob, read: Read) -> tuple[PlaneDigest, ...]:
        """The digests of a job's first chunk of rows, and of its first tails.

        All ranks take the same chunks, so their digests can be compared.
        """
        import torch

        found: list[PlaneDigest] = []
        for chunk in _first_chunks(job.chunks):
            plan = self._planner.plan_store([chunk], job.block_ids)
            if not len(plan.runs):
                continue
            buffer = torch.zeros(plan.host_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
            read(plan, buffer)
            found += self._digests(plan.row_maps[0], buffer.numpy())
        return tuple(found)

    def _digests(self, row_map: RowMap, host: Any) -> list[PlaneDigest]:
        hashes: dict[tuple[int, int], Any] = {}
        for group, first_byte, num_rows in _sections(row_map):
            planes = self._arrangement.section(group, num_rows).planes
            for plane, share in enumerate(self._sharing.planes[group]):
                if share.num_copies == self._sharing.num_ranks:
                    continue
                begin = first_byte + int(planes[plane, PlaneColumn.HOST_OFFSET_BYTES])
                end = begin + num_rows * int(planes[plane, PlaneColumn.ROW_BYTES])
                made = hashes.setdefault((group, plane), _new_hash())
                made.update(host[begin:end])
        return [
            PlaneDigest(group, plane, self._sharing.planes[group][plane].content, made.digest())
            for (group, plane), made in hashes.items()
        ]


def _first_chunks(chunks: Iterable[PlacedChunk]) -> list[PlacedChunk]:
    """The first chunk for each set of groups, placed at the beginning of a buffer."""
    found: dict[tuple[int, ...] | None, PlacedChunk] = {}
    for chunk in chunks:
        found.setdefault(chunk.groups, chunk._replace(host_offset_bytes=0))
    return list(found.values())


def _sections(row_map: RowMap) -> Iterator[tuple[int, int, int]]:
    """The sections of a chunk: the group, the first byte, and the number of rows."""
    found: set[tuple[int, int, int]] = set()
    for rows in row_map:
        first_cut = (rows.first_row - rows.section_first_row) // rows.section_rows
        last_cut = (rows.end_row - 1 - rows.section_first_row) // rows.section_rows
        for cut in range(first_cut, last_cut + 1):
            first_byte = rows.host_offset_bytes + cut * rows.cut_bytes
            found.add((rows.group, first_byte, rows.section_rows))
    return iter(sorted(found))
