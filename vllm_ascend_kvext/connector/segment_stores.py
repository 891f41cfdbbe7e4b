# SPDX-License-Identifier: Apache-2.0
"""Requests whose prompt is a segment that is to be stored.

The prompt is computed behind the sink and nothing else: whatever the client sends, the sink is put
before it, and nothing is read from a cache. After the step that ends it, its rows are stored, in
one job.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_ascend_kvext.blending.errors import SegmentError
from vllm_ascend_kvext.blending.segment_prefix import SegmentPrefix
from vllm_ascend_kvext.blending.segment_store import SegmentStore
from vllm_ascend_kvext.blending.segments import is_to_be_stored
from vllm_ascend_kvext.connector.blend_counters import BlendCounters, BlendRefusal
from vllm_ascend_kvext.connector.block_references import BlockReferences
from vllm_ascend_kvext.connector.engine import Block, Engine, Request
from vllm_ascend_kvext.connector.messages import StoreJob
from vllm_ascend_kvext.holes.eligibility import why_no_holes
from vllm_ascend_kvext.layout.transfer_plan import TablePart
from vllm_ascend_kvext.store.counters import Refusal
from vllm_ascend_kvext.store.entries import Entry

logger = logging.getLogger("vllm.ascend_kvext.blending")

MOST_REFERENCED_SHARE = 0.75
"""Of the pool's blocks: what stores under way hold at most."""


@dataclass(slots=True)
class _UnderWay:
    """A job that workers make."""

    prefix: SegmentPrefix
    entries: list[Entry]
    blocks: list[Block]
    workers_left: int
    has_failed: bool = False


class SegmentStores:
    """Of one engine.

    Args:
        engine: The scheduler's parts.
        store: What is stored of segments.
        tokens_per_page: By KV cache group.
        references: To pages.
        numbers: Of jobs.
        num_workers: That make every store.
        counters: Of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        store: SegmentStore,
        tokens_per_page: dict[int, int],
        references: BlockReferences,
        numbers: Iterator[int],
        num_workers: int,
        counters: BlendCounters,
    ) -> None:
        self._engine = engine
        self._store = store
        self._tokens_per_page = tokens_per_page
        self._references = references
        self._numbers = numbers
        self._num_workers = num_workers
        self._counters = counters
        self._wanted: dict[str, tuple[int, ...]] = {}  # segments, by request
        self._under_way: dict[int, _UnderWay] = {}

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def note_new(self, request: Any) -> bool:
        """A request has arrived. If its prompt is to be stored, the sink is put before it.

        Args:
            request: ``vllm.v1.request.Request``, which is changed before it is scheduled.

        Returns:
            Whether its prompt is a segment.
        """
        if request.sampling_params is None or request.prompt_token_ids is None:
            return False
        try:
            if not is_to_be_stored(request.sampling_params.extra_args):
                return False
        except SegmentError as error:
            self._counters.refusals[BlendRefusal.WRONG_SEGMENTS] += 1
            logger.warning("Request %s: %s", request.request_id, error)
            return True
        refusal = self._prepare(request)
        if refusal is not None:
            self._counters.refusals[refusal] += 1
        return True

    def note_step(self, request: Request, num_scheduled_tokens: int) -> StoreJob | None:
        """A request computes in the step that is being planned; what is stored after it."""
        token_ids = self._wanted.get(request.request_id)
        if token_ids is None:
            return None
        num_tokens = len(self._store.sink_ids) + len(token_ids)
        if request.num_computed_tokens + num_scheduled_tokens < num_tokens:
            return None
        del self._wanted[request.request_id]
        parts, blocks = self._pages(request.request_id, num_tokens)
        most_blocks = MOST_REFERENCED_SHARE * self._engine.num_blocks
        if self._references.num_references + len(blocks) > most_blocks:
            self._counters.refusals[BlendRefusal.ROOM] += 1
            return None
        prefix = self._store.prefix(token_ids, request.cache_salt)
        entries = self._store.begin_store(prefix)
        if isinstance(entries, Refusal):
            self._counters.refusals[BlendRefusal.ROOM] += 1
            return None
        if not entries:
            return None
        self._references.take(blocks)
        number = next(self._numbers)
        self._under_way[number] = _UnderWay(prefix, entries, blocks, self._num_workers)
        rows = tuple(self._store.rows_of(prefix, entry, token_ids) for entry in entries)
        return StoreJob(number, (), parts, rows)

    def end(self, number: int, num_workers: int, has_failed: bool) -> None:
        """So many workers have ended a job; nothing if it is not one of these."""
        job = self._under_way.get(number)
        if job is None:
            return
        job.workers_left -= num_workers
        job.has_failed |= has_failed
        if job.workers_left > 0:
            return
        del self._under_way[number]
        self._references.release(job.blocks)
        for entry in job.entries:
            if job.has_failed:
                self._store.fail_store(entry)
            else:
                self._store.finish_store(job.prefix, entry)
        self._counters.stored_segments += not job.has_failed

    def abandon(self) -> None:
        """Let go of the pages of all stores, whose bytes are then worth nothing."""
        for job in self._under_way.values():
            self._references.release(job.blocks)
            job.blocks, job.has_failed = [], True

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._wanted.pop(request_id, None)

    def _prepare(self, request: Any) -> BlendRefusal | None:
        if why_no_holes(request) is not None:
            return BlendRefusal.UNSUITED_REQUEST
        sink = list(self._store.sink_ids)
        prompt = list(request.prompt_token_ids)
        # A tokenizer may have put the beginning of the sequence there.
        has_sink = prompt[: len(sink)] == sink
        segment = prompt[len(sink) :] if has_sink else prompt
        if not segment:
            return BlendRefusal.WRONG_SEGMENTS
        if len(sink) + len(segment) >= self._engine.most_request_tokens:
            return BlendRefusal.TOO_LONG
        if not has_sink:
            _put_before(request, sink)
        request.skip_reading_prefix_cache = True
        self._wanted[request.request_id] = tuple(segment)
        return None

    def _pages(self, request_id: str, num_tokens: int) -> tuple[tuple[TablePart, ...], list[Block]]:
        """The tables of a request up to a token, and all blocks in them."""
        parts = []
        blocks: list[Block] = []
        for group in range(len(self._engine.managers)):
            end_page = -(-num_tokens // self._tokens_per_page[group])
            found = self._engine.blocks(request_id, group, 0, end_page)
            blocks += [block for block in found if not block.is_null]
            parts.append(TablePart(0, tuple([block.block_id for block in found])))
        return tuple(parts), blocks


def _put_before(request: Any, token_ids: Sequence[int]) -> None:
    """Put tokens before the prompt of a request that nobody has looked at yet."""
    request.prompt_token_ids = [*token_ids, *request.prompt_token_ids]
    request._all_token_ids[:0] = token_ids
    request.num_prompt_tokens += len(token_ids)
    request.block_hashes.clear()
    request.update_block_hashes()
