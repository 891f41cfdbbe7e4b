# SPDX-License-Identifier: Apache-2.0
"""The rule of eviction that learns when chunks are asked for again.

What takes a place should bring the most hits for the time it takes it. So an entry is worth its hit
density: the hits that are expected of it, divided by the requests for which it would have to stay::

    density  =  P(asked for again)  /  E(requests until then, or until it is given up)

This is the rule of LHD (N. Beckmann, H. Chen and A. Cidon, "LHD: improving cache hit rate by
maximizing hit density", NSDI 2018). Unlike the latest use, it lets go what is over, and keeps parts
where not all fits: of ten conversations that go on in turn, the latest use loses each before its
next turn.

The probabilities are those of `reuse_times`: by age and by class. Classes of which little has been
seen are taken to have the ages of all, and few hits in general to be the mean. What was asked for
more often than its classes make expect has a greater density in proportion: the mean of a gamma
prior and of what was seen (so a document that many ask about differs from a conversation).

Densities are learned once per request at most, and when a share of the tier's size was stored
since. Then all entries are queued anew, some of them with each store that follows.
"""

from __future__ import annotations

from vllm_ascend_kvext.store.entries import NEVER_HIT, Entry, Kind, Worth
from vllm_ascend_kvext.store.index import Index
from vllm_ascend_kvext.store.prefix import Prefix, TierGeometry
from vllm_ascend_kvext.store.reuse_times import NUM_CLASSES, NUM_STAGES, ReuseTimes
from vllm_ascend_kvext.store.saved_tokens import saved_tokens
from vllm_ascend_kvext.store.worth import rank_of

LEARNING_SHARE = 1 / 16
"""Of the tier: what is stored between two looks at what was counted."""

PRIOR_REQUESTS = 0.5
"""So many requests' hits count as much as what is assumed."""

PRIOR_TIMES = 0.5
"""So many uses of one chunk count as much as what is expected of its class."""

DENSITY_ONE = 1 << 40
"""Of a hit per request; worths are integers."""

_MOST_HAZARD = 0.999

Table = list[list[float]]
"""By class and stage."""


class Reuse:
    """Keeps what has the greatest hit density.

    Args:
        index: Of the tier.
        geometry: Of the tier.
        capacity_bytes: Of the tier.
        remembered_keys: Of how many chunks it is known when they were asked for.

    Attributes:
        times: What is counted.
        version: Counts up when densities have changed.
    """

    __slots__ = (
        "_capacity_bytes",
        "_densities",
        "_expected",
        "_geometry",
        "_index",
        "_tokens_per_byte",
        "_wanted_bytes",
        "times",
        "version",
    )

    def __init__(
        self, index: Index, geometry: TierGeometry, capacity_bytes: int, remembered_keys: int
    ) -> None:
        self._index = index
        self._geometry = geometry
        self._capacity_bytes = capacity_bytes
        self._tokens_per_byte = 0.0
        self.times = ReuseTimes(remembered_keys)
        self.version = 0
        self._wanted_bytes = 0
        self._forget()

    def worth_of(self, entry: Entry) -> Worth:
        piece = entry.piece
        density = round(self._density(entry) * DENSITY_ONE) if entry.use else -1
        rank = min(rank_of(self._index, self._geometry, entry), NEVER_HIT)
        # Of one density, what was used longest ago: of one use, the end of a prefix.
        moment = (density << 64) + entry.use
        return rank, moment, -piece.end_tokens, piece.kind, entry.number

    def note_wanted(self, entry: Entry, prefix: Prefix) -> None:
        entry.chunk_key = chunk_key(self._geometry, prefix, entry.piece.end_tokens)
        entry.saved_tokens = saved_tokens(self._index, self._geometry, prefix, entry.piece)
        if not self._tokens_per_byte:
            self._tokens_per_byte = max(1, entry.saved_tokens) / entry.num_bytes
        self._wanted_bytes += entry.num_bytes

    def note_ended(self, prefix: Prefix, prompt_tokens: int, end_tokens: int) -> None:
        geometry = self._geometry
        chunk_ends = range(geometry.unit_tokens, end_tokens + 1, geometry.chunk_tokens)
        keys = prefix.keys_at(chunk_ends)
        num_asked = len(range(geometry.unit_tokens, prompt_tokens + 1, geometry.chunk_tokens))
        self.times.note_ended(keys[:num_asked], keys[num_asked:], self._expected)
        if self._wanted_bytes >= LEARNING_SHARE * self._capacity_bytes:
            self._wanted_bytes = 0
            self._learn()

    def clear(self) -> None:
        self.times.clear()
        self._forget()

    def _forget(self) -> None:
        self._wanted_bytes = 0
        self._densities: Table = [[1.0] * NUM_STAGES for _ in range(NUM_CLASSES)]
        self._expected: Table = [[0.0] * NUM_STAGES for _ in range(NUM_CLASSES)]
        self.version += 1

    def _density(self, entry: Entry) -> float:
        """Compared with rows, per byte."""
        share = 1.0
        if entry.piece.kind is Kind.TAILS:
            share = max(1, entry.saved_tokens) / entry.num_bytes / self._tokens_per_byte
        chunk = self.times.get(entry.chunk_key)
        if chunk is None:
            return share * self._densities[0][0]
        density = self._densities[chunk.class_index][self.times.next_stage(chunk)]
        num_again = chunk.num_asked - 1
        return share * density * (PRIOR_TIMES + num_again) / (PRIOR_TIMES + chunk.num_expected)

    def _learn(self) -> None:
        hazards, own_hazards = learned_hazards(self.times)
        self._densities = [densities(row) for row in hazards]
        self._expected = [_expected(row) for row in own_hazards]
        self.version += 1


