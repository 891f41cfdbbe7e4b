# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Checks that what an engine keeps under a hash of tokens is the exact KV of these tokens.

Hashes and digests come from *shadows*: requests with the same tokens that no engine has seen. The
checks cover the hashes of the engine's requests, every block of the local prefix cache, every
event, and every entry of the host tier, including entries of segments.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash
from vllm.v1.request import Request

from support.connector.blending_engine import BlendingEngine
from support.connector.page_contents import PageContents
from support.connector.simulated_engine import SimulatedWorker
from support.scheduler.token_stream import TokenStream
from support.scheduler.workload import RequestPlan
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.planner import TransferPlanner
from vllm_ascend_kvext.layout.row_map import StoredChunk
from vllm_ascend_kvext.layout.transfer_plan import TablePart
from vllm_ascend_kvext.layout.views import storage_tensors
from vllm_ascend_kvext.segments.scheduler.segment_store import StoredTokens
from vllm_ascend_kvext.segments.scheduler.segments_side import segments_of
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind
from vllm_ascend_kvext.token_range import TokenRange
from vllm_ascend_kvext.transfer.page_transfer import page_transfer
from vllm_ascend_kvext.transfer.pools import Pools
from vllm_ascend_kvext.transfer.schema import Direction


class _Known(NamedTuple):
    """Tokens that have a hash: those of a stream, up to an end."""

    stream: TokenStream
    end_tokens: int

    def digests(self, first_tokens: int = 0) -> Any:
        return np.array(self.stream.digests[first_tokens : self.end_tokens], np.uint64)


class _Segment(NamedTuple):
    """A segment that has a key. Its digests are those of the segment behind its sink."""

    token_ids: tuple[int, ...]
    digests: list[int]
    sink_tokens: int


