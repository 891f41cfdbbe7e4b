# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Both sides of KvextConnector on one worker's pages: store, corrupt every page, load, compare.

Block tables are made by hand. They have the pages that the definition of the group's attention
reads. By the same definition, the expected rows are copied, tensor by tensor. Then every byte of
every storage is compared. This includes other pages, padding, and rows that no resume reads.
"""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.v1.core.block_pool import BlockPool

from support.connector.held import held_by
from support.connector.worker_configs import AttentionLayer, vllm_config, worker_options
from support.layout.reach import Reach
from support.layout.truth import LayoutFixture, PagedTensor
from vllm_ascend_kvext.connector.common.messages import ConnectorMetadata
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.connector.common.scheduler_view import SchedulerView
from vllm_ascend_kvext.connector.scheduler.connector_scheduler import ConnectorScheduler
from vllm_ascend_kvext.connector.worker import worker_side
from vllm_ascend_kvext.connector.worker.worker_side import WorkerSide
from vllm_ascend_kvext.layout.build import build_layout
from vllm_ascend_kvext.layout.model import KVLayout
from vllm_ascend_kvext.retention.offload_boundaries import OffloadBoundaries
from vllm_ascend_kvext.token_range import TokenRange

CHUNK_TOKENS = 1024
HOST_BYTES = 512 << 20
MANY_BLOCKS = 1 << 20
"""A pool so large that the limit of stores, a share of the pool, has no effect."""

_NULL_ID = 0
_DEADLINE_S = 20.0

BlockIds = list[list[int]]
_Places = tuple[Sequence[PagedTensor], BlockIds]
"""Tensors, and the block tables of a request for them."""


def paged_request(request_id: str, num_tokens: int, hash_block_size: int) -> Any:
    """A request with this number of tokens. All requests begin with the same tokens."""
    return SimpleNamespace(
        request_id=request_id,
        num_tokens=num_tokens,
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        all_token_ids=range(num_tokens),
        block_hashes=[number.to_bytes(8, "big") for number in range(num_tokens // hash_block_size)],
        lora_request=None,
        cache_salt=None,
        sampling_params=None,
        pooling_params=None,
        skip_reading_prefix_cache=False,
    )


class _Contents:
    """A copy of a worker's storages, and of the tensors in them."""

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
    """One worker. Its pages and its host memory serve many round trips.

    ``seed`` decides all bytes and the order of the blocks.
    """

    def __init__(self, pages: LayoutFixture, seed: int) -> None:
        self._pages, self._storages = pages, pages.storages()
        self._random = random.Random(seed)
        pages.fill(seed)
        self._original = _Contents(pages)
        """The pages with the KV that requests have computed."""
        pages.fill(seed + 1)
        self._expected = _Contents(pages)
        """The pages as expected after a load."""
        self._garbage = pages.copy_of_storages()
        layers = {name: AttentionLayer() for name in pages.kv_caches}
        self._worker = WorkerSide(
            vllm_config(layers),
            pages.config,
            worker_options(host_bytes=HOST_BYTES),
        )
        build = partial(build_layout, addressing=pages.addressing)
        with (
            mock.patch.object(worker_side, "build_layout", build),
            mock.patch.object(worker_side, "read_nz_layers", return_value=pages.nz_layers),
        ):
            self._worker.register(pages.kv_caches)
        self.layout: KVLayout = self._worker.describe().layout
        self.hash_block_size = math.gcd(*(group.tokens_per_page for group in self.layout.groups))
        self.unit_tokens = Sides([self._worker], self.hash_block_size).unit_tokens

    def shutdown(self) -> None:
        self._worker.shutdown()

    def run(self, turns: Sequence[int], local_tokens: int = 0) -> int:
        """Store some turns of a conversation, load the last one, and compare.

        Args:
            turns: The number of tokens of each turn. The longest turn is the last.
            local_tokens: The tokens of the loading request that the device already has.

        Returns:
            The number of loaded tokens.
        """
        boundaries = [tokens - tokens % self.unit_tokens for tokens in turns]
        source_ids = self._block_ids(turns[-1], boundaries)
        _copy(self._original.storages, self._storages)
        sides = Sides([self._worker], self.hash_block_size)
        for number, num_tokens in enumerate(turns):
            request = paged_request(f"turn {number}", num_tokens, self.hash_block_size)
            sides.store(request, source_ids)
        _copy(self._garbage, self._storages)
        _copy(self._garbage, self._expected.storages)
        target_ids = self._block_ids(turns[-1] + 1, boundaries[-1:])
        request = paged_request("next turn", turns[-1] + 1, self.hash_block_size)
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
        """Distinct blocks in random order, for the pages that are read at any of the boundaries."""
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
        """Compare every byte of every storage."""
        pairs = zip(self._storages, self._expected.storages, strict=True)
        if all(torch.equal(found, expected) for found, expected in pairs):
            return
        wrong: dict[int, list[int]] = {}
        for found, expected in zip(self._pages.tensors, self._expected.tensors, strict=True):
            one = found.by_row()
            other = expected.by_row()
            differs = (one != other).reshape(*one.shape[:2], -1).any(dim=2)
            if differs.any():
                wrong.setdefault(found.group, differs.nonzero()[0].tolist())
        raise AssertionError(f"by group, first wrong page and row: {wrong or 'between tensors'}")