def chunk_key(geometry: TierGeometry, prefix: Prefix, end_tokens: int) -> bytes:
    """By which a chunk is known however many of its tokens there are: that of its first unit."""
    return prefix.key_at(geometry.chunk_start(end_tokens) + geometry.unit_tokens)


def learned_hazards(times: ReuseTimes) -> tuple[Table, Table]:
    """How likely the next request asks for a chunk, by class and stage.

    Returns:
        Where little was seen: as is to be expected of the class and of the stage; and of neither.
    """
    waited = [sum(column) for column in zip(*times.waited, strict=True)]
    came_back = [sum(column) for column in zip(*times.came_back, strict=True)]
    mean = (sum(came_back) + 1) / (sum(waited) + 100)
    prior_hits = max(1.0, PRIOR_REQUESTS * times.num_chunks / max(1, times.now))
    prior = prior_hits / mean
    of_stage = [(h + prior_hits) / (w + prior) for h, w in zip(came_back, waited, strict=True)]
    hazards, own_hazards = [], []
    for class_came_back, class_waited in zip(times.came_back, times.waited, strict=True):
        usual = sum(w * h / mean for w, h in zip(class_waited, of_stage, strict=True))
        factor = (sum(class_came_back) + prior_hits) / (usual + prior) / mean
        seen = list(zip(class_came_back, class_waited, of_stage, strict=True))
        hazards.append(
            [min(_MOST_HAZARD, (b + prior * h * factor) / (w + prior)) for b, w, h in seen]
        )
        own_hazards.append([(b + prior_hits) / (w + prior) for b, w, _ in seen])
    return hazards, own_hazards


def densities(hazards: list[float]) -> list[float]:
    """Of a class, by stage: hits per request from its beginning to the end of the last one."""
    found = []
    num_hits = num_requests = 0.0
    for stage in reversed(range(NUM_STAGES)):
        width = 1 << stage
        within = 1 - (1 - hazards[stage]) ** width
        num_hits = within + (1 - within) * num_hits
        num_requests = width * (1 - within / 2) + (1 - within) * num_requests
        found.append(num_hits / num_requests)
    return found[::-1]


def _expected(hazards: list[float]) -> list[float]:
    """Of a class, by stage: uses up to its middle."""
    total, found = 0.0, []
    for stage, hazard in enumerate(hazards):
        uses = hazard * (1 << stage)
        found.append(total + uses / 2)
        total += uses
    return found
