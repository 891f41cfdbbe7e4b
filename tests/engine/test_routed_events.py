# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What routers know of host memory, from the events of an engine that loses what it has stored.

vLLM's scheduler and the connector run with real pages, but without a model. Requests come back,
transfers fail, entries and parts of entries are lost, and the connector is reset.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
from support import family
from support.connector.offload_run import check_nothing_is_left, evict_one
from support.connector.offload_workloads import blocks_for_longest, chats, offloading
from support.connector.paged_layouts import (
    DEEPSEEK_V4_LIKE,
    FULL,
    GEMMA,
    GPT_OSS,
    MAMBA,
    MIXED_BLOCKS,
    ROWS,
    TWO_FULL,
    PagedLayout,
    paged,
)
from support.connector.router_index import RouterIndex, last_bytes
from support.connector.scripted_transfers import TransferScript
from support.connector.simulated_engine import SimulatedEngine
from support.sample import IS_LONG
from support.scheduler import layouts
from support.scheduler.layouts import Attention
from support.scheduler.options import EngineOptions
from support.scheduler.transcript import Step
from support.scheduler.workload import RequestPlan
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.request import Request

from vllm_ascend_kvext.segments.scheduler.private_hashes import PrivateHashes
from vllm_ascend_kvext.store import prefix
from vllm_ascend_kvext.store.entries import EntryState, Kind

pytestmark = pytest.mark.usefixtures("offloading_in_effect")

LAYOUTS = (FULL, GEMMA, GPT_OSS, DEEPSEEK_V4_LIKE, MAMBA, TWO_FULL, MIXED_BLOCKS)
if family.IS_ASCEND:
    LAYOUTS = (paged(layouts.COMPRESSED, ROWS),)

MIN_EVENTS = 7_200 if IS_LONG else 500
"""The events of host memory of each layout. Of all layouts, there are 50,000 in a long run."""

LONG_CHUNK_TOKENS = 256
"""More tokens than most prompts have."""

STEADY = TransferScript(seed=1, max_per_step=3)
FAILING = TransferScript(seed=1, failing_stores=0.1, failing_loads=0.1, max_per_step=3)

_CPU = "CPU"
_FULL_ATTENTION = (Attention.FULL, Attention.MLA, Attention.COMPRESSED)
_REQUESTS_PER_ROUND = 50
_STEPS_PER_CHECK = 20


class _Block(NamedTuple):
    """One block of a request.

    Attributes:
        short_hash: The last 8 bytes of its hash.
        parent: The short hash of the block before it; None for the first block.
        unit_keys: The keys of the units that it overlaps. Prompts that part in its last unit have
            other keys.
        contents: Its tokens, its adapter, and its extra keys.
    """

    short_hash: int
    parent: int | None
    unit_keys: tuple[bytes, ...]
    contents: tuple[Any, ...]


class _ReadEngine(SimulatedEngine):
    """An engine whose events are read after each step, also after the steps of a reset."""

    read: Callable[[list[Any]], None]

    def step(self) -> Step:
        step = super().step()
        self.read(self.last_events)
        return step