class ExactContents:
    """Checks one engine. In the engine, the blocks of all groups are as long as hashed blocks."""

    def __init__(self, engine: BlendingEngine, max_tokens: int) -> None:
        sizes = {group.block_tokens for group in engine.layout.groups}
        assert sizes == {engine.hash_block_size}
        self._engine = engine
        self._hash_block_size = engine.hash_block_size
        self._shadows: dict[str, Request] = {}
        self._streams: dict[str, TokenStream] = {}
        self._known: dict[bytes, _Known] = {}
        self._known_in_events: dict[Any, _Known] = {}
        self._segments: dict[bytes, _Segment] = {}
        self._checked_entries: set[int] = set()
        self._scratch = [_Scratch(engine, worker, max_tokens) for worker in engine.workers]
        self.counts: Counter[str] = Counter()

    def expect(self, plan: RequestPlan) -> None:
        """Note a request that was added to the engine."""
        prompt = tuple(self._engine.requests[plan.request_id].prompt_token_ids)
        self._shadows[plan.request_id] = self._engine.make_request(replace(plan, prompt=prompt))
        self._streams[plan.request_id] = TokenStream((), plan.seed)

    def expect_segment(self, token_ids: tuple[int, ...], plan: RequestPlan) -> None:
        """Note a segment that may be stored, with or without the contexts of its salt."""
        unit_tokens = self._engine.tier.geometry.unit_tokens
        segments = segments_of(self._engine.side)
        assert segments is not None
        for prefix in segments.store.prefixes(token_ids, plan.cache_salt):
            sink_ids = prefix.sink.token_ids
            digests = TokenStream([*sink_ids, *token_ids], plan.seed).digests[len(sink_ids) :]
            for boundary in range(unit_tokens, prefix.num_tokens + 1, unit_tokens):
                key = prefix.key_at(boundary)
                self._segments[key] = _Segment(token_ids, digests, len(sink_ids))

    def check(self, *, is_end: bool = False) -> None:
        """Check everything.

        Args:
            is_end: Whether to check everything again that was checked before.
        """
        self._learn()
        self._check_hashes()
        self._check_cached_blocks()
        for event in self._engine.last_events:
            if isinstance(event, BlockStored):
                self._check_event(event)
        if is_end:
            self._checked_entries.clear()
        for entry in self._engine.entries:
            if entry.state is EntryState.STORED and entry.number not in self._checked_entries:
                self._checked_entries.add(entry.number)
                if isinstance(entry.row_map, StoredTokens):
                    self._check_segment(entry)
                else:
                    self._check_entry(entry)

    def _learn(self) -> None:
        """Note the tokens that requests have got since the last check."""
        for request_id, shadow in self._shadows.items():
            tokens = self._engine.requests[request_id].output_token_ids[
                len(shadow.output_token_ids) :
            ]
            if tokens:
                shadow.append_output_token_ids(list(tokens))
            stream = self._streams[request_id]
            first = len(stream) // self._hash_block_size
            stream.extend(shadow.all_token_ids[len(stream) :])
            for index in range(first, len(shadow.block_hashes)):
                known = _Known(stream, (index + 1) * self._hash_block_size)
                block_hash = shadow.block_hashes[index]
                self._known[block_hash] = known
                self._known_in_events[maybe_convert_block_hash(block_hash)] = known

    def _check_hashes(self) -> None:
        """Check that requests have hashes of their exact tokens, and private hashes behind them."""
        segments = segments_of(self._engine.side)
        for request_id, request in self._engine.scheduler.requests.items():
            if request.is_finished():
                continue  # The request has ended, but its load has not.
            hashes = self._shadows[request_id].block_hashes
            found = request.block_hashes
            assert len(found) == len(hashes), request_id
            exact_tokens = None if segments is None else segments.visible_tokens(request_id)
            num_exact = len(hashes)
            if exact_tokens is not None:
                num_exact = exact_tokens // self._hash_block_size
            assert found[:num_exact] == hashes[:num_exact], (
                f"{request_id}, {request.status.name}, exact up to token {exact_tokens}: of its "
                f"{len(found)} hashes, expected {num_exact} to be those of its tokens, found "
                f"{[own == of_tokens for own, of_tokens in zip(found, hashes, strict=True)]}"
            )
            is_known = [block_hash in self._known for block_hash in found[num_exact:]]
            assert not any(is_known), f"{request_id}: approximate KV has a hash of tokens"

    def _check_cached_blocks(self) -> None:
        pool = self._engine.block_pool
        tables: dict[int, list[int]] = {}
        digests: dict[int, list[Any]] = {}
        for block in pool.blocks:
            if block.block_hash is None:
                continue
            assert not block.is_null
            found = pool.cached_block_hash_to_block._cache.get(block.block_hash)
            is_found = found is block or (isinstance(found, dict) and block.block_id in found)
            assert is_found, f"{block} has a hash, but the cache does not find it"
            known = self._known.get(get_block_hash(block.block_hash))
            assert known is not None, f"{block} is cached with a hash that no tokens have"
            group = get_group_id(block.block_hash)
            tables.setdefault(group, []).append(block.block_id)
            digests.setdefault(group, []).append(
                known.digests(known.end_tokens - self._hash_block_size)
            )
        # The blocks are checked as if one request had all of them, one after the other.
        for group, table in tables.items():
            of_group = np.concatenate(digests[group])
            for worker in self._engine.workers:
                worker.contents.check_group(group, table, of_group, 0, len(of_group))
            self.counts["cached blocks"] += len(table)

    def _check_event(self, event: BlockStored) -> None:
        for block_hash in event.block_hashes:
            assert block_hash in self._known_in_events, f"a hash that no tokens have: {event}"
        known = self._known_in_events[event.block_hashes[-1]]
        tokens = known.stream.tokens[: known.end_tokens]
        assert tokens[-len(event.token_ids) :] == list(event.token_ids), event
        self.counts["events"] += 1

    def _check_entry(self, entry: Entry) -> None:
        """Check that an entry with hashes of prompts holds their exact KV."""
        end_tokens = entry.piece.end_tokens
        known = self._known.get(entry.keys[-1])
        assert known is not None and known.end_tokens == end_tokens, (
            f"{entry}: its hash belongs to no tokens"
        )
        for scratch in self._scratch:
            scratch.check(entry, known.digests())
        self.counts[entry.piece.kind.name.lower()] += 1

    def _check_segment(self, entry: Entry) -> None:
        """Check that an entry of a segment holds the KV of the segment alone."""
        stored = entry.row_map
        segment = self._segments.get(entry.keys[-1])
        assert segment is not None, f"{entry}: its key belongs to no segment"
        first = entry.piece.first_tokens
        end = first + stored.num_rows
        assert stored.packed_ids == array("q", segment.token_ids[first:end]).tobytes()
        assert stored.first_position == segment.sink_tokens + first
        digests = np.array(segment.digests[first:end], np.uint64)
        assert len(digests) == stored.num_rows
        for worker in self._engine.workers:
            host = worker.side._host.tensor.numpy()
            layout = worker.side._runner.mover.layout
            offsets = layout.plane_offsets_bytes(stored.num_rows)
            for offset, expected in zip(offsets, worker.contents.row_bytes(digests), strict=False):
                place = entry.offset_bytes + layout.section * offsets[-1] + offset
                found = host[place : place + expected.size].reshape(expected.shape)
                assert np.array_equal(found, expected), (
                    f"{entry}: its rows are not those of its segment"
                )
        self.counts["segments"] += 1
        has_context = segment.sink_tokens > len(self._engine.sink_ids)
        self.counts["segments behind a context"] += has_context


