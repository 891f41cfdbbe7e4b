# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Models of host tiers that are compared with KvextConnector. The module imports nothing of vLLM.

A model only decides what is kept and what is hit. It moves nothing. Prompts are named by chained
hashes of their blocks, as vLLM names them.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from retention.losses import GroupNeeds

Hashes = Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Computed:
    """The tokens of one request that one step has computed.

    Attributes:
        number: The number of the request in its trace.
        hashes: The chained hashes of the request's blocks, also those behind ``end_tokens``.
        first_tokens: The position of the first token that was not offered to the tier before.
        end_tokens: The position behind the last computed token.
        prompt_tokens: The length of the prompt. Tokens behind it belong to the answer.
        hit_tokens: The tokens that the request did not compute. Of windows and states, it only has
            what computing behind them reads.
    """

    number: int
    hashes: Hashes
    first_tokens: int
    end_tokens: int
    prompt_tokens: int
    hit_tokens: int


class Policy(Protocol):
    """What a host tier keeps."""

    def find(self, number: int, hashes: Hashes, max_tokens: int) -> int:
        """The tokens of a prompt that are hit, counted from its start. At most ``max_tokens``."""
        ...

    def admit(self, number: int) -> None:
        """Note that a request has begun to run, with what was last found for it."""
        ...

    def store(self, computed: Computed) -> None:
        """Keep what a step has computed, and let other entries give way."""
        ...

    @property
    def held_bytes(self) -> int:
        """The bytes of all entries."""
        ...


