# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Makes KV events of the host tier for routers. `vllm.distributed.kv_events` publishes them.

The events describe blocks of full-attention groups, as the events of vLLM's OffloadingConnector do.
Routers count such blocks only. A block has the group, the block size, the hash, the parent and the
extra keys that vLLM's events of the local prefix cache have for it. Rows of all full-attention
groups are stored together, so each such group has its own events.

Entries of the tier consist of units, and a unit may be longer or shorter than a block. A block is
*complete* while all units that it overlaps are in host memory. Two prompts may part behind a block,
but within its last unit: then the block is complete while the units of either prompt are there::

    units     [  0  )[  1  )[  2  )[  3  )     [         0         )    two prompts, which part
    blocks    [      0      )[      1      )   [         0'        )    behind block 0
                                          blocks [  0  )[  1  )

A router drops an event whose parent it does not know. So a complete block whose parent has not been
announced waits until the parent is announced. If a parent is removed before its child, the child
stays announced: routers find it again with the parent.

Window tails and states have no events, because no request can use them without the rows before
them.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    BlockHashListWithBlockSize,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from vllm_ascend_kvext.store.entries import Entry, Kind
from vllm_ascend_kvext.store.prefix import HashedPrefix

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

MEDIUM_CPU = "CPU"


class TierEvents:
    """Collects events until vLLM takes them.

    Args:
        kinds: The ``kv_cache_spec_kind`` of each KV cache group. If it is empty, events are off:
            nothing is collected.
    """

    def __init__(self, kinds: Sequence[str] = ()) -> None:
        self._kinds = kinds
        self._groups: list[_GroupBlocks] = []
        self._units: set[bytes] = set()  # The keys of the units that are in host memory.
        self._events: list[KVCacheEvent] = []

    @classmethod
    def of(cls, kv_cache_config: KVCacheConfig) -> TierEvents:
        """The events of an engine that publishes events."""
        groups = kv_cache_config.kv_cache_groups
        return cls([get_kv_cache_spec_kind(group.kv_cache_spec).value for group in groups])

    @property
    def are_on(self) -> bool:
        return bool(self._kinds)

    def begin(self, tokens_per_block: Mapping[int, int]) -> None:
        """Take note of the full-attention groups. Call it once, before anything is stored.

        Args:
            tokens_per_block: Tokens per block, by KV cache group.
        """
        if self.are_on:
            self._groups = [
                _GroupBlocks(group, self._kinds[group], tokens, self._units)
                for group, tokens in tokens_per_block.items()
            ]

    def fixed(self, prefix: HashedPrefix) -> HashedPrefix:
        """The prefix that `stored` needs when a store has ended. Call it when the store is planned.

        Until it ends, the request may get other hashes (`PrivateHashes`), and the entry does not.
        """
        if not self._groups:
            return prefix
        upstream = None if prefix.upstream is None else self.fixed(prefix.upstream)
        return HashedPrefix(tuple(prefix.hashes), prefix.tokens_per_hash, upstream)

    def stored(self, entry: Entry, prefix: HashedPrefix, request: Request) -> None:
        """Announce the blocks of an entry that can be found from now on.

        Args:
            entry: The entry. Nothing is announced for tails.
            prefix: The tokens that the entry was stored for, see `fixed`.
            request: The request with these tokens. It may have ended.
        """
        if not self._groups or entry.piece.kind is not Kind.ROWS:
            return
        new_keys = [key for key in entry.keys if key not in self._units]
        self._units.update(new_keys)
        for group in self._groups:
            self._events += group.completed(new_keys)
            self._events += group.added(entry, prefix, request)

    def removed(self, keys: Iterable[bytes]) -> None:
        """Announce that rows were removed: whole entries, or parts of them.

        Args:
            keys: The keys of the units that no entry has any more, see ``HostTier``. Units that
                were not announced are left out.
        """
        gone = [key for key in keys if key in self._units]
        self._units.difference_update(gone)
        for group in self._groups:
            self._events += group.removed(gone)

    def take(self) -> list[Any]:
        """Return the events since the last call, in their order."""
        events = self._events
        self._events = []
        return events


@dataclass(slots=True, eq=False)
class _Block:
    """A block in units of which some are in host memory.

    Attributes:
        parent: The hash of the block before it; None for the first block.
        units: The keys of the units that it overlaps.
        num_missing: How many of these units are not in host memory.
        is_announced: Whether it is complete, and routers know its hash.
        event: Announces this block alone, but has no token ids; None if the block was announced,
            and will not be again.
        token_ids: The token ids of ``event``. A list of them would take ten times the memory.
    """

    block_hash: bytes
    parent: bytes | None
    units: Sequence[bytes]
    num_missing: int
    is_announced: bool = False
    event: BlockStored | None = None
    token_ids: array[int] | None = None


class _GroupBlocks:
    """The blocks of one full-attention group.

    Args:
        stored: The keys of the units that are in host memory. The caller keeps the set.
    """

    def __init__(
        self, index: int, kind: str, tokens_per_block: int, stored: Collection[bytes]
    ) -> None:
        self._index = index
        self._kind = kind
        self._tokens_per_block = tokens_per_block
        self._stored = stored
        self._by_unit: dict[bytes, list[_Block]] = {}
        # How many announced blocks have a hash: more than one if prompts part in their last unit.
        self._announced: dict[bytes, int] = {}
        # Complete blocks that are not announced, by the hash of their parent.
        self._waiting: dict[bytes, list[_Block]] = {}

    def completed(self, keys: Iterable[bytes]) -> list[BlockStored]:
        """The events of known blocks that are complete with some new units."""
        events: list[BlockStored] = []
        for key in keys:
            for block in self._by_unit.get(key, ()):
                block.num_missing -= 1
                if not block.num_missing:
                    events += self._announce(block)
        return events

    def added(self, entry: Entry, prefix: HashedPrefix, request: Request) -> list[BlockStored]:
        """The events of complete blocks of an entry that were not known."""
        events: list[BlockStored] = []
        run: list[_Block] = []  # Blocks of one unit, one behind the other.
        end_of_run = 0
        for number, block in self._new_blocks(entry, prefix):
            is_alone = len(block.units) > 1 or block.block_hash in self._announced
            if is_alone or number != end_of_run:
                events += self._announce_run(run, end_of_run, request)
                run = []
            end_of_run = number + 1
            if not is_alone:
                run.append(block)
                continue
            if len(block.units) > 1:
                self._keep_event(block, number, request)
            if not block.num_missing:
                events += self._announce(block)
        return events + self._announce_run(run, end_of_run, request)

    def removed(self, keys: Iterable[bytes]) -> list[BlockRemoved]:
        """The event of the blocks that need some units; none if no such block was announced."""
        gone: list[bytes] = []
        for key in keys:
            for block in list(self._by_unit.get(key, ())):
                if not block.num_missing and self._withdraw(block):
                    gone.append(block.block_hash)
                block.num_missing += 1
                if block.num_missing == len(block.units):
                    self._forget(block)
        if not gone:
            return []
        hashes = [maybe_convert_block_hash(each) for each in gone]
        return [BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU, group_idx=self._index)]

    def _new_blocks(self, entry: Entry, prefix: HashedPrefix) -> Iterator[tuple[int, _Block]]:
        """The numbers and the blocks of an entry that were not known."""
        _, first_tokens, end_tokens = entry.piece
        unit_tokens = (end_tokens - first_tokens) // len(entry.keys)
        block_tokens = self._tokens_per_block
        known_tokens = prefix.num_tokens - prefix.num_tokens % unit_tokens
        first_block = first_tokens // block_tokens
        end_block = min(-(-end_tokens // block_tokens), known_tokens // block_tokens)
        if first_block >= end_block:
            return
        first_unit = first_block * block_tokens // unit_tokens
        end_unit = -(-end_block * block_tokens // unit_tokens)
        keys = prefix.keys_at(
            range((first_unit + 1) * unit_tokens, end_unit * unit_tokens + 1, unit_tokens)
        )
        hashes = self._hashes(prefix)
        parent = hashes[first_block - 1] if first_block else None
        for number, block_hash in enumerate(hashes[first_block:end_block], first_block):
            first = number * block_tokens // unit_tokens - first_unit
            end = -(-(number + 1) * block_tokens // unit_tokens) - first_unit
            units = keys[first:end]
            num_missing = len(units) - sum(map(self._stored.__contains__, units))
            others = self._by_unit.get(units[-1], ())
            is_new = not others or all(other.block_hash != block_hash for other in others)
            if is_new and num_missing < len(units):
                block = _Block(block_hash, parent, units, num_missing)
                for key in units:
                    self._by_unit.setdefault(key, []).append(block)
                yield number, block
            parent = block_hash

    def _hashes(self, prefix: HashedPrefix) -> Any:
        """The hashes that vLLM's own events have for the blocks of a prefix."""
        prefix = prefix.upstream or prefix
        if self._tokens_per_block == prefix.tokens_per_hash:
            return prefix.hashes
        return BlockHashListWithBlockSize(
            prefix.hashes, prefix.tokens_per_hash, self._tokens_per_block
        )

    def _announce_run(
        self, run: list[_Block], end_block: int, request: Request
    ) -> list[BlockStored]:
        """Announce consecutive complete blocks by one event, or let each of them wait."""
        if not run:
            return []
        first_block = end_block - len(run)
        if not self._is_announced(run[0].parent):
            for number, block in enumerate(run, first_block):
                self._keep_event(block, number, request)
                self._announce(block)
            return []
        for block in run:
            self._note_announced(block)
        return [self._event(run, first_block, request), *self._announce_waiting(run)]

    def _announce(self, block: _Block) -> list[BlockStored]:
        """Announce a complete block, and what waits for it; or let the block wait."""
        if block.block_hash in self._announced:
            self._note_announced(block)
            return []
        if self._is_announced(block.parent):
            return self._announce_all([block])
        assert block.parent is not None
        self._waiting.setdefault(block.parent, []).append(block)
        return []

    def _announce_waiting(self, announced: Iterable[_Block]) -> list[BlockStored]:
        """Announce the blocks that wait for announced blocks, and what waits for them in turn."""
        if not self._waiting:
            return []
        return self._announce_all(
            [child for each in announced for child in self._waiting.pop(each.block_hash, ())]
        )

    def _announce_all(self, blocks: list[_Block]) -> list[BlockStored]:
        """Announce complete blocks whose parents are announced, and what waits for them in turn."""
        events = []
        for block in blocks:  # The loop appends to the list.
            if block.block_hash not in self._announced:
                assert block.event is not None and block.token_ids is not None
                token_ids = block.token_ids.tolist()
                events.append(msgspec.structs.replace(block.event, token_ids=token_ids))
                blocks += self._waiting.pop(block.block_hash, ())
            self._note_announced(block)
        return events

    def _note_announced(self, block: _Block) -> None:
        block.is_announced = True
        self._announced[block.block_hash] = self._announced.get(block.block_hash, 0) + 1
        if len(block.units) == 1:
            block.event = None  # The block is forgotten when its unit goes.
            block.token_ids = None

    def _is_announced(self, block_hash: bytes | None) -> bool:
        """Whether a parent was announced. The first block of a prompt has none, and needs none."""
        return block_hash is None or block_hash in self._announced

    def _withdraw(self, block: _Block) -> bool:
        """A block is not complete any more. Returns whether no announced block has its hash now."""
        if not block.is_announced:
            assert block.parent is not None
            siblings = self._waiting[block.parent]
            siblings.remove(block)
            if not siblings:
                del self._waiting[block.parent]
            return False
        block.is_announced = False
        self._announced[block.block_hash] -= 1
        if self._announced[block.block_hash]:
            return False
        del self._announced[block.block_hash]
        return True

    def _forget(self, block: _Block) -> None:
        for key in block.units:
            blocks = self._by_unit[key]
            blocks.remove(block)
            if not blocks:
                del self._by_unit[key]

    def _keep_event(self, block: _Block, number: int, request: Request) -> None:
        """Keep what is needed to announce a block later, when the request may be gone."""
        event = self._event([block], number, request)
        block.token_ids = array("i", event.token_ids)
        event.token_ids = []
        block.event = event

    def _event(self, run: Sequence[_Block], first_block: int, request: Request) -> BlockStored:
        """The event of consecutive blocks."""
        block_tokens = self._tokens_per_block
        first_tokens = first_block * block_tokens
        end_tokens = first_tokens + len(run) * block_tokens
        parent = run[0].parent
        lora = request.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(block.block_hash) for block in run],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=request.all_token_ids[first_tokens:end_tokens],
            block_size=block_tokens,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora else None,
            extra_keys=_extra_keys(request, range(first_tokens, end_tokens, block_tokens)),
            group_idx=self._index,
            kv_cache_spec_kind=self._kind,
        )


def _extra_keys(request: Request, blocks: range) -> list[tuple[Any, ...] | None]:
    """What is hashed besides the tokens of each block (adapter, salt, images, embeddings).

    Args:
        blocks: The first token of each block. The step is the length of a block in tokens.
    """
    sources = (request.lora_request, request.mm_features, request.cache_salt)
    if not any(sources) and request.prompt_embeds is None:
        return [None] * len(blocks)
    found = []
    next_image = 0
    for first_tokens in blocks:
        extra_keys, next_image = generate_block_hash_extra_keys(
            request, first_tokens, first_tokens + blocks.step, next_image
        )
        found.append(extra_keys)
    return found
