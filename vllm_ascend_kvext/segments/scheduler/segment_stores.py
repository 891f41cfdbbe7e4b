# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Requests whose prompt is a segment that is to be stored.

The prompt is computed behind its sink alone. The sink is put before the prompt that the client has
sent; see ``segment_contexts``. Whole blocks of the sink are read from the local prefix cache. No
token of the segment is read from any cache. After the step that computes the segment's last token,
the segment's rows are stored in one job. Until then, the pages that leave the request's windows are
held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm_ascend_kvext.connector.common.block_references import MAX_REFERENCED_SHARE
from vllm_ascend_kvext.connector.common.messages import StoreJob
from vllm_ascend_kvext.connector.common.request_options import STORE_ARGUMENT, read_options
from vllm_ascend_kvext.connector.common.scheduler_view import Request
from vllm_ascend_kvext.connector.scheduler.parts import SchedulerParts
from vllm_ascend_kvext.connector.scheduler.worker_jobs import Pages, table_parts
from vllm_ascend_kvext.errors import SegmentError
from vllm_ascend_kvext.holes.eligibility import why_no_holes
from vllm_ascend_kvext.request_arguments import is_first_answer
from vllm_ascend_kvext.segments.counters import SegmentCounters, SegmentRefusal
from vllm_ascend_kvext.segments.keys.key_check import MIN_PAIRS, find_pairs
from vllm_ascend_kvext.segments.prompt_segments import STORE_KEY, is_to_be_stored
from vllm_ascend_kvext.segments.scheduler.key_checks import KeyChecks
from vllm_ascend_kvext.segments.scheduler.private_hashes import PrivateHashes
from vllm_ascend_kvext.segments.scheduler.segment_learning import (
    MAX_QUEUED_DOCUMENTS,
    SegmentLearning,
    WantedSegment,
)
from vllm_ascend_kvext.segments.scheduler.segment_store import SegmentPrefix, SegmentStore
from vllm_ascend_kvext.store.counters import Refusal
from vllm_ascend_kvext.store.entries import Entry

logger = logging.getLogger("vllm.ascend_kvext.segments")

MAX_PREEMPTIONS = 2
"""The maximum number of preemptions of a request that holds pages. After more preemptions, the
store is given up, because the request may lack the very pages that it holds."""


@dataclass(slots=True)
class _Segment:
    """A request that is to store its prompt. ``segment`` is None if the store was refused.

    ``held`` has pages of windows. ``expected_blocks`` is the number of blocks that the store holds
    in the end; it is 0 until the request may begin.
    """

    segment: WantedSegment | None = None
    is_wanted: bool = False
    stored_tokens: int = 0
    held: Pages = field(default_factory=dict)
    num_preemptions: int = 0
    expected_blocks: int = 0

    @property
    def prefix(self) -> SegmentPrefix:
        assert self.segment is not None
        return self.segment.prefix