class _Scratch:
    """Separate pages. Entries of a worker's host memory are loaded into them."""

    def __init__(self, engine: BlendingEngine, worker: SimulatedWorker, max_tokens: int) -> None:
        groups = engine.layout.groups
        sizes = [-(-max_tokens // group.block_tokens) for group in groups]
        pages = engine.layout.make(1 + sum(sizes))
        layout = pages.layout()
        self._parts: list[TablePart] = []
        first = 1
        for size in sizes:
            self._parts.append(TablePart(0, tuple(range(first, first + size))))
            first += size
        self._groups = groups
        self._layout = layout
        self._host = worker.side._host.tensor
        self._side = worker.side
        self._pools = Pools(storage_tensors(layout, pages.kv_caches))
        self._contents = PageContents(pages, worker.writers)

    def check(self, entry: Entry, digests: Any) -> None:
        """Check that an entry holds the digests' rows, or the tails behind the last digest."""
        piece = entry.piece
        is_rows = piece.kind is Kind.ROWS
        groups = tuple(
            index
            for index, group in enumerate(self._layout.groups)
            if (group.kind is GroupKind.FULL) is is_rows
        )
        tokens = TokenRange(piece.first_tokens if is_rows else 0, piece.end_tokens)
        # Tails are read together with those that they continue.
        chunks = [StoredChunk(each.row_map, each.offset_bytes) for each in entry.chain]
        sharing = self._side._sharing
        if sharing is not None and self._side._is_apart:
            sharing = sharing.apart()
        planner = TransferPlanner(self._layout, sharing=sharing)
        plan = planner.plan_load(chunks, tokens, self._parts, groups)
        assert not plan.missing, f"{entry}: rows are missing: {plan.missing}"
        page_transfer(self._pools, self._host, plan.planes, plan.runs, Direction.HOST_TO_PAGES)
        for index in groups:
            group = self._layout.groups[index].kv_cache_group_id
            first = tokens.first_tokens
            if not is_rows:
                first = self._groups[group].first_read_position(tokens.end_tokens)
            self._contents.check_group(
                group, self._parts[group].ids, digests, first, tokens.end_tokens
            )
