# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which rank of an engine moves an object between the shared tier and host memory.

Ranks that have the same host memory get an object once, and put it once. Ranks with host memory of
their own get objects by themselves, and put once what is equal on all of them::

                                     gets                  puts and touches    objects are of
    one host memory                  one rank of the host  one of the host     the host's first rank
    one host memory, all is equal    one rank of the host  one of all ranks    rank 0
    own memory, all is equal         each rank             one of all ranks    rank 0
    own memory                       each rank             each rank           each rank

The name of an object decides which rank it is, so that all ranks decide the same.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

from vllm_ascend_kvext.layout.sharing import HostSharing


class ObjectRanks(NamedTuple):
    """The ranks that move the objects of one rank.

    Attributes:
        rank: The rank.
        of_objects: The rank by which the tier knows the objects.
        getting: The ranks that have the same host memory. One of them gets each object.
        putting: The ranks of which one puts and touches each object.
    """

    rank: int
    of_objects: int
    getting: tuple[int, ...]
    putting: tuple[int, ...]

    def gets(self, name: str) -> bool:
        """Whether this rank gets an object."""
        return _chosen(self.getting, name) == self.rank

    def puts(self, name: str) -> bool:
        """Whether this rank puts and touches an object."""
        return _chosen(self.putting, name) == self.rank


def object_ranks(rank: int, num_equal: int, sharing: HostSharing | None) -> ObjectRanks:
    """The ranks that move the objects of a rank.

    Args:
        num_equal: The number of ranks, from rank 0 on, that have the same KV; 1 if each has its
            own.
        sharing: How the rank shares its host memory; None if it does not. The entries of shared
            memory have the bytes of all ranks of the host.
    """
    of_host = (rank,) if sharing is None else sharing.ranks_of_host
    if num_equal > 1:
        return ObjectRanks(rank, 0, of_host, tuple(range(num_equal)))
    return ObjectRanks(rank, of_host[0], of_host, of_host)


def _chosen(ranks: tuple[int, ...], name: str) -> int:
    return ranks[zlib.crc32(name.encode()) % len(ranks)]
