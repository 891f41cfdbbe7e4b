# SPDX-License-Identifier: Apache-2.0
"""Both sides of KvextConnector on one worker's pages: store, corrupt every page, load, compare.

Block tables are made by hand: a page is there if the definition of its group's attention reads it.
What has to come back is copied by the same definition, tensor by tensor; then every byte of every
storage is compared. So pages of others, padding and rows that no resume reads are canaries.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from support.connector.small_engine import Block, Events, Manager, Pool, Status
from support.connector.worker_configs import (
    AttentionLayer,
    CompilationConfig,
    Options,
    VllmConfig,
)
from support.layout.reach import Reach
from support.layout.truth import LayoutFixture, PagedTensor
from vllm_ascend_kvext.connector import worker_side
from vllm_ascend_kvext.connector.engine import Engine
from vllm_ascend_kvext.connector.host_layout import HostLayout
from vllm_ascend_kvext.connector.messages import StepJobs
from vllm_ascend_kvext.connector.options import ConnectorOptions
from vllm_ascend_kvext.connector.scheduler_side import SchedulerSide
from vllm_ascend_kvext.connector.worker_side import WorkerSide
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.build import build_layout
from vllm_ascend_kvext.layout.model import KVLayout, StatePolicy
from vllm_ascend_kvext.layout.rows import TokenRange
from vllm_ascend_kvext.store.entries import Piece

CHUNK_TOKENS = 1024
HOST_BYTES = 512 << 20
MANY_BLOCKS = 1 << 20
"""Stores may hold a share of the pool only. That is not what is tested."""

SECTION_BYTES = 64
"""Sections of a piece begin at multiples of it."""

_UNALIGNED_TOKENS = 4
"""Per hash, where only sizes count."""

_NULL_ID = 0
_DEADLINE_S = 20.0
_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

BlockIds = list[list[int]]
_Places = tuple[Sequence[PagedTensor], BlockIds]
"""Tensors, and the blocks of a request in them."""


@dataclass(eq=False)
class PagedRequest:
    """A request that is known by its number of tokens: all requests begin with the same ones."""

    request_id: str
    num_tokens: int
    hash_tokens: int
    num_computed_tokens: int = 0
    lora_request: Any = None
    sampling_params: Any = None
    skip_reading_prefix_cache: bool = False
    status: Status = Status.RUNNING

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_tokens

    @property
    def all_token_ids(self) -> range:
        return range(self.num_tokens)

    @functools.cached_property
    def block_hashes(self) -> list[bytes]:
        return [number.to_bytes(8, "big") for number in range(self.num_tokens // self.hash_tokens)]

    def is_finished(self) -> bool:
        return self.status is not Status.RUNNING


class _Contents:
    """A copy of a worker's storages, and its tensors in it."""

    def __init__(self, pages: LayoutFixture) -> None:
        found = pages.storages()
        self.storages = [storage.clone() for storage in found]
        copies = {
            storage.data_ptr(): copy.untyped_storage()
            for storage, copy in zip(found, self.storages, strict=True)
        }
        self.tensors = tuple(
            replace(paged, tensor=_in_storage(paged.tensor, copies)) for paged in pages.tensors
        )


