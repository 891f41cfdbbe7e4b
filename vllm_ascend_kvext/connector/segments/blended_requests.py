# SPDX-License-Identifier: Apache-2.0
"""Requests in whose prompts segments are reused.

A blended request is loaded and computed like one with holes: what is reused is loaded, all between
is a hole. From its first reused token on its KV is approximate, and kept from everyone else: see
``shared_tokens`` and ``private_hashes``. Requests that store a segment are left to `SegmentStores`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_ascend_kvext.blending.question_selection import Scores
from vllm_ascend_kvext.blending.segment_store import SegmentPrefix, SegmentStore
from vllm_ascend_kvext.blending.segments import (
    SEGMENTS_KEY,
    behind_head,
    named_segments,
    plan_blend,
    separated_segments,
)
from vllm_ascend_kvext.connector.common.counters import BlendRefusal
from vllm_ascend_kvext.connector.common.scheduler_view import Block, Request
from vllm_ascend_kvext.connector.segments.no_segments import SchedulerParts
from vllm_ascend_kvext.connector.segments.private_hashes import PrivateHashes
from vllm_ascend_kvext.connector.segments.questions import Questions
from vllm_ascend_kvext.connector.segments.segment_learning import SegmentLearning, WantedSegment
from vllm_ascend_kvext.connector.segments.segment_stores import SegmentStores
from vllm_ascend_kvext.errors import SegmentError
from vllm_ascend_kvext.holes.eligibility import why_no_holes
from vllm_ascend_kvext.holes.load_plan import LoadPlan, Span, loaded_spans, spans_within, with_holes
from vllm_ascend_kvext.request_arguments import is_first_answer
from vllm_ascend_kvext.store.entries import Piece
from vllm_ascend_kvext.store.lookup import Hit
from vllm_ascend_kvext.token_range import TokenRange

logger = logging.getLogger("vllm.ascend_kvext.blending")


@dataclass(frozen=True, slots=True)
class BlendOptions:
    """What is reused; see ``ConnectorOptions``.

    Of each reused segment the first ``head_tokens`` are computed, and at least ``min_head_tokens``:
    with windows, so many tokens read across its beginning. What is shorter than ``min_tokens`` is
    computed. Empty ``separator_ids`` find no segments.
    """

    head_tokens: int
    min_head_tokens: int
    min_tokens: int
    separator_ids: tuple[int, ...]


class _KnownSegment(NamedTuple):
    segment: TokenRange
    prefixes: Sequence[SegmentPrefix]


@dataclass(slots=True)
class _Blended:
    """A request of which ``reused_tokens`` of ``hit_tokens`` behind ``exact_tokens`` are reused.

    ``hashes`` are those of what is not exact. ``known_tokens`` is how many tokens it had when it
    got them, those on their way included.
    """

    exact_tokens: int
    hit_tokens: int
    reused_tokens: int
    hashes: PrivateHashes
    known_tokens: int


@dataclass(slots=True)
class _State:
    """The segments of a request, and what it reuses; None if all of its KV is exact.

    ``answered``: what it has lost since it reused it, and has answered by. ``is_refused``: a
    refusal is counted once, although it may be asked about in every step.
    """

    known: list[_KnownSegment] = field(default_factory=list)
    blended: _Blended | None = None
    answered: _Blended | None = None
    is_refused: bool = False


class Blending(SegmentStores):
    """The segments of one engine, stored and reused.

    Without ``questions`` nothing is compared, without ``learning`` only clients have segments
    computed. The keys of so many workers are to be compared.
    """

    is_on = True

    def __init__(
        self,
        parts: SchedulerParts,
        store: SegmentStore,
        options: BlendOptions,
        questions: Questions | None,
        learning: SegmentLearning | None,
        num_workers: int,
        first_ids: Sequence[int] = (),
    ) -> None:
        super().__init__(parts, store, learning, first_ids)
        self._window_pages = parts.layout.window_pages
        self._needs_tails = bool(self._window_pages(0))
        self.options = options
        self.questions = questions
        self._key_checks_missing = num_workers
        self._states: dict[str, _State] = {}

    # Admission.

    def add_request(self, request: Request) -> None:
        if self._note_new(request):
            return
        token_ids = request.prompt_token_ids
        if token_ids is None or request.sampling_params is None:
            return
        try:
            segments = named_segments(request.sampling_params.extra_args, len(token_ids))
        except SegmentError as error:
            self._refuse(request.request_id, BlendRefusal.WRONG_SEGMENTS)
            if is_first_answer(SEGMENTS_KEY, request.request_id):
                logger.warning("Request %s: %s", request.request_id, error)
            return
        if segments is None:
            separator_ids = self.options.separator_ids
            segments = separated_segments(token_ids, separator_ids) if separator_ids else []
        long_enough = [each for each in segments if each.num_tokens >= self.options.min_tokens]
        if not long_enough:
            return
        if why_no_holes(request) is not None:
            self._refuse(request.request_id, BlendRefusal.UNSUITED_REQUEST)
            return
        if self.learning is not None:
            self.store.contexts.note_prompt(token_ids, segments[0], request.cache_salt)
        known = [
            _KnownSegment(
                each, self.store.prefixes(token_ids[slice(*each)], request.cache_salt, num_before)
            )
            for num_before, each in enumerate(long_enough)
        ]
        self._states[request.request_id] = _State(known)
        if self.learning is not None:
            runs = [(self._reusable(each, each.num_tokens), prefixes) for each, prefixes in known]
            worth_storing = [
                each
                for run, prefixes in runs
                if run and run.num_tokens >= self.options.min_tokens
                for each in self.store.to_learn(prefixes, self.learning.learns_new)
            ]
            self.learning.note_seen(worth_storing, request.cache_salt, request._block_hasher)

    def stores_prompt(self, request_id: str) -> bool:
        return self._blended(request_id) is None and not self.is_segment(request_id)

    def lacking(self, request_id: str) -> list[tuple[SegmentPrefix, Piece]]:
        known = self._states.get(request_id, _State()).known
        return [each for _, prefixes in known for each in self.store.lacking(prefixes)]

    def plan(self, request: Request, hit: Hit) -> LoadPlan | None:
        request_id = request.request_id
        state = self._states.get(request_id)
        if state is None or not state.known:
            return None
        if not self.keys_are_checked:
            if not state.is_refused:
                self._have_keys_checked(request, state.known)
            self._refuse(request_id, BlendRefusal.UNCHECKED_KEYS)
            return None
        exact_tokens = hit.boundary_tokens
        if (
            self._needs_tails
            and exact_tokens
            and hit.tails is None
            and self.cached_windows(request, exact_tokens) is None
        ):
            self._refuse(request_id, BlendRefusal.NO_WINDOW)
            return None
        found: list[Span] = []
        candidates: list[TokenRange] = []
        for segment, prefixes in state.known:
            if segment.end_tokens <= exact_tokens:
                continue
            spans = self.store.find(prefixes, segment.first_tokens)
            stored_tokens = spans[-1].end_tokens - segment.first_tokens if spans else 0
            is_exact = stored_tokens > 0 and _is_exact(request, segment, prefixes, spans[0])
            run = self._reusable(segment, stored_tokens, is_exact)
            if run is not None:
                found += (span._replace(is_exact=is_exact) for span in spans)
                candidates.append(run)
        plan = plan_blend(request.num_tokens, exact_tokens, candidates, self.options.min_tokens)
        if plan is None:
            return None
        loaded = list(spans_within(found, plan.reused))
        if self.questions is not None:
            heads = spans_within(found, plan.holes)
            loaded = sorted((*loaded, *(span._replace(is_computed=True) for span in heads)))
        exact = loaded_spans(hit.run.rows)
        behind = with_holes(exact_tokens, loaded, plan.resume_tokens)
        tails = {} if hit.tails is None else {exact_tokens: hit.tails}
        return LoadPlan(
            hit.prefix,
            hit.after_tokens,
            plan.resume_tokens,
            exact_tokens,
            (*exact, *behind),
            tails,
            state.known[-1].segment.end_tokens,
        )

    def _have_keys_checked(self, request: Any, known: Iterable[_KnownSegment]) -> None:
        """A document is stored, and cannot be reused: what was to be compared has been dropped."""
        if self.learning is None:
            return
        stored = (each for _, prefixes in known for each in prefixes if self.store.find([each], 0))
        prefix = next(stored, None)
        if prefix is not None:
            wanted = WantedSegment(prefix, request.cache_salt, request._block_hasher)
            self.learning.check_keys(wanted)

    def _reusable(
        self, segment: TokenRange, stored_tokens: int, is_exact: bool = False
    ) -> TokenRange | None:
        options = self.options
        heads = (0, 0) if is_exact else (options.head_tokens, options.min_head_tokens)
        return behind_head(segment, stored_tokens, *heads)

    def refuse_for_room(self, request_id: str) -> None:
        self._refuse(request_id, BlendRefusal.ROOM)

    def cached_windows(
        self, request: Request, exact_tokens: int
    ) -> dict[int, Sequence[Block]] | None:
        cached: dict[int, Sequence[Block]] = {}
        for group, (first_page, end_page) in self._window_pages(exact_tokens).items():
            blocks = self._view.cached_blocks(request, group, first_page, end_page)
            if blocks is None:
                return None
            cached[group] = blocks
        return cached

    def begin(self, request: Request, plan: LoadPlan) -> None:
        state = self._states[request.request_id]
        known = state.known
        reused = [span for span in plan.segment_spans if not span.is_computed]
        for span in reused:
            assert span.entry is not None
            self._put(span.entry)
        reused_tokens = sum(span.num_tokens for span in reused)
        starts = {span.first_tokens - span.entry_tokens for span in reused}
        hits = [each.segment for each in known if each.segment.first_tokens in starts]
        num_asked = sum(each.segment.end_tokens > plan.exact_tokens for each in known)
        counters = self._counters
        counters.hit_segments += len(hits)
        counters.missed_segments += num_asked - len(hits)
        hit_tokens = sum(
            each.end_tokens - max(each.first_tokens, plan.exact_tokens) for each in hits
        )
        hashes = PrivateHashes(request, plan.exact_tokens, self._view.hash_block_size)
        state.blended = _Blended(
            plan.exact_tokens, hit_tokens, reused_tokens, hashes, _known_tokens(request)
        )

    def restart(self, request_id: str) -> None:
        state = self._states.get(request_id)
        if state is not None and state.blended is not None:
            blended, state.blended = state.blended, None
            self._count(blended)
            blended.hashes.take_back()
            # None of its KV is approximate from here on, but what it has answered till then is.
            request = self._view.requests.get(request_id)
            if request is not None and _known_tokens(request) > blended.known_tokens:
                state.answered = blended
        if self.questions is not None:
            self.questions.forget(request_id)

    # Steps.

    def choose(self, request_id: str, scores: Scores | None) -> tuple[TokenRange, ...]:
        assert self.questions is not None
        runs = self.questions.choose(request_id, scores)
        blended = self._blended(request_id)
        if blended is not None:
            blended.reused_tokens -= sum(run.num_tokens for run in runs)
        return runs

    def note_key_checks(self, num_workers: int, failure: str) -> None:
        if failure and not self.why_no_reuse:
            self.why_no_reuse = failure
            self.keys_are_checked = False
            if self.learning is not None:
                self.learning.stop()
            logger.error(
                "KvextConnector: blending is off: %s Requests are computed as without segments.",
                failure,
            )
        elif not failure and self._key_checks_missing > 0:
            self._key_checks_missing -= num_workers
            self.keys_are_checked = self._key_checks_missing <= 0 and not self.why_no_reuse
            if self.keys_are_checked and self.learning is not None:
                self.learning.note_keys_checked()

    # What is told to others.

    def shared_tokens(self, request_id: str) -> int | None:
        """Behind it, KV is approximate, or that of a segment behind a sink of its own."""
        blended = self._blended(request_id)
        return super().shared_tokens(request_id) if blended is None else blended.exact_tokens

    def params(self, request: Request) -> Mapping[str, int] | None:
        """What is stored of a segment, or how a request is marked; None if all of it is exact.

        One that was preempted is marked as it was when it last answered with reused tokens.
        """
        stored = super().params(request)
        state = self._states.get(request.request_id, _State())
        blended = state.blended or state.answered
        if stored is not None or blended is None:
            return stored
        computed_tokens = request.num_prompt_tokens - blended.exact_tokens - blended.reused_tokens
        return {
            "kvext_exact_tokens": blended.exact_tokens,
            "kvext_reused_tokens": blended.reused_tokens,
            "kvext_recomputed_tokens": computed_tokens,
        }

    # Ends.

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        state = self._states.pop(request_id, None)
        if state is not None and state.blended is not None:
            self._count(state.blended)
        if self.questions is not None:
            self.questions.forget(request_id)

    def clear(self) -> None:
        self.store.contexts.clear()
        if self.learning is not None:
            self.learning.clear()

    def _refuse(self, request_id: str, refusal: BlendRefusal) -> None:
        state = self._states.setdefault(request_id, _State())
        if not state.is_refused:
            state.is_refused = True
            self._counters.refusals[refusal] += 1

    def _count(self, blended: _Blended) -> None:
        """Count tokens once they are what they are: counters never go down."""
        self._counters.reused_tokens += blended.reused_tokens
        self._counters.recomputed_tokens += blended.hit_tokens - blended.reused_tokens

    def _blended(self, request_id: str) -> _Blended | None:
        state = self._states.get(request_id)
        return None if state is None else state.blended


def _is_exact(
    request: Request, segment: TokenRange, prefixes: Iterable[SegmentPrefix], span: Span
) -> bool:
    """Whether a segment was computed behind all that stands before it in a prompt."""
    assert span.entry is not None and request.prompt_token_ids is not None
    for each in prefixes:
        if each.sink_tokens == segment.first_tokens:
            ids_before = tuple(request.prompt_token_ids[: segment.first_tokens])
            is_found = each.key_at(span.entry.piece.end_tokens) == span.entry.key
            if is_found and each.sink.token_ids == ids_before:
                return True
    return False


def _known_tokens(request: Request) -> int:
    """Tokens of a request, those that are being computed included."""
    return request.num_tokens + request.num_output_placeholders
