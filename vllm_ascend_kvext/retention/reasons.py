# SPDX-License-Identifier: Apache-2.0
"""Why a checkpoint is kept, and how often checkpoints kept for that reason turn out useful.

What a workload resumes from is not known in advance: chats resume at the end of an answer, edited
messages before the end of a prompt, questions about a document at its end. So nothing is assumed;
every reason starts out equal and is judged by what became of its checkpoints. Knows no blocks.
"""

from __future__ import annotations

import enum
from collections import Counter
from typing import NamedTuple


class Origin(enum.Enum):
    """What suggested a boundary."""

    GRID = "grid"
    """A multiple of the retention interval."""

    PROMPT = "prompt"
    """The replay boundary: where the same prompt resumes."""

    LATEST = "latest"
    """The last boundary a request computed: where its next turn resumes."""

    LADDER = "ladder"
    """Some distance before the end of a prompt."""

    CHUNK = "chunk"
    """Where a prefill step ended, and left a state."""

    JUNCTION = "junction"
    """Where full attention still hit and the sparse groups did not."""

    WANTED = "wanted"
    """A boundary that an earlier request had computed and that is gone."""

    HINT = "hint"
    """Named by the request."""

    OVERLAP = "overlap"
    """Complete because of blocks that are kept for other boundaries."""

    USE = "use"
    """Resumed from before, whatever it was kept for at first."""


STEPS_END_AT = frozenset({Origin.JUNCTION, Origin.WANTED, Origin.HINT})
"""Worth a prefill step of their own where a state exists only at the end of a step."""


class Reason(NamedTuple):
    """What checkpoints are judged by.

    Attributes:
        origin: What suggested the boundary.
        step: Rung of the ladder; 0 for other origins.
        uses: How often it has been resumed from, counted up to `MOST_USES`.
    """

    origin: Origin
    step: int = 0
    uses: int = 0

    def used_again(self) -> Reason:
        """The reason to keep a checkpoint after one more use: its origin matters no more."""
        return _USED[min(self.uses, MOST_USES - 1)]


MOST_USES = 3
_USED = tuple(Reason(Origin.USE, 0, uses) for uses in range(1, MOST_USES + 1))
_MEMORY = 256
_MOST_EXPECTED_USES = 8.0
_FEWEST_EXPECTED_USES = 0.02
_RETRY_AFTER = 16


class UseRates:
    """Counts, per reason, how checkpoints ended: resumed from, or evicted without."""

    def __init__(self) -> None:
        self._counts: dict[Reason, list[float]] = {}
        self._num_refused: Counter[Reason] = Counter()

    def expected_uses(self, reason: Reason) -> float:
        """Odds that a checkpoint is used before it is evicted; 1 while nothing is known.

        The odds equal the mean number of uses of a checkpoint that is used again and again with
        the same probability. Bounded, for what was useful long ago is not kept for ever.
        """
        used, evicted = self._counts.get(reason, (0.0, 0.0))
        return min((used + 1) / (evicted + 1), _MOST_EXPECTED_USES)

    def is_worth_trying(self, reason: Reason) -> bool:
        """Whether to leave one more checkpoint that nobody asked for.

        Even a checkpoint that is the first to give way takes blocks for a while. One in
        `_RETRY_AFTER` is left all the same, for workloads change.
        """
        if self.expected_uses(reason) >= _FEWEST_EXPECTED_USES:
            return True
        self._num_refused[reason] += 1
        return self._num_refused[reason] % _RETRY_AFTER == 0

    def count_use(self, reason: Reason) -> None:
        self._count(reason, 0)

    def count_eviction(self, reason: Reason) -> None:
        self._count(reason, 1)

    def take_eviction_back(self, reason: Reason) -> None:
        """An evicted checkpoint is asked for: it should have stayed."""
        counts = self._counts.get(reason)
        if counts is not None:
            counts[1] = max(0.0, counts[1] - 1)
        self._count(reason, 0)

    def _count(self, reason: Reason, outcome: int) -> None:
        counts = self._counts.setdefault(reason, [0.0, 0.0])
        counts[outcome] += 1
        if sum(counts) > _MEMORY:
            counts[0] /= 2
            counts[1] /= 2
