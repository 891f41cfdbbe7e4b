# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which worker writes the sections of segments in host memory that workers of a host share.

An entry has one section for each different content that the workers have. One of the workers with
a content writes its section, and all of them read it. Which one it is follows from the place of the
entry, so that the workers write about equally many::

    4 ranks, 2 KV heads      section 0 (head 0)       section 1 (head 1)
    written by               rank 0 or rank 1         rank 2 or rank 3
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm_ascend_kvext.layout.sharing import HostSharing, PlaneShare
from vllm_ascend_kvext.transfer.schema import HOST_ALIGNMENT_BYTES


class SectionShare(NamedTuple):
    """The sections of one worker.

    Attributes:
        num_sections: The sections of an entry.
        section: The index of this worker's section.
        content: The index of this worker's content among those of all ranks of the engine.
        planes: How the worker shares the planes of segments. One of them decides who writes an
            entry: the worker that stores this plane. Empty if each worker has its own section.
    """

    num_sections: int = 1
    section: int = 0
    content: int = 0
    planes: tuple[PlaneShare, ...] = ()

    def writes(self, offset_bytes: int) -> bool:
        """Whether this worker writes its section of the entry that begins at an offset."""
        if not self.planes:
            return True
        return self.planes[offset_bytes // HOST_ALIGNMENT_BYTES % len(self.planes)].is_stored


def section_share(sharing: HostSharing | None, planes: Sequence[PlaneShare]) -> SectionShare:
    """How a worker shares the sections of segments.

    Args:
        sharing: How the worker shares its host memory; None if it does not.
        planes: The shares of the planes of segments. If the workers have different contents in
            some planes than in others, each worker has its own section.
    """
    if sharing is None:
        return SectionShare()
    contents = {(each.num_copies, each.copy, each.content) for each in planes}
    if len(contents) != 1:
        return apart(sharing)
    (content,) = contents
    is_shared = content[0] < sharing.num_ranks
    return SectionShare(*content, tuple(planes)) if is_shared else apart(sharing)


def apart(sharing: HostSharing) -> SectionShare:
    """The share of a worker that has its own section."""
    return SectionShare(sharing.num_ranks, sharing.position, sharing.rank)