class SegmentStores:
    """The stores of one engine, for clients and, with ``learning``, for the engine's own requests.

    Args:
        first_ids: The tokens that tokenizers put before a text, if the sink begins with them.
        on_used: Called with each stored entry that other engines may have, once keys are checked.
    """

    def __init__(
        self,
        parts: SchedulerParts,
        store: SegmentStore,
        learning: SegmentLearning | None,
        checks: KeyChecks,
        counters: SegmentCounters,
        first_ids: Sequence[int] = (),
        on_used: Callable[[Entry], None] = lambda _: None,
    ) -> None:
        self._view = parts.view
        self._tier = parts.tier
        self._store = store
        self._learning = learning
        self._checks = checks
        self._counters = counters
        self._first_ids = tuple(first_ids)
        self._on_used = on_used
        self._tokens_per_page = parts.layout.tokens_per_page
        self._window_groups = parts.layout.window_pages(0).keys()
        self._references = parts.references
        self._jobs = parts.jobs
        self._segments: dict[str, _Segment] = {}  # By request id.
        self._num_expected_blocks = 0  # The sum over all segments.
        self._has_said_why = False

    def is_segment(self, request_id: str) -> bool:
        """Whether a request's prompt is a segment to be stored. Such a request loads nothing."""
        found = self._segments.get(request_id)
        return found is not None and found.segment is not None

    def visible_tokens(self, request_id: str) -> int | None:
        """The length of a request's beginning that others may use; None if there is no limit."""
        if not self.is_segment(request_id):
            return None
        num_tokens = self._segments[request_id].prefix.sink_tokens
        return num_tokens if num_tokens >= self._view.hash_block_size else None

    def note_new(self, request: Any) -> bool:
        """Note a request. Returns whether its prompt is to be stored.

        If so, the sink is put before the prompt.
        """
        if request.sampling_params is None or request.prompt_token_ids is None:
            return False
        try:
            if not is_to_be_stored(request.sampling_params.extra_args):
                return False
            if not read_options(request).may_store:
                raise SegmentError(
                    f"{STORE_KEY}: expected a request whose KV may be stored, found "
                    f"{STORE_ARGUMENT} false. The prompt was computed, and not stored as a "
                    "segment: leave one of them out."
                )
        except SegmentError as error:
            if is_first_answer(STORE_KEY, request.request_id):
                logger.warning("Request %s: %s", request.request_id, error)
            refusal: SegmentRefusal | None = SegmentRefusal.WRONG_SEGMENTS
            segment = _Segment()
        else:
            refusal, segment = self._prepare(request)
        self._segments[request.request_id] = segment
        if refusal is not None:
            self._counters.refusals[refusal] += 1
        return True

    def has_to_wait(self, request: Request) -> bool:
        """Whether a request has to wait, because other stores hold the pages that its store needs.

        A store that needs too many pages by itself does not wait. It is refused in the end.
        """
        wanted = self._wanted(request.request_id)
        if wanted is None or wanted.expected_blocks:
            return False
        num_tokens = wanted.prefix.num_segment_tokens
        if not self.has_room(num_tokens):
            return True
        wanted.expected_blocks = self._blocks_of_store(num_tokens)
        self._num_expected_blocks += wanted.expected_blocks
        return False

    def has_room(self, num_segment_tokens: int) -> bool:
        """Whether the store of a segment of this many tokens could begin now."""
        max_blocks = MAX_REFERENCED_SHARE * self._view.num_blocks / 2  # Prompts are stored, too.
        num_expected = self._num_expected_blocks
        return (
            not num_expected
            or num_expected + self._blocks_of_store(num_segment_tokens) <= max_blocks
        )

    def params(self, request: Request) -> Mapping[str, int] | None:
        """The response fields of a request that had to store its prompt; None for others."""
        segment = self._segments.get(request.request_id)
        return None if segment is None else {"kvext_stored_tokens": segment.stored_tokens}

    def _wanted(self, request_id: str) -> _Segment | None:
        """The segment that a request computes, until its store begins."""
        segment = self._segments.get(request_id)
        return segment if segment is not None and segment.is_wanted else None

    def note_step(self, request: Request, num_scheduled_tokens: int) -> StoreJob | None:
        """Note a request in the step that is being planned; returns its store after the step."""
        wanted = self._wanted(request.request_id)
        if wanted is None:
            return None
        prefix = wanted.prefix
        num_tokens = prefix.sink_tokens + prefix.num_segment_tokens
        computed_tokens = request.num_computed_tokens + num_scheduled_tokens
        if not self._hold_windows(request, wanted, min(computed_tokens, num_tokens)):
            self._give_up(request.request_id, wanted)
            return None
        if computed_tokens < num_tokens:
            return None
        pages = self._pages(request.request_id, wanted, num_tokens)
        new = [block for key, block in pages.items() if key not in wanted.held]
        lacks_pages = self._lacks_pages(pages, prefix.sink_tokens, num_tokens)
        if lacks_pages or self._has_too_many_references(len(new)):
            self._give_up(request.request_id, wanted)
            return None
        entries = self._store.begin_store(prefix)
        if isinstance(entries, Refusal):
            if self._learning is not None:
                self._learning.note_refused(request.request_id)
            self._give_up(request.request_id, wanted)
            return None
        wanted.is_wanted = False
        wanted.stored_tokens = prefix.num_segment_tokens
        if self._learning is not None:
            self._learning.note_store(request.request_id, bool(entries))
        if not entries:
            self._let_go(wanted)
            # The whole segment is stored, but its salt may have no contexts, or may have lost them.
            if wanted.segment is not None:
                self._note_document(wanted.segment)
            return None
        self._references.take(new)
        blocks = [*wanted.held.values(), *new]
        wanted.held = {}
        number = self._jobs.begin_store(
            blocks, partial(self._end, request.request_id, wanted, entries)
        )
        token_ids = prefix.token_ids
        rows = tuple(self._store.rows_of(prefix, entry, token_ids) for entry in entries)
        return StoreJob(number, (), table_parts(pages, len(self._view.managers)), rows)

    def preempted(self, request_id: str) -> None:
        """Note that a request has lost its pages."""
        wanted = self._wanted(request_id)
        if wanted is not None:
            if wanted.held:
                wanted.num_preemptions += 1
            self._let_go(wanted)
            if wanted.num_preemptions > MAX_PREEMPTIONS:
                self._give_up(request_id, wanted)

    def release_all_held(self) -> None:
        """Let go of the pages that no store reads yet."""
        for segment in self._segments.values():
            self._release(segment)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        segment = self._segments.pop(request_id, None)
        if segment is not None and segment.is_wanted:
            self._let_go(segment)
        if self._learning is not None:
            self._learning.forget(request_id)

    def _end(
        self,
        request_id: str,
        wanted: _Segment,
        entries: Sequence[Entry],
        has_failed: bool,
    ) -> None:
        """End a store that all workers have ended."""
        self._expect_nothing(wanted)
        segment = wanted.segment
        is_check = segment is not None and segment.is_check
        for entry in entries:
            if has_failed or is_check:
                self._tier.fail_store(entry, is_own=has_failed)
            elif self._store.finish_store(wanted.prefix, entry):
                self._put(entry)
        if not has_failed and segment is not None:
            self._note_document(segment)
            if not is_check and self._checks.are_open:
                self._note_unchecked(segment)
        if not (has_failed or is_check):
            self._counters.stored_segments += 1
        if self._learning is not None:
            self._learning.end_store(request_id, has_failed)

    def _note_unchecked(self, wanted: WantedSegment) -> None:
        """Have keys checked, or warn: a stored document had too few equal tokens for a check."""
        if self._learning is not None:
            self._learning.check_keys(wanted)
        elif not self._has_said_why:
            self._has_said_why = True
            logger.warning(
                "KvextConnector: segments are not reused yet: keys of equal tokens have to be "
                "compared once, and a document of %d tokens has %d pairs of equal tokens, %d are "
                "needed. Store any text in which more tokens occur twice.",
                wanted.prefix.num_segment_tokens,
                len(find_pairs(wanted.prefix.token_ids)),
                MIN_PAIRS,
            )

    def _note_document(self, wanted: WantedSegment) -> None:
        """Note a stored document. A client's document is stored behind its salt's contexts, too.

        The engine's own request computes the document there, because the client's request would
        answer to the context. A learned document is stored behind a context once two requests have
        wanted it there.
        """
        prefix, cache_salt, *_ = wanted
        if self._learning is None or prefix.has_context or wanted.is_check:
            return
        for document in self._store.contexts.add(prefix.token_ids, cache_salt, wanted):
            if document.is_learned:
                continue
            for each in self._store.prefixes(document.prefix.token_ids, cache_salt):
                if each.has_context and not each.sink.is_past:
                    self._learning.enqueue(document._replace(prefix=each), MAX_QUEUED_DOCUMENTS)

    def _put(self, entry: Entry) -> None:
        """Offer an entry to other engines, which do not check keys, once keys were checked."""
        if self._checks.are_passed and not self._store.has_context(entry):
            self._on_used(entry)

    def _give_up(self, request_id: str, wanted: _Segment) -> None:
        if self._learning is None or request_id not in self._learning.request_ids:
            self._counters.refusals[SegmentRefusal.ROOM] += 1
        wanted.is_wanted = False
        self._let_go(wanted)

    def _let_go(self, wanted: _Segment) -> None:
        """Let go of the pages of a segment that is not stored, or not yet."""
        self._expect_nothing(wanted)
        self._release(wanted)

    def _blocks_of_store(self, num_segment_tokens: int) -> int:
        """The maximum number of blocks, of all KV cache groups, that a store holds."""
        return sum(
            -(-num_segment_tokens // tokens) + 1 for tokens in self._tokens_per_page.values()
        )

    def _expect_nothing(self, wanted: _Segment) -> None:
        self._num_expected_blocks -= wanted.expected_blocks
        wanted.expected_blocks = 0

    def _release(self, wanted: _Segment) -> None:
        self._references.release(list(wanted.held.values()))
        wanted.held = {}

    def _has_too_many_references(self, num_new: int) -> bool:
        max_blocks = MAX_REFERENCED_SHARE * self._view.num_blocks
        return self._references.num_references + num_new > max_blocks

    def _hold_windows(self, request: Request, wanted: _Segment, end_tokens: int) -> bool:
        """Hold the pages of windows that a step writes; False if they are too many."""
        held: Pages = {}
        for group in self._window_groups:
            tokens_per_page = self._tokens_per_page[group]
            first_tokens = max(request.num_computed_tokens, wanted.prefix.sink_tokens)
            first_page = first_tokens // tokens_per_page
            end_page = max(first_page, -(-end_tokens // tokens_per_page))
            found = self._view.blocks(request.request_id, group, first_page, end_page)
            for page, block in enumerate(found, first_page):
                if not block.is_null and (group, page) not in wanted.held:
                    held[group, page] = block
        if self._has_too_many_references(len(held)):
            return False
        self._references.take(list(held.values()))
        wanted.held |= held
        return True

    def _prepare(self, request: Any) -> tuple[SegmentRefusal | None, _Segment]:
        refused = _Segment()
        if why_no_holes(request) is not None:
            return SegmentRefusal.UNSUITED_REQUEST, refused
        wanted = self._learning.wanted(request.request_id) if self._learning is not None else None
        if wanted is None:  # A client's prompt has no sink yet.
            refusal, wanted = self._put_sink_before(request)
            if wanted is None:
                return refusal, refused
        sink_tokens = wanted.prefix.sink_tokens
        if sink_tokens >= self._view.hash_block_size:
            PrivateHashes(
                request, sink_tokens, self._view.hash_block_size
            )  # The request keeps the object.
        else:
            request.skip_reading_prefix_cache = True
        return None, _Segment(wanted, is_wanted=True)

    def _put_sink_before(
        self, request: Any
    ) -> tuple[SegmentRefusal, None] | tuple[None, WantedSegment]:
        sink = self._store.contexts.without_context(request.cache_salt)
        sink_ids = [*sink.token_ids]
        prompt = list(request.prompt_token_ids)
        # The prompt may begin with the sink, or with the tokens that tokenizers put before a text.
        first_ids = [sink_ids, [*self._first_ids], []]
        before = next(each for each in first_ids if prompt[: len(each)] == each)
        segment = prompt[len(before) :]
        if not segment:
            return SegmentRefusal.WRONG_SEGMENTS, None
        if len(sink_ids) + len(segment) >= self._view.max_model_len:
            return SegmentRefusal.TOO_LONG, None
        if before != sink_ids:
            _replace_first(request, len(before), sink_ids)
        prefix = self._store.prefix(segment, sink)
        return None, WantedSegment(prefix, request.cache_salt, request._block_hasher)

    def _pages(self, request_id: str, wanted: _Segment, num_tokens: int) -> Pages:
        """The blocks of a request from the end of its sink up to a token."""
        pages = dict(wanted.held)
        for group in range(len(self._view.managers)):
            tokens_per_page = self._tokens_per_page[group]
            first_page = wanted.prefix.sink_tokens // tokens_per_page
            blocks = self._view.blocks(
                request_id, group, first_page, -(-num_tokens // tokens_per_page)
            )
            for page, block in enumerate(blocks, first_page):
                if not block.is_null:
                    pages[group, page] = block
        return pages

    def _lacks_pages(self, pages: Pages, sink_tokens: int, num_tokens: int) -> bool:
        """Whether pages of windows are missing. A reset of the prefix cache releases them."""
        return any(
            (group, page) not in pages
            for group, tokens_per_page in self._tokens_per_page.items()
            for page in range(sink_tokens // tokens_per_page, -(-num_tokens // tokens_per_page))
        )


def _replace_first(request: Any, num_tokens: int, token_ids: Sequence[int]) -> None:
    """Replace the first tokens of the prompt of a request that vLLM has not looked at yet."""
    request.prompt_token_ids = [*token_ids, *request.prompt_token_ids[num_tokens:]]
    request._all_token_ids[:num_tokens] = token_ids
    request.num_prompt_tokens += len(token_ids) - num_tokens
    request.block_hashes.clear()
    request.update_block_hashes()
