# SPDX-License-Identifier: Apache-2.0
"""Requests whose prompt is a segment that is to be stored.

The prompt is computed behind the sink and nothing else: whatever the client sends, the sink is put
before it. Whole blocks of the sink are read from the local prefix cache, and nothing of the segment
is read from any cache. After the step that ends it, its rows are stored, in one job. Until then the
pages that leave its windows are held.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm_ascend_kvext.blending.errors import SegmentError
from vllm_ascend_kvext.blending.segment_prefix import SegmentPrefix
from vllm_ascend_kvext.blending.segment_store import SegmentStore
from vllm_ascend_kvext.blending.segments import is_to_be_stored
from vllm_ascend_kvext.connector.blend_counters import BlendCounters, BlendRefusal
from vllm_ascend_kvext.connector.block_references import BlockReferences
from vllm_ascend_kvext.connector.engine import Engine, Request
from vllm_ascend_kvext.connector.messages import StoreJob
from vllm_ascend_kvext.connector.private_hashes import PrivateHashes
from vllm_ascend_kvext.connector.segment_learning import SegmentLearning
from vllm_ascend_kvext.connector.store_jobs import Pages, StoreJobs, table_parts
from vllm_ascend_kvext.connector.stores import MOST_REFERENCED_SHARE
from vllm_ascend_kvext.holes.eligibility import why_no_holes
from vllm_ascend_kvext.store.counters import Refusal
from vllm_ascend_kvext.store.entries import Entry

logger = logging.getLogger("vllm.ascend_kvext.blending")


@dataclass(slots=True)
class _Wanted:
    """A segment that is being computed.

    Attributes:
        token_ids: Of the segment.
        held: Pages of its windows.
        expected_blocks: That its store will hold; 0 until it may be computed.
    """

    token_ids: tuple[int, ...]
    held: Pages = field(default_factory=dict)
    expected_blocks: int = 0


class SegmentStores:
    """Of one engine.

    Args:
        engine: The scheduler's parts.
        store: What is stored of segments.
        tokens_per_page: By KV cache group.
        window_groups: Those with windows.
        references: To pages.
        jobs: The stores under way.
        counters: Of the engine.
        learning: Has requests of its own; None if there are only clients.
    """

    def __init__(
        self,
        engine: Engine,
        store: SegmentStore,
        tokens_per_page: dict[int, int],
        window_groups: Collection[int],
        references: BlockReferences,
        jobs: StoreJobs,
        counters: BlendCounters,
        learning: SegmentLearning | None = None,
    ) -> None:
        self._engine = engine
        self._store = store
        self._tokens_per_page = tokens_per_page
        self._window_groups = window_groups
        self._references = references
        self._jobs = jobs
        self._counters = counters
        self._learning = learning
        self._wanted: dict[str, _Wanted] = {}
        self._segment_ids: set[str] = set()  # of requests
        self._with_cached_sink: set[str] = set()  # those that may find their sink in the cache
        self._stored_tokens: dict[str, int] = {}
        self._num_expected_blocks = 0  # of all that are wanted or being stored

    def is_segment(self, request_id: str) -> bool:
        """Whether the prompt of a request is one: it is not stored once more as a prompt."""
        return request_id in self._segment_ids

    def shared_tokens(self, request_id: str) -> int | None:
        """Before which token the blocks of a request are for everyone; None if all of them are."""
        return len(self._store.sink_ids) if request_id in self._with_cached_sink else None

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
            self._stored_tokens[request.request_id] = 0
            self._counters.refusals[BlendRefusal.WRONG_SEGMENTS] += 1
            logger.warning("Request %s: %s", request.request_id, error)
            return True
        self._stored_tokens[request.request_id] = 0
        refusal = self._prepare(request)
        if refusal is not None:
            self._counters.refusals[refusal] += 1
        return True

    def has_to_wait(self, request: Request) -> bool:
        """Whether segments before this one hold so many pages that it might be refused.

        Asked before a request is admitted. One that needs too many by itself does not wait.
        """
        wanted = self._wanted.get(request.request_id)
        if wanted is None or wanted.expected_blocks:
            return False
        if not self.has_room(len(wanted.token_ids)):
            return True
        wanted.expected_blocks = self._blocks_of_store(len(wanted.token_ids))
        self._num_expected_blocks += wanted.expected_blocks
        return False

    def has_room(self, num_segment_tokens: int) -> bool:
        """Whether a segment of so many tokens would not have to wait, if it was asked for now."""
        most_blocks = MOST_REFERENCED_SHARE * self._engine.num_blocks / 2  # Others store, too.
        num_expected = self._num_expected_blocks
        return (
            not num_expected
            or num_expected + self._blocks_of_store(num_segment_tokens) <= most_blocks
        )

    def params(self, request_id: str) -> dict[str, int] | None:
        """What the response says of a request that was to store a segment."""
        stored_tokens = self._stored_tokens.get(request_id)
        return None if stored_tokens is None else {"kvext_stored_tokens": stored_tokens}

    def note_step(self, request: Request, num_scheduled_tokens: int) -> StoreJob | None:
        """A request computes in the step that is being planned; what is stored after it."""
        wanted = self._wanted.get(request.request_id)
        if wanted is None:
            return None
        token_ids = wanted.token_ids
        num_tokens = len(self._store.sink_ids) + len(token_ids)
        computed_tokens = request.num_computed_tokens + num_scheduled_tokens
        if not self._hold_windows(request, wanted, min(computed_tokens, num_tokens)):
            self._give_up(request.request_id)
            return None
        if computed_tokens < num_tokens:
            return None
        prefix = self._store.prefix(token_ids, request.cache_salt)
        pages = self._pages(request.request_id, wanted, num_tokens)
        new = [block for key, block in pages.items() if key not in wanted.held]
        if self._lacks_pages(pages, num_tokens) or self._has_too_many_references(len(new)):
            self._give_up(request.request_id)
            return None
        entries = self._store.begin_store(prefix)
        if isinstance(entries, Refusal):
            self._give_up(request.request_id)
            return None
        del self._wanted[request.request_id]
        self._stored_tokens[request.request_id] = len(token_ids)
        if self._learning is not None:
            self._learning.note_store(request.request_id, bool(entries))
        if not entries:
            self._let_go(wanted)
            return None
        self._references.take(new)
        blocks = [*wanted.held.values(), *new]
        number = self._jobs.begin(
            blocks, partial(self._end, request.request_id, wanted, prefix, entries)
        )
        rows = tuple(self._store.rows_of(prefix, entry, token_ids) for entry in entries)
        return StoreJob(number, (), table_parts(pages, len(self._engine.managers)), rows)

    def preempted(self, request_id: str) -> None:
        """A request begins again: its pages are gone."""
        wanted = self._wanted.get(request_id)
        if wanted is not None:
            self._let_go(wanted)

    def release_all_held(self) -> None:
        """Let go of the pages that no store reads yet: they are not stored then."""
        for request_id in list(self._wanted):
            self._release(self._wanted[request_id])

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._segment_ids.discard(request_id)
        self._with_cached_sink.discard(request_id)
        self._stored_tokens.pop(request_id, None)
        wanted = self._wanted.pop(request_id, None)
        if wanted is not None:
            self._let_go(wanted)
        if self._learning is not None:
            self._learning.forget(request_id)

    def _end(
        self,
        request_id: str,
        wanted: _Wanted,
        prefix: SegmentPrefix,
        entries: Sequence[Entry],
        has_failed: bool,
    ) -> None:
        """All workers have ended a store."""
        self._expect_nothing(wanted)
        for entry in entries:
            if has_failed:
                self._store.fail_store(entry)
            else:
                self._store.finish_store(prefix, entry)
        self._counters.stored_segments += not has_failed
        if self._learning is not None:
            self._learning.end_store(request_id, has_failed)

    def _give_up(self, request_id: str) -> None:
        if self._learning is None or not self._learning.note_no_room(request_id):
            self._counters.refusals[BlendRefusal.ROOM] += 1
        wanted = self._wanted.pop(request_id)
        self._let_go(wanted)

    def _let_go(self, wanted: _Wanted) -> None:
        """It is not stored, or not yet: its pages are for others."""
        self._expect_nothing(wanted)
        self._release(wanted)

    def _blocks_of_store(self, num_segment_tokens: int) -> int:
        """How many the store of a segment holds."""
        return self.num_blocks(len(self._store.sink_ids) + num_segment_tokens)

    def num_blocks(self, num_tokens: int) -> int:
        """That so many tokens take, of all KV cache groups."""
        return sum(-(-num_tokens // tokens) for tokens in self._tokens_per_page.values())

    def _expect_nothing(self, wanted: _Wanted) -> None:
        self._num_expected_blocks -= wanted.expected_blocks
        wanted.expected_blocks = 0

    def _release(self, wanted: _Wanted) -> None:
        self._references.release(list(wanted.held.values()))
        wanted.held = {}

    def _has_too_many_references(self, num_new: int) -> bool:
        most_blocks = MOST_REFERENCED_SHARE * self._engine.num_blocks
        return self._references.num_references + num_new > most_blocks

    def _hold_windows(self, request: Request, wanted: _Wanted, end_tokens: int) -> bool:
        """Hold the pages of windows that a step writes; False if that is too many."""
        held: Pages = {}
        for group in self._window_groups:
            tokens_per_page = self._tokens_per_page[group]
            first_page = request.num_computed_tokens // tokens_per_page
            end_page = -(-end_tokens // tokens_per_page)
            found = self._engine.blocks(request.request_id, group, first_page, end_page)
            for page, block in enumerate(found, first_page):
                if not block.is_null and (group, page) not in wanted.held:
                    held[group, page] = block
        if self._has_too_many_references(len(held)):
            return False
        self._references.take(list(held.values()))
        wanted.held |= held
        return True

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
        hash_tokens = self._engine.hash_tokens
        if len(sink) < hash_tokens:
            request.skip_reading_prefix_cache = True
        else:
            PrivateHashes(request, len(sink), hash_tokens)  # The request keeps it.
            self._with_cached_sink.add(request.request_id)
        self._wanted[request.request_id] = _Wanted(tuple(segment))
        self._segment_ids.add(request.request_id)
        return None

    def _pages(self, request_id: str, wanted: _Wanted, num_tokens: int) -> Pages:
        """The blocks of a request up to a token."""
        pages = dict(wanted.held)
        for group in range(len(self._engine.managers)):
            end_page = -(-num_tokens // self._tokens_per_page[group])
            for page, block in enumerate(self._engine.blocks(request_id, group, 0, end_page)):
                if not block.is_null:
                    pages[group, page] = block
        return pages

    def _lacks_pages(self, pages: Pages, num_tokens: int) -> bool:
        """Whether pages of windows have been let go of, for a reset of the prefix cache."""
        sink_tokens = len(self._store.sink_ids)
        return any(
            (group, page) not in pages
            for group, tokens_per_page in self._tokens_per_page.items()
            for page in range(sink_tokens // tokens_per_page, -(-num_tokens // tokens_per_page))
        )


def _put_before(request: Any, token_ids: Sequence[int]) -> None:
    """Put tokens before the prompt of a request that nobody has looked at yet."""
    request.prompt_token_ids = [*token_ids, *request.prompt_token_ids]
    request._all_token_ids[:0] = token_ids
    request.num_prompt_tokens += len(token_ids)
    request.block_hashes.clear()
    request.update_block_hashes()
