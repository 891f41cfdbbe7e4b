# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""An index of blocks as routers keep it, from the bytes of KV events.

It has the rules of two routers, and refuses what either of them drops or takes amiss. The rules are
those of llm-d-router (``pkg/kvevents``, ``pkg/kvcache``) and of Dynamo (``lib/kv-router``,
``zmq_wire`` and the index of lower tiers) in August 2026:

- They count groups of full attention only. The kind of a group is learned from events that store.
- The tokens of an event are as many as those of its blocks, and all blocks of a group are equally
  long (llm-d drops an event otherwise, Dynamo the block).
- The parent is known (llm-d drops the event otherwise).
- No event has a hash twice (Dynamo drops it). A block that is known is not stored again, and an
  unknown block is not removed (Dynamo drops what follows in the event).
- A block is found by its tokens and those of all blocks before it, with the adapter and the other
  extra keys. A lookup ends at the first block that is missing.
- A hash of many bytes is known by its last 8 bytes.

Here a parent must be known in the medium of its event. That is more than llm-d asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from vllm.distributed.kv_events import BlockStored

FULL_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})

_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
_REMOVED = ("block_hashes", "medium", "group_idx")
_FIELDS = {"BlockStored": _STORED, "BlockRemoved": _REMOVED, "AllBlocksCleared": ()}
"""The fields of an event by its tag, in the order in which vLLM 0.23 encodes them."""

_Scope = tuple[str, int]
"""A medium and a group."""


class RouterIndex:
    """What a router knows of one engine.

    Attributes:
        counts: Events, and what was refused, by reason.
        sizes: The block sizes of each medium, group and kind, in tokens.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.sizes: dict[tuple[str, int, str], set[int]] = {}
        self._kinds: dict[int, str] = {}
        self._found_by: dict[_Scope, dict[int, int]] = {}

    def read(self, events: Iterable[Any]) -> None:
        """Take note of the events of one batch."""
        for raw in msgspec.msgpack.decode(msgspec.msgpack.encode(list(events))):
            tag, fields = _decode(raw)
            if tag == "AllBlocksCleared":
                # Dynamo takes it for the device's blocks, and llm-d for all blocks.
                self._found_by = {
                    scope: found for scope, found in self._found_by.items() if scope[0] == "CPU"
                }
                continue
            medium = fields["medium"]
            self.counts[f"{medium}: {tag}"] += 1
            refusal = self._store(fields) if tag == "BlockStored" else self._remove(fields)
            if refusal:
                self.counts[f"{medium}: {refusal}"] += 1

    def hashes(self, medium: str, group: int) -> set[int]:
        """The blocks of a group that are known, by the last 8 bytes of their hashes."""
        return set(self._found_by.get((medium, group), {}))

    def num_blocks(self, medium: str, group: int, blocks: Iterable[tuple[Any, ...]]) -> int:
        """How many of the first blocks of a prompt are known.

        Args:
            blocks: For each block: its tokens, the name of the adapter, and its extra keys.
        """
        known = set(self._found_by.get((medium, group), {}).values())
        chain = 0
        num_known = 0
        for block in msgspec.msgpack.decode(msgspec.msgpack.encode(list(blocks))):
            chain = _chained(chain, *block)
            if chain not in known:
                break
            num_known += 1
        return num_known

    def refusals(self, medium: str) -> dict[str, int]:
        """What was refused, by reason."""
        prefix = f"{medium}: "
        return {
            name.removeprefix(prefix): count
            for name, count in self.counts.items()
            if name.startswith(prefix) and not name.removeprefix(prefix).startswith("Block")
        }

    def _store(self, fields: dict[str, Any]) -> str:
        group = fields["group_idx"]
        kind = fields["kv_cache_spec_kind"]
        size = fields["block_size"]
        if group is None or kind is None:
            return "no group or no kind"
        self._kinds[group] = kind
        self.sizes.setdefault((fields["medium"], group, kind), set()).add(size)
        if kind not in FULL_KINDS:
            return "not full attention"
        hashes = [last_bytes(each) for each in fields["block_hashes"]]
        tokens = fields["token_ids"]
        if size <= 0 or len(tokens) != size * len(hashes):
            return "tokens that are not those of its blocks"
        parents = [] if (parent := fields["parent_block_hash"]) is None else [last_bytes(parent)]
        found_by = self._found_by.setdefault((fields["medium"], group), {})
        if not found_by.keys() >= set(parents):
            return "unknown parent"
        if len({*hashes, *parents}) < len(hashes) + len(parents):
            return "a hash twice"
        if not found_by.keys().isdisjoint(hashes):
            return "stored again"
        extra_keys = fields["extra_keys"] or [None] * len(hashes)
        if len(extra_keys) != len(hashes):
            return "extra keys that are not those of its blocks"
        chain = found_by[parents[0]] if parents else 0
        for number, (block_hash, extra) in enumerate(zip(hashes, extra_keys, strict=True)):
            block = tokens[number * size : (number + 1) * size]
            chain = _chained(chain, block, fields["lora_name"], extra)
            found_by[block_hash] = chain
        return ""

    def _remove(self, fields: dict[str, Any]) -> str:
        group = fields["group_idx"]
        if self._kinds.get(group) not in FULL_KINDS:
            return "removed from a group that is not full attention"
        found_by = self._found_by.setdefault((fields["medium"], group), {})
        for block_hash in map(last_bytes, fields["block_hashes"]):
            if found_by.pop(block_hash, None) is None:
                return "unknown block removed"
        return ""


def each_block(events: Iterable[Any]) -> list[tuple[Any, ...]]:
    """What events say of each block that was stored."""
    found = []
    for event in events:
        if not isinstance(event, BlockStored):
            continue
        parent = event.parent_block_hash
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        about_all = (event.group_idx, size, event.lora_id, event.lora_name)
        for number, block_hash in enumerate(event.block_hashes):
            tokens = event.token_ids[number * size : (number + 1) * size]
            extra_keys = (event.extra_keys or [])[number]
            found.append((block_hash, parent, list(tokens), extra_keys, *about_all))
            parent = block_hash
    return found


def _decode(raw: Any) -> tuple[str, dict[str, Any]]:
    """The tag and the fields of an event. vLLM 0.23 encodes an array, and 0.30 a map."""
    if isinstance(raw, dict):
        tag = raw["type"]
        return tag, {name: raw.get(name) for name in _FIELDS[tag]}
    tag, *values = raw
    names = _FIELDS[tag]
    values += [None] * (len(names) - len(values))
    return tag, dict(zip(names, values, strict=False))


def last_bytes(block_hash: int | bytes) -> int:
    """The last 8 bytes of a hash, as vLLM publishes it by default."""
    if isinstance(block_hash, int):
        return block_hash
    return int.from_bytes(block_hash[-8:], "big")


def _chained(chain: int, tokens: Sequence[int], adapter: str | None, extra: Any) -> int:
    return hash((chain, tuple(tokens), adapter, repr(extra)))
