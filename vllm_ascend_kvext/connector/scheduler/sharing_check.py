# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Whether what the workers share is equal on all of them, by digests of the first stores.

The configuration says which bytes are equal (`layout.rank_contents`). A kernel or a collective
operation may still compute them in another order on another rank. So the first stores of each group
that ranks share are compared. A store ends, so that it can be found, in the same report that has
its last digests. Where digests differ, each worker keeps its own bytes from then on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_ascend_kvext.connector.common.messages import EXTRA_ROWS, PlaneDigest, WorkerOutput
from vllm_ascend_kvext.layout.sharing import HostSharing

OfRanks = dict[int, tuple[PlaneDigest, ...]]


@dataclass(slots=True)
class _UnderWay:
    """A store that some workers have ended, and others have not.

    Attributes:
        of_ranks: The digests of the ranks that have ended it, and have not failed.
        num_ended: The workers that have ended it, well or not.
    """

    of_ranks: OfRanks = field(default_factory=dict)
    num_ended: int = 0


class SharingCheck:
    """The check of one engine.

    Args:
        sharing: How any worker shares its host memory; None if none does.
        num_workers: The number of workers.
        groups: The groups of the layout that are stored.
        has_extras: Whether the workers share rows of an extension.

    Attributes:
        difference: What differs, for a message; None if nothing has been found to differ.
        is_first: Whether no store has been compared yet. Nothing may be loaded before.
    """

    def __init__(
        self,
        sharing: HostSharing | None,
        num_workers: int,
        groups: frozenset[int],
        has_extras: bool = False,
    ) -> None:
        self._num_workers = num_workers
        shared = frozenset[int]() if sharing is None else sharing.shared_groups
        self._unproven = set(shared & groups) | ({EXTRA_ROWS} if has_extras else set())
        self._under_way: dict[int, _UnderWay] = {}
        self.difference: str | None = None
        self.is_first = bool(self._unproven)

    @property
    def is_pending(self) -> bool:
        """Whether stores are to be compared, because something has not been."""
        return bool(self._unproven) and self.difference is None

    @property
    def compares_groups(self) -> bool:
        """Whether stores of groups of the layout are to be compared."""
        return bool(self._unproven - {EXTRA_ROWS}) and self.difference is None

    @property
    def compares_extras(self) -> bool:
        """Whether stores of rows of an extension are to be compared."""
        return EXTRA_ROWS in self._unproven and self.difference is None

    def note(self, results: WorkerOutput) -> None:
        """Workers report a step. A store counts when all workers have ended it, and none failed."""
        for number, num_workers in results.jobs_ended.items():
            if not self.is_pending:
                break
            store = self._under_way.setdefault(number, _UnderWay())
            store.num_ended += num_workers
            store.of_ranks.update(results.digests.get(number, {}))
            if store.num_ended == self._num_workers:
                del self._under_way[number]
                if len(store.of_ranks) == self._num_workers:
                    self._compare(store.of_ranks)
        if not self.is_pending:
            self._under_way.clear()

    def _compare(self, of_ranks: OfRanks) -> None:
        digests: dict[tuple[int, int, int], dict[bytes, int]] = {}
        for rank, of_rank in sorted(of_ranks.items()):
            for group, plane, content, digest in of_rank:
                digests.setdefault((group, plane, content), {}).setdefault(digest, rank)
        for (group, plane, _), found in sorted(digests.items()):
            if len(found) > 1:
                first, second, *_ = found.values()
                what = "an extension's rows" if group == EXTRA_ROWS else f"group {group}"
                self.difference = f"plane {plane} of {what} on ranks {first} and {second}"
                self.is_first = False
                return
        for group in list(self._unproven):
            if all(any(each.group == group for each in of_rank) for of_rank in of_ranks.values()):
                self._unproven.remove(group)
                self.is_first = False
