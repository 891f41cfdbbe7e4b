# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which bytes are equal on several workers of a host, and which worker stores them.

With tensor parallelism, all ranks compute the same latents (MLA), and ranks that share a KV head
compute the same keys and values. Such bytes are kept once per host. The ranks that have them store
them together: each rank stores some of the planes::

    4 ranks, 2 KV heads         head 0          head 1
                             rank 0  rank 1  rank 2  rank 3
    plane 0, copies 0 and 1  stores    ·     stores    ·
    plane 1, copies 0 and 1    ·     stores    ·     stores

A load reads every plane, whoever has stored it. The module knows neither specs nor memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm_ascend_kvext.errors import LayoutError
from vllm_ascend_kvext.layout.model import KVLayout


class PlaneShare(NamedTuple):
    """One plane, as one rank has it.

    Attributes:
        num_copies: The different contents that the ranks of this host have for a page of the plane.
            Host memory has each of them once.
        copy: The index of this rank's content among them.
        is_stored: Whether this rank stores it.
        content: The index of this rank's content among those of all ranks of the engine.
    """

    num_copies: int
    copy: int
    is_stored: bool
    content: int


class HostSharing(NamedTuple):
    """How one rank shares the host memory of its host with other ranks.

    Attributes:
        rank: The tensor-parallel rank.
        ranks_of_host: The ranks of its host, in rising order.
        planes: One entry per plane, by group, in the order of the layout.
    """

    rank: int
    ranks_of_host: tuple[int, ...]
    planes: tuple[tuple[PlaneShare, ...], ...]

    @property
    def num_ranks(self) -> int:
        """The number of ranks of this host."""
        return len(self.ranks_of_host)

    @property
    def position(self) -> int:
        """The index of this rank among those of its host."""
        return self.ranks_of_host.index(self.rank)

    @property
    def num_copies(self) -> tuple[tuple[int, ...], ...]:
        """The copies of each plane, by group. All ranks have the same."""
        return tuple(tuple(share.num_copies for share in group) for group in self.planes)

    @property
    def shared_groups(self) -> frozenset[int]:
        """The groups with planes that host memory has fewer times than there are ranks."""
        return frozenset(
            index
            for index, group in enumerate(self.planes)
            if any(share.num_copies < self.num_ranks for share in group)
        )

    def apart(self) -> HostSharing:
        """The same memory, in which every rank has all of its bytes itself."""
        share = PlaneShare(self.num_ranks, self.position, True, self.rank)
        return self._replace(planes=tuple((share,) * len(group) for group in self.planes))


def share_planes(
    layout: KVLayout,
    num_contents_of: Callable[[str], int],
    rank: int,
    num_ranks: int,
    ranks_of_host: Sequence[int],
) -> HostSharing | None:
    """How a rank shares the planes of a layout; None if no two ranks of its host have equal bytes.

    Ranks with equal bytes follow each other: of ``n`` contents, rank ``r`` has the one with the
    index ``r * n // num_ranks`` (``QKVParallelLinear`` in
    ``vllm/model_executor/layers/linear.py``).

    Args:
        num_contents_of: The number of different contents that all ranks together have for a layer,
            by the layer's name: 1 if all ranks have equal bytes, ``num_ranks`` if no two have.
        rank: The tensor-parallel rank.
        num_ranks: All tensor-parallel ranks.
        ranks_of_host: The ranks on the host of this rank, in rising order.

    Raises:
        LayoutError: If the rank is not on its host, or a number of contents does not divide the
            ranks.
    """
    if rank not in ranks_of_host:
        raise LayoutError(f"ranks_of_host: expected rank {rank} among them, found {ranks_of_host}")
    next_part: dict[int, int] = {}
    shares = []
    for group in layout.groups:
        of_group = []
        for plane in group.planes:
            num_contents = num_contents_of(plane.layer_name)
            if num_contents < 1 or num_ranks % num_contents:
                raise LayoutError(
                    f"layer {plane.layer_name}: expected a number of contents that divides "
                    f"{num_ranks} ranks, found {num_contents}"
                )
            of_ranks = [each * num_contents // num_ranks for each in ranks_of_host]
            content = rank * num_contents // num_ranks
            contents = sorted(set(of_ranks))
            with_content = [
                r for r, each in zip(ranks_of_host, of_ranks, strict=True) if each == content
            ]
            part = next_part.get(num_contents, 0)
            next_part[num_contents] = part + 1
            of_group.append(
                PlaneShare(
                    len(contents),
                    contents.index(content),
                    with_content[part % len(with_content)] == rank,
                    content,
                )
            )
        shares.append(tuple(of_group))
    sharing = HostSharing(rank, tuple(ranks_of_host), tuple(shares))
    return sharing if sharing.shared_groups else None