class RoutedEngine:
    """An engine, a router that reads its events, and all blocks that any request has had.

    Args:
        choices: Options of the connector.
    """

    def __init__(self, layout: PagedLayout, script: TransferScript, **choices: Any) -> None:
        self.rng = random.Random(layout.name)
        self.layout = layout
        self.requests = tuple(chats(self.rng, layout, _REQUESTS_PER_ROUND))
        memory_gib = layout.host_bytes[1] / (1 << 30)
        options = EngineOptions(
            num_blocks=3 * blocks_for_longest(layout, self.requests, 128),
            max_num_batched_tokens=128,
            offloading=offloading(layout, host_memory_gib=memory_gib, **choices),
        )
        # Prompts are short, so cuts are, too.
        with mock.patch.object(prefix, "MIN_CUT_TOKENS", 1):
            self.engine = _ReadEngine(layout, options, script)
        self.engine.read = self._read
        self.router = RouterIndex()
        self.counts: Counter[str] = Counter()
        self.block_tokens = {
            index: group.block_tokens
            for index, group in enumerate(layout.groups)
            if group.attention in _FULL_ATTENTION
        }
        self._blocks: dict[int, dict[int, dict[tuple[bytes, ...], _Block]]] = {
            group: {} for group in self.block_tokens
        }
        self._told: dict[tuple[int, Any], dict[str, tuple[Any, ...]]] = {}

    @property
    def num_events(self) -> int:
        counts = self.router.counts
        return counts[f"{_CPU}: BlockStored"] + counts[f"{_CPU}: BlockRemoved"]

    def serve_round(self, number: int, eviction_share: float = 0, reset_share: float = 0) -> None:
        """Serve some requests, whose ids have the number of the round."""
        plans = chats(self.rng, self.layout, _REQUESTS_PER_ROUND)
        waiting = [replace(plan, request_id=f"{plan.request_id}-{number}") for plan in plans][::-1]
        added: list[Request] = []
        step = 0
        while waiting or self.engine.has_work():
            while waiting and waiting[-1].arrival_step <= step:
                added.append(self.engine.add_request(waiting.pop()))
            if self.rng.random() < eviction_share:
                evict_one(self.engine, self.rng)
            if self.rng.random() < reset_share:
                self.counts["resets"] += self.engine.reset(reset_connector=True)
            if self.engine.has_work():
                self.engine.step()
            if step % _STEPS_PER_CHECK == 0:
                self.check(added)
            step += 1
        self.counts["blocks that wait at last"] += self.check(added)
        self.check_lookups(added)
        check_nothing_is_left(self.engine)

    def _read(self, events: list[Any]) -> None:
        self.router.read(events)
        for event in events:
            if isinstance(event, BlockStored) and event.group_idx in self.block_tokens:
                self._compare_media(event)

    def _compare_media(self, event: BlockStored) -> None:
        """Check that a block is the same in all media. Blocks without a hash are passed over."""
        parent = event.parent_block_hash
        size = event.block_size
        if len(event.token_ids) != size * len(event.block_hashes):
            return  # The device has left some blocks out.
        about_all = (event.kv_cache_spec_kind, size, event.lora_id, event.lora_name)
        for number, block_hash in enumerate(event.block_hashes):
            tokens = event.token_ids[number * size : (number + 1) * size]
            told = (parent, list(tokens), event.extra_keys[number], *about_all)
            media = self._told.setdefault((event.group_idx, block_hash), {})
            media[event.medium] = told
            assert len(set(map(repr, media.values()))) == 1, media
            self.counts["blocks in both media"] += len(media) > 1
            parent = block_hash

    def check(self, requests: list[Request]) -> int:
        """Compare what the router knows with what is in host memory.

        Args:
            requests: Requests that may have new blocks.

        Returns:
            The number of blocks in host memory that wait for their parents.
        """
        num_waiting = 0
        # What was lost since the last step is published with the next one.
        self._read(self.engine.scheduler.connector.take_events())
        stored = {
            key
            for entry in self.engine.entries
            if entry.state is EntryState.STORED and entry.piece.kind is Kind.ROWS
            for key in entry.keys
        }
        for group, blocks in self._blocks.items():
            for request in requests:
                for block in self.blocks(request, group):
                    blocks.setdefault(block.short_hash, {})[block.unit_keys] = block
            present = {
                short_hash
                for short_hash, ends in blocks.items()
                if any(map(stored.issuperset, ends))
            }
            known = self.router.hashes(_CPU, group)
            assert known <= present
            withheld = present - known
            num_waiting += len(withheld)
            for each in withheld:
                parent = next(iter(blocks[each].values())).parent
                assert parent is not None and parent not in known, "a block was not told"
        return num_waiting

    def blocks(self, request: Request, group: int) -> list[_Block]:
        """The blocks of a request in one group."""
        hash_tokens = self.engine.hash_block_size
        unit_tokens = self.engine.tier.geometry.unit_tokens
        block_tokens = self.block_tokens[group]
        hashes = request.block_hashes
        prefix = self.engine.side._view.prefix(request)
        adapter = request.lora_request.name if request.lora_request else None
        found: list[_Block] = []
        for first in range(0, len(hashes) * hash_tokens - block_tokens + 1, block_tokens):
            end = first + block_tokens
            ends_of_units = range(
                first // unit_tokens * unit_tokens + unit_tokens,
                -(-end // unit_tokens) * unit_tokens + 1,
                unit_tokens,
            )
            if ends_of_units[-1] > len(hashes) * hash_tokens:
                break
            extra_keys, _ = generate_block_hash_extra_keys(request, first, end, 0)
            found.append(
                _Block(
                    int.from_bytes(hashes[end // hash_tokens - 1][-8:], "big"),
                    found[-1].short_hash if found else None,
                    tuple(prefix.keys_at(ends_of_units)),
                    (request.all_token_ids[first:end], adapter, extra_keys),
                )
            )
        return found

    def check_lookups(self, requests: list[Request]) -> None:
        """Check that a router finds what of a prompt is in host memory."""
        for request in requests:
            for group in self.block_tokens:
                blocks = self.blocks(request, group)
                known = self.router.hashes(_CPU, group)
                hashes = [block.short_hash for block in blocks]
                num_known = next(
                    (n for n, each in enumerate(hashes) if each not in known), len(hashes)
                )
                contents = [block.contents for block in blocks]
                assert self.router.num_blocks(_CPU, group, contents) == num_known
                self.counts["prompts found"] += bool(num_known)


@pytest.mark.parametrize("has_faults", [False, True], ids=["steady", "faults"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_routers_know_what_is_in_host_memory(layout: PagedLayout, has_faults: bool) -> None:
    # Without holes, prompts lose their ends first. Their pieces are long, so they lose parts.
    choices = {} if has_faults else {"hole_reuse": False, "chunk_tokens": LONG_CHUNK_TOKENS}
    routed = RoutedEngine(layout, FAILING if has_faults else STEADY, **choices)
    shares = {"eviction_share": 0.3, "reset_share": 0.01} if has_faults else {}
    try:
        number = 0
        while routed.num_events < MIN_EVENTS // 2:
            routed.serve_round(number, **shares)
            number += 1
        assert not routed.router.refusals(_CPU)
        sizes = {scope: size for scope, size in routed.router.sizes.items() if scope[0] == _CPU}
        assert {(group, *found) for (_, group, _), found in sizes.items()} == set(
            routed.block_tokens.items()
        )
        assert len(sizes) == len(routed.block_tokens)  # Each group has one kind.
        counts = routed.counts
        assert counts["prompts found"] and counts["blocks in both media"]
        assert has_faults or not counts["blocks that wait at last"]
    finally:
        routed.engine.shutdown()


def test_an_entry_is_told_although_its_request_has_other_hashes_by_now() -> None:
    routed = RoutedEngine(FULL, TransferScript(max_per_step=0), store_policy="all")
    engine = routed.engine
    prompt = tuple(range(100, 150))
    request = engine.add_request(
        RequestPlan(request_id="request-0", arrival_step=0, prompt=prompt, max_tokens=8)
    )
    while not engine.held.num_stores:
        engine.step()
    hashes = list(request.block_hashes)
    PrivateHashes(request, 0, engine.hash_block_size)
    for worker in engine.workers:
        worker.transfers.open()
    while engine.has_work():
        engine.step()
    stored = {
        key
        for entry in engine.entries
        if entry.piece.kind is Kind.ROWS
        for key in entry.keys
        if key in hashes
    }
    assert stored
    assert {last_bytes(key) for key in stored} <= routed.router.hashes(_CPU, 0)