class Lru:
    """Entries of which the least recently used gives way.

    Args:
        num_bytes: The size of the tier.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.held_bytes = 0
        self._bytes: OrderedDict[object, int] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._bytes

    def touch(self, key: object) -> None:
        self._bytes.move_to_end(key)

    def add(self, key: object, num_bytes: int) -> None:
        """Add an entry as the latest used, or touch it. One that is too large is left out."""
        if key in self._bytes:
            self.touch(key)
            return
        if num_bytes > self.num_bytes:
            return
        while self.held_bytes + num_bytes > self.num_bytes:
            self.held_bytes -= self._bytes.popitem(last=False)[1]
        self._bytes[key] = num_bytes
        self.held_bytes += num_bytes


class LruBlocks:
    """Every computed block of every group is kept, and the least recently used block gives way.

    A hit uses the blocks that it reads. Of the blocks of one request, the last gives way first.

    Args:
        needs: For each group, the blocks that a hit reads.
        page_bytes: For each group, the bytes of a block.
        is_state: For each group, whether a block holds only the state at the end of a step.
        unit_tokens: The unit of hits.
        hash_tokens: The tokens of a hash.
    """

    def __init__(
        self,
        needs: Sequence[GroupNeeds],
        page_bytes: Sequence[int],
        is_state: Sequence[bool],
        unit_tokens: int,
        hash_tokens: int,
        num_bytes: int,
    ) -> None:
        self._needs = needs
        self._page_bytes = page_bytes
        self._is_state = is_state
        self._unit_tokens = unit_tokens
        self._hash_tokens = hash_tokens
        self._entries = Lru(num_bytes)

    @property
    def held_bytes(self) -> int:
        return self._entries.held_bytes

    def find(self, number: int, hashes: Hashes, max_tokens: int) -> int:
        hit_tokens = max_tokens
        for group, need in enumerate(self._needs):
            if need.tail_tokens is None:
                hit_tokens = min(hit_tokens, self._prefix_tokens(group, hashes, hit_tokens))
        hit_tokens -= hit_tokens % self._unit_tokens
        while hit_tokens and not self._has_tails(hashes, hit_tokens):
            hit_tokens -= self._unit_tokens
        self._use(hashes, hit_tokens)
        return hit_tokens

    def admit(self, number: int) -> None:
        pass

    def store(self, computed: Computed) -> None:
        added: list[tuple[int, int, int]] = []
        for group, need in enumerate(self._needs):
            first_tokens = computed.first_tokens
            if need.tail_tokens is not None:
                first_tokens = max(first_tokens, computed.hit_tokens - need.tail_tokens)
            blocks = range(
                first_tokens // need.block_tokens, computed.end_tokens // need.block_tokens
            )
            # A step writes one state, at its end.
            chosen = blocks[-1:] if self._is_state[group] else blocks
            added += [(-(block + 1) * need.block_tokens, group, block) for block in chosen]
        # The last block becomes the oldest entry of the step.
        for _, group, block in sorted(added):
            self._entries.add(self._key(group, computed.hashes, block), self._page_bytes[group])

    def _prefix_tokens(self, group: int, hashes: Hashes, max_tokens: int) -> int:
        block_tokens = self._needs[group].block_tokens
        for block in range(max_tokens // block_tokens):
            if self._key(group, hashes, block) not in self._entries:
                return block * block_tokens
        return max_tokens - max_tokens % block_tokens

    def _has_tails(self, hashes: Hashes, boundary_tokens: int) -> bool:
        return all(
            self._key(group, hashes, block) in self._entries
            for group, need in enumerate(self._needs)
            if need.tail_tokens is not None
            for block in need.tail_blocks(boundary_tokens)
        )

    def _use(self, hashes: Hashes, hit_tokens: int) -> None:
        """Touch the blocks that a hit reads, the last block first."""
        if not hit_tokens:
            return
        read: list[tuple[int, int, int]] = []
        for group, need in enumerate(self._needs):
            if need.tail_tokens is None:
                blocks = range(hit_tokens // need.block_tokens)
            else:
                blocks = need.tail_blocks(hit_tokens)
            read += [(-(block + 1) * need.block_tokens, group, block) for block in blocks]
        for _, group, block in sorted(read):
            self._entries.touch(self._key(group, hashes, block))

    def _key(self, group: int, hashes: Hashes, block: int) -> tuple[int, bytes]:
        end_tokens = (block + 1) * self._needs[group].block_tokens
        return group, hashes[end_tokens // self._hash_tokens - 1]


class LruChunks:
    """LMCache's policy: chunks of prompts, all groups together, and the longest prefix of chunks.

    LMCache stores the whole chunks of a prompt and none with tokens of an answer
    (``save_decode_cache`` is off). Every chunk takes the bytes of all groups. A lookup touches the
    chunks that it finds. Of the chunks of one request, the last is the oldest. The model is kinder
    than LMCache: a chunk gives way only when its place is needed, where LMCache drops a fifth of
    its chunks as soon as four fifths of the memory are used.

    Args:
        chunk_tokens: The tokens of a chunk.
        chunk_bytes: Its bytes in all groups.
    """

    def __init__(
        self, chunk_tokens: int, chunk_bytes: int, hash_tokens: int, num_bytes: int
    ) -> None:
        self._chunk_tokens = chunk_tokens
        self._chunk_bytes = chunk_bytes
        self._hashes_per_chunk = chunk_tokens // hash_tokens
        self._entries = Lru(num_bytes)

    @property
    def held_bytes(self) -> int:
        return self._entries.held_bytes

    def find(self, number: int, hashes: Hashes, max_tokens: int) -> int:
        num_hits = 0
        for chunk in range(max_tokens // self._chunk_tokens):
            if self._key(hashes, chunk) not in self._entries:
                break
            num_hits += 1
        for chunk in reversed(range(num_hits)):
            self._entries.touch(self._key(hashes, chunk))
        return num_hits * self._chunk_tokens

    def admit(self, number: int) -> None:
        pass

    def store(self, computed: Computed) -> None:
        end_tokens = min(computed.end_tokens, computed.prompt_tokens)
        chunks = range(
            computed.first_tokens // self._chunk_tokens, end_tokens // self._chunk_tokens
        )
        for chunk in reversed(chunks):
            self._entries.add(self._key(computed.hashes, chunk), self._chunk_bytes)

    def _key(self, hashes: Hashes, chunk: int) -> bytes:
        return hashes[(chunk + 1) * self._hashes_per_chunk - 1]


def unit_names(hashes: Hashes, hashes_per_unit: int, end_tokens: int, unit_tokens: int) -> Hashes:
    """The hashes that name the whole units of a text up to a token. Units may have many hashes."""
    end = end_tokens // unit_tokens * hashes_per_unit
    return list(hashes[hashes_per_unit - 1 : end : hashes_per_unit])


class Future:
    """Which requests will ask for a unit of a text, in the order in which they will be admitted.

    Args:
        order: The numbers of all requests in that order.
        hashes_of: By number, the hashes of the units that a hit of the request may use.
    """

    def __init__(self, order: Sequence[int], hashes_of: Mapping[int, Hashes]) -> None:
        self._uses: dict[bytes, list[int]] = {}
        self._place = {number: place for place, number in enumerate(order)}
        self._admitted: set[int] = set()
        for place, number in enumerate(order):
            for name in hashes_of[number]:
                self._uses.setdefault(name, []).append(place)
        for places in self._uses.values():
            places.reverse()

    def admit(self, number: int) -> None:
        self._admitted.add(self._place[number])

    def next_use(self, name: bytes) -> int | None:
        """The place of the next request that asks for a unit; None if none will."""
        places = self._uses.get(name)
        while places and places[-1] in self._admitted:
            places.pop()
        return places[-1] if places else None


class Clairvoyant:
    """A tier that knows the future. What is asked for latest gives way, or is never stored.

    A unit of a text is the rows of its tokens in the groups with full attention. Besides, each
    request that will come next for some stored unit needs one tail, what a hit reads of windows
    and states. The tail is where the request's stored units end, wherever that is. A real tier
    must have stored the tail there, so this is a bound and no policy.

    Args:
        unit_bytes: The bytes of a unit.
        tail_bytes: The bytes of a tail; 0 in a layout without windows and states.
    """

    def __init__(
        self,
        future: Future,
        unit_tokens: int,
        hash_tokens: int,
        unit_bytes: int,
        tail_bytes: int,
        num_bytes: int,
    ) -> None:
        self._future = future
        self._unit_tokens = unit_tokens
        self._hashes_per_unit = unit_tokens // hash_tokens
        self._unit_bytes = unit_bytes
        self._tail_bytes = tail_bytes
        self._num_bytes = num_bytes
        self.held_bytes = 0
        self._next_use: dict[bytes, int] = {}
        self._num_units: dict[int, int] = {}
        self._latest: list[tuple[int, int, bytes]] = []
        self._asked: dict[int, Hashes] = {}

    def find(self, number: int, hashes: Hashes, max_tokens: int) -> int:
        names = self._names(hashes, max_tokens)
        self._asked[number] = names
        num_hits = 0
        for name in names:
            if name not in self._next_use:
                break
            num_hits += 1
        return num_hits * self._unit_tokens

    def admit(self, number: int) -> None:
        self._future.admit(number)
        self._keep(self._asked.pop(number, ()), only_held=True)

    def store(self, computed: Computed) -> None:
        # Units before the first one may be lost, and a hit does not offer them again.
        self._keep(self._names(computed.hashes, computed.end_tokens))

    def _names(self, hashes: Hashes, end_tokens: int) -> Hashes:
        return unit_names(hashes, self._hashes_per_unit, end_tokens, self._unit_tokens)

    def _keep(self, names: Hashes, only_held: bool = False) -> None:
        for depth, name in enumerate(names):
            if only_held and name not in self._next_use:
                continue
            place = self._future.next_use(name)
            if self._next_use.get(name) == place:
                continue
            self._drop(name)
            if place is not None:
                self._add(name, place, depth)
        while self.held_bytes > self._num_bytes:
            place, _, name = heapq.heappop(self._latest)
            if self._next_use.get(name) == -place:
                self._drop(name)

    def _add(self, name: bytes, place: int, depth: int) -> None:
        self._next_use[name] = place
        heapq.heappush(self._latest, (-place, -depth, name))
        num_units = self._num_units.get(place, 0)
        self._num_units[place] = num_units + 1
        self.held_bytes += self._unit_bytes + (0 if num_units else self._tail_bytes)

    def _drop(self, name: bytes) -> None:
        place = self._next_use.pop(name, None)
        if place is None:
            return
        self._num_units[place] -= 1
        self.held_bytes -= self._unit_bytes
        if not self._num_units[place]:
            self.held_bytes -= self._tail_bytes