class Sides:
    """A new scheduler side for workers, and the steps of an engine that computes nothing."""

    def __init__(self, workers: Sequence[WorkerSide], hash_block_size: int) -> None:
        self._workers = workers
        self.may_fail = False
        layouts = [worker.describe() for worker in workers]
        layout = layouts[0].layout
        self._requests: dict[str, Any] = {}
        groups = range(layout.num_scheduler_groups)
        self._managers = [SimpleNamespace(req_to_blocks={}) for _ in groups]
        self._pool = BlockPool(layout.num_pages, False, hash_block_size)
        options = ConnectorOptions(chunk_tokens=CHUNK_TOKENS, load_if_slower=True)
        engine = SchedulerView(
            self._requests,
            self._managers,
            self._pool,
            MANY_BLOCKS,
            hash_block_size,
            OffloadBoundaries,
            enable_caching=False,
        )
        self.scheduler = self._side = ConnectorScheduler(engine, layouts, options, mock.Mock())
        self.unit_tokens = self._side.tier.geometry.unit_tokens

    def store(self, request: Any, block_ids: BlockIds) -> None:
        """Let a request compute all of its tokens and end."""
        self.compute(request, block_ids)
        self.end(request)
        self._step({})

    def compute(self, request: Any, block_ids: BlockIds) -> None:
        """Let a request compute all of its tokens."""
        self._requests[request.request_id] = request
        for manager, ids in zip(self._managers, block_ids, strict=True):
            blocks = [self._pool.blocks[number] for number in ids]
            manager.req_to_blocks[request.request_id] = blocks
            self._pool.touch([block for block in blocks if not block.is_null])
        assert self._side.get_num_new_matched_tokens(request, request.num_tokens - 1) == 0
        self._side.update_state_after_alloc(request, tuple(block_ids), 0)
        self._step({request.request_id: request.num_tokens})
        request.num_computed_tokens = request.num_tokens

    def end(self, request: Any, is_end_of_turn: bool = True) -> None:
        """Let a request end. Its stores begin in the next step."""
        self._side.request_finished(request, is_end_of_turn)
        self._free(request)

    def load(self, request: Any, local_tokens: int, block_ids: BlockIds) -> int:
        """Let a request match, load and end. Return the number of loaded tokens."""
        self._requests[request.request_id] = request
        num_tokens = self._side.get_num_new_matched_tokens(request, local_tokens)
        assert num_tokens is not None
        self._side.update_state_after_alloc(request, tuple(block_ids), num_tokens)
        jobs = self._step({})
        assert len(jobs.loads) == bool(num_tokens)
        self._side.request_finished(request, is_end_of_turn=False)
        self._free(request)
        return num_tokens

    def assert_idle(self) -> None:
        assert not self._side.has_transfers
        assert not self._side.references.num_references
        assert not held_by(self._side).pinned_ids
        assert self._pool.get_num_free_blocks() == self._pool.num_gpu_blocks - 1

    def _free(self, request: Any) -> None:
        for manager in self._managers:
            blocks = manager.req_to_blocks.pop(request.request_id, ())
            self._pool.free_blocks(blocks)
        del self._requests[request.request_id]

    def _step(self, num_scheduled_tokens: dict[str, int]) -> ConnectorMetadata:
        jobs = self._side.build_connector_meta(num_scheduled_tokens, ())
        loaded: Counter[str] = Counter()
        for worker in self._workers:
            worker.run_before_step(jobs)
            worker.begin_step(jobs)
            worker.end_of_forward()
            left = len(jobs.stores) + len(jobs.loads)
            while left:
                worker.wait_for_end(_DEADLINE_S)
                ended = worker.end_step()
                results = ended.results
                assert ended.loads or results.jobs_ended, "a transfer has not ended"
                assert self.may_fail or not (results.failed_jobs or results.failed_loads)
                left -= len(results.jobs_ended) + len(ended.loads)
                loaded.update(ended.loads)
                on_all = {each for each in ended.loads if loaded[each] == len(self._workers)}
                self._side.update_connector_output(results, on_all)
        return jobs


def counts_around(layout: KVLayout, unit_tokens: int, max_tokens: int) -> list[int]:
    """Token counts: every boundary of a layout up to a limit, and its two neighbours."""
    marks = {unit_tokens, CHUNK_TOKENS}
    for group in layout.groups:
        marks |= {group.tokens_per_page, group.tokens_per_row, group.window_tokens}
    marks |= {CHUNK_TOKENS + mark for mark in marks}
    counts = {mark + more for mark in marks for more in (-1, 0, 1)}
    return sorted(count for count in counts if 0 < count <= max_tokens)


def _copy_needed(source: _Places, target: _Places, tokens: TokenRange) -> None:
    """Copy the rows of a range that a resume at the end of the range reads."""
    for one, other in zip(source[0], target[0], strict=True):
        rows = rows_needed(one.reach, tokens.first_tokens, tokens.end_tokens)
        rows_per_page = one.reach.tokens_per_page // one.reach.tokens_per_row
        places = [divmod(row, rows_per_page) for row in rows]
        in_page = [row for _, row in places]
        source_pages = [source[1][one.group][page] for page, _ in places]
        target_pages = [target[1][other.group][page] for page, _ in places]
        assert _NULL_ID not in source_pages
        assert _NULL_ID not in target_pages
        other.by_row()[target_pages, in_page] = one.by_row()[source_pages, in_page]


@functools.cache
def rows_needed(reach: Reach, first: int, end: int) -> list[int]:
    return sorted({*reach.rows_needed(first, end)} & {*reach.rows_read(first, end)})


@functools.cache
def pages_read(reach: Reach, boundary: int) -> set[int]:
    """The pages with tokens that a resume at this boundary reads."""
    tokens = (token for token in range(boundary) if reach.reads(token, boundary))
    return {token // reach.tokens_per_page for token in tokens}


def _in_storage(tensor: torch.Tensor, copies: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    storage = copies[tensor.untyped_storage().data_ptr()]
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, *place)


def _copy(source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> None:
    for one, other in zip(source, target, strict=True):
        other.copy_(one)