class PageRoundTrip:
    """One worker, whose pages and host memory serve many round trips.

    Args:
        pages: Of the worker.
        seed: Of all bytes, and of the order of the blocks.
    """

    def __init__(self, pages: LayoutFixture, seed: int) -> None:
        self._pages, self._storages = pages, pages.storages()
        self._random = random.Random(seed)
        pages.fill(seed)
        self._original = _Contents(pages)
        """What requests have computed."""
        pages.fill(seed + 1)
        self._expected = _Contents(pages)
        """What ought to be in the pages after a load."""
        self._garbage = pages.copy_of_storages()
        layers = {name: AttentionLayer() for name in pages.kv_caches}
        self._worker = WorkerSide(
            VllmConfig(compilation_config=CompilationConfig(layers)),
            pages.config,
            Options(host_memory_bytes_per_worker=HOST_BYTES),
        )
        build = partial(build_layout, addressing=pages.addressing)
        with mock.patch.object(worker_side, "build_layout", build):
            self._worker.register(pages.kv_caches)
        self.layout: KVLayout = self._worker.describe().layout
        self.hash_tokens = math.gcd(*(group.tokens_per_page for group in self.layout.groups))
        self.unit_tokens = host_layout(self.layout, self.hash_tokens).unit_tokens

    def shutdown(self) -> None:
        self._worker.shutdown()

    def run(self, turns: Sequence[int], local_tokens: int = 0) -> int:
        """Store some turns of a conversation, load what the last of them has left, and compare.

        Args:
            turns: Tokens of each, the longest last.
            local_tokens: Of the request that loads: on the device already.

        Returns:
            How many tokens were loaded.
        """
        boundaries = [tokens - tokens % self.unit_tokens for tokens in turns]
        source_ids = self._block_ids(turns[-1], boundaries)
        _copy(self._original.storages, self._storages)
        sides = _Sides(self._worker, self.layout, self.hash_tokens)
        for number, num_tokens in enumerate(turns):
            sides.store(PagedRequest(f"turn {number}", num_tokens, self.hash_tokens), source_ids)
        _copy(self._garbage, self._storages)
        _copy(self._garbage, self._expected.storages)
        target_ids = self._block_ids(turns[-1] + 1, boundaries[-1:])
        request = PagedRequest("next turn", turns[-1] + 1, self.hash_tokens)
        num_tokens = sides.load(request, local_tokens, target_ids)
        if num_tokens:
            tokens = TokenRange(local_tokens, local_tokens + num_tokens)
            _copy_needed(
                (self._original.tensors, source_ids), (self._expected.tensors, target_ids), tokens
            )
        self._compare()
        sides.assert_idle()
        return num_tokens

    def _block_ids(self, num_tokens: int, boundaries: Sequence[int]) -> BlockIds:
        """Distinct blocks, in random order, for pages that are read at any of the boundaries."""
        fresh = list(range(1, self.layout.num_pages))
        self._random.shuffle(fresh)
        ids: BlockIds = []
        for group in range(self._pages.num_groups):
            (tokens_per_page,) = {r.tokens_per_page for r in self._pages.reaches(group)}
            ids.append([_NULL_ID] * -(-num_tokens // tokens_per_page))
            read: set[int] = set()
            for reach in self._pages.reaches(group):
                for boundary in boundaries:
                    read |= pages_read(reach, boundary)
            for page in read:
                ids[group][page] = fresh.pop()
        return ids

    def _compare(self) -> None:
        """Every byte of every storage.

        Raises:
            AssertionError: If one differs; with the groups in whose tensors.
        """
        pairs = zip(self._storages, self._expected.storages, strict=True)
        if all(torch.equal(found, expected) for found, expected in pairs):
            return
        wrong: dict[int, list[int]] = {}
        for found, expected in zip(self._pages.tensors, self._expected.tensors, strict=True):
            one, other = _by_row(found), _by_row(expected)
            differs = (one != other).reshape(*one.shape[:2], -1).any(dim=2)
            if differs.any():
                wrong.setdefault(found.group, differs.nonzero()[0].tolist())
        raise AssertionError(f"by group, first wrong page and row: {wrong or 'between tensors'}")


class _Sides:
    """A new scheduler side for a worker, and the steps of an engine that computes nothing."""

    def __init__(self, worker: WorkerSide, layout: KVLayout, hash_tokens: int) -> None:
        self._worker = worker
        self._requests: dict[str, PagedRequest] = {}
        self._managers = [Manager() for _ in range(layout.num_scheduler_groups)]
        self._pool = Pool(layout.num_pages)
        options = ConnectorOptions(chunk_tokens=CHUNK_TOKENS, load_if_slower=True)
        self._side = SchedulerSide(options, False, Events())
        self._side.bind(
            Engine(
                self._requests,
                self._managers,
                self._pool,
                MANY_BLOCKS,
                hash_tokens,
                caches_prefixes=False,
            )
        )
        self._side.set_workers([worker.describe()])

    def store(self, request: PagedRequest, block_ids: BlockIds) -> None:
        """A request computes all of its tokens, and ends."""
        self._requests[request.request_id] = request
        for manager, ids in zip(self._managers, block_ids, strict=True):
            manager.req_to_blocks[request.request_id] = [self._block(number) for number in ids]
        assert self._side.match(request, request.num_tokens - 1) == 0
        self._side.allocated(request, tuple(block_ids), 0)
        self._step({request.request_id: request.num_tokens})
        request.num_computed_tokens = request.num_tokens
        request.status = Status.FINISHED_STOPPED
        self._side.finish(request, is_end_of_turn=True)
        self._free(request)
        self._step({})

    def load(self, request: PagedRequest, local_tokens: int, block_ids: BlockIds) -> int:
        """A request is matched, loads, and ends; returns how many tokens it loads."""
        self._requests[request.request_id] = request
        num_tokens = self._side.match(request, local_tokens)
        assert num_tokens is not None
        self._side.allocated(request, tuple(block_ids), num_tokens)
        jobs = self._step({})
        assert len(jobs.loads) == bool(num_tokens)
        self._side.finish(request, is_end_of_turn=False)
        self._free(request)
        return num_tokens

    def assert_idle(self) -> None:
        assert not self._side.has_transfers
        assert not self._side.num_references
        assert not self._side.num_pinned
        assert not any(block.ref_cnt for block in self._pool.blocks)

    def _block(self, number: int) -> Block:
        block = self._pool.blocks[number]
        if not block.is_null:
            self._pool.touch([block])
        return block

    def _free(self, request: PagedRequest) -> None:
        for manager in self._managers:
            self._pool.free_blocks(manager.req_to_blocks.pop(request.request_id, ()))
        del self._requests[request.request_id]

    def _step(self, num_scheduled_tokens: dict[str, int]) -> StepJobs:
        jobs = self._side.plan_step(num_scheduled_tokens, ())
        self._worker.run_before_step(jobs)
        self._worker.begin_step(jobs)
        self._worker.end_of_forward()
        left = len(jobs.stores) + len(jobs.loads)
        while left:
            self._worker.wait_for_end(_DEADLINE_S)
            ended = self._worker.end_step()
            results = ended.results
            assert ended.loads or results.stores_ended, "a transfer does not end"
            assert not results.failed_stores and not results.failed_loads
            left -= len(results.stores_ended) + len(ended.loads)
            self._side.note_output(results, ended.loads)
        return jobs


def host_layout(layout: KVLayout, hash_tokens: int) -> HostLayout:
    """With the default chunk, as the scheduler side makes it."""
    return HostLayout(
        layout,
        hash_tokens,
        lambda unit_tokens: -(-CHUNK_TOKENS // unit_tokens) * unit_tokens,
        StatePolicy.EXACT,
    )


def check_host_bytes(pages: LayoutFixture) -> str:
    """Compare what is stored with what a resume reads; says what it takes.

    Raises:
        AssertionError: If more is stored, but for the alignment of the groups' sections.
    """
    host = host_layout(pages.layout(), _UNALIGNED_TOKENS)
    boundary = 2 * CHUNK_TOKENS
    found = {
        "rows of 1,024 tokens": host.num_bytes(Piece.rows(CHUNK_TOKENS, boundary)),
        "tails of one boundary": host.num_bytes(Piece.tails(boundary)),
    }
    needed = dict.fromkeys(found, 0)
    for paged in pages.tensors:
        is_full = paged.reach.kind is GroupKind.FULL
        rows = rows_needed(paged.reach, CHUNK_TOKENS if is_full else 0, boundary)
        row = _by_row(paged)[0, 0]
        needed[[*found][not is_full]] += len(rows) * row.numel() * row.element_size()
    for name, num_bytes in found.items():
        padding_bytes = num_bytes - needed[name]
        assert 0 <= padding_bytes < SECTION_BYTES * len(pages.tensors), (name, padding_bytes)
    stated = ", ".join(f"{name} {num_bytes:,} bytes" for name, num_bytes in found.items())
    return f"unit {host.unit_tokens} tokens, {stated}"


def counts_around(layout: KVLayout, unit_tokens: int, most_tokens: int) -> list[int]:
    """Token counts at, one before and one after every boundary of a layout, up to a limit."""
    marks = {unit_tokens, CHUNK_TOKENS}
    for group in layout.groups:
        marks |= {group.tokens_per_page, group.tokens_per_row, group.window_tokens}
    marks |= {CHUNK_TOKENS + mark for mark in marks}
    counts = {mark + more for mark in marks for more in (-1, 0, 1)}
    return sorted(count for count in counts if 0 < count <= most_tokens)


def _copy_needed(source: _Places, target: _Places, tokens: TokenRange) -> None:
    """Copy the rows of a range that going on from its end reads."""
    for one, other in zip(source[0], target[0], strict=True):
        rows = rows_needed(one.reach, tokens.first, tokens.end)
        rows_per_page = one.reach.tokens_per_page // one.reach.tokens_per_row
        places = [divmod(row, rows_per_page) for row in rows]
        in_page = [row for _, row in places]
        source_pages = [source[1][one.group][page] for page, _ in places]
        target_pages = [target[1][other.group][page] for page, _ in places]
        assert _NULL_ID not in source_pages
        assert _NULL_ID not in target_pages
        _by_row(other)[target_pages, in_page] = _by_row(one)[source_pages, in_page]


@functools.cache
def rows_needed(reach: Reach, first: int, end: int) -> list[int]:
    return sorted({*reach.rows_needed(first, end)} & {*reach.rows_read(first, end)})


@functools.cache
def pages_read(reach: Reach, boundary: int) -> set[int]:
    """Pages with tokens that going on from a boundary reads."""
    tokens = (token for token in range(boundary) if reach.reads(token, boundary))
    return {token // reach.tokens_per_page for token in tokens}


def _by_row(paged: PagedTensor) -> torch.Tensor:
    """shape: [num_pages, rows_per_page, ...], integers: copying floats may change a NaN."""
    assert paged.blocks_per_page == 1
    tensor = paged.tensor.view(_AS_INTEGER[paged.tensor.element_size()])
    tensor = tensor.movedim(paged.page_axis, 0)
    return tensor.unsqueeze(1) if paged.token_axis is None else tensor.movedim(paged.token_axis, 1)


def _in_storage(tensor: torch.Tensor, copies: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    storage = copies[tensor.untyped_storage().data_ptr()]
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, *place)


def _copy(source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> None:
    for one, other in zip(source, target, strict=True):
        other.copy_(one)
