# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Requests whose prompts reuse segments.

A blended request is loaded and computed like a request with holes. The reused rows are loaded, and
the tokens between them are holes. From the first reused token on, the request's KV is approximate,
and no other request may use it: see `BlendedRequests.visible_tokens` and ``private_hashes``.
``segment_stores`` has the requests that store a segment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_ascend_kvext.connector.common.messages import LoadJob
from vllm_ascend_kvext.connector.common.request_options import read_options
from vllm_ascend_kvext.connector.common.scheduler_view import Block, Request
from vllm_ascend_kvext.connector.scheduler.parts import SchedulerParts
from vllm_ascend_kvext.errors import SegmentError
from vllm_ascend_kvext.holes.eligibility import why_no_holes
from vllm_ascend_kvext.holes.hole_blocks import WindowTables
from vllm_ascend_kvext.holes.hole_queue import HoleRow
from vllm_ascend_kvext.holes.load_plan import LoadPlan, Span, loaded_spans, spans_within, with_holes
from vllm_ascend_kvext.layout.transfer_plan import TablePart
from vllm_ascend_kvext.request_arguments import is_first_answer
from vllm_ascend_kvext.segments.counters import SegmentCounters, SegmentRefusal
from vllm_ascend_kvext.segments.messages import ProbeJob
from vllm_ascend_kvext.segments.prompt_segments import (
    SEGMENTS_KEY,
    behind_head,
    named_segments,
    plan_blend,
    separated_segments,
)
from vllm_ascend_kvext.segments.question_selection import Scores
from vllm_ascend_kvext.segments.scheduler.blended_loads import BlendedLoads
from vllm_ascend_kvext.segments.scheduler.blended_plan import BlendedPlan
from vllm_ascend_kvext.segments.scheduler.dense_windows import DenseWindows
from vllm_ascend_kvext.segments.scheduler.key_checks import KeyChecks
from vllm_ascend_kvext.segments.scheduler.private_hashes import PrivateHashes
from vllm_ascend_kvext.segments.scheduler.question_preview import QuestionPreview
from vllm_ascend_kvext.segments.scheduler.questions import Questions
from vllm_ascend_kvext.segments.scheduler.segment_learning import SegmentLearning, WantedSegment
from vllm_ascend_kvext.segments.scheduler.segment_store import SegmentPrefix, SegmentStore
from vllm_ascend_kvext.store.entries import Entry, WantedPiece
from vllm_ascend_kvext.store.lookup import Hit
from vllm_ascend_kvext.token_range import TokenRange

logger = logging.getLogger("vllm.ascend_kvext.segments")


@dataclass(frozen=True, slots=True)
class BlendOptions:
    """The numbers that decide what is reused; see ``SegmentOptions``.

    Attributes:
        head_tokens: The number of first tokens of each reused segment that are computed.
        min_head_tokens: The minimum of ``head_tokens``. With windows, this many first tokens of a
            segment read tokens before the segment.
        min_tokens: The minimum length of a reused run. Shorter runs are computed.
        separator_ids: The separator between segments; empty if segments have none.
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
    """What a request reuses.

    Attributes:
        exact_tokens: The length of its exact beginning.
        hit_tokens: The tokens of its stored segments, behind the exact beginning.
        reused_tokens: The hit tokens that are not computed.
        hashes: The private hashes of its blocks behind the exact beginning.
        known_tokens: The number of tokens that the request had when it got these hashes,
            placeholders included.
    """

    exact_tokens: int
    hit_tokens: int
    reused_tokens: int
    hashes: PrivateHashes
    known_tokens: int


@dataclass(slots=True)
class _State:
    """The segments of a request, and what it reuses.

    Attributes:
        blended: What it reuses; None if all of its KV is exact.
        answered: What it reused before it was preempted, if it gave an answer with the reused
            tokens.
        preview: The preview of its question; None if there is none.
        is_refused: Whether a refusal was counted. A refusal may be found anew in every step.
    """

    known: list[_KnownSegment] = field(default_factory=list)
    blended: _Blended | None = None
    answered: _Blended | None = None
    preview: QuestionPreview | None = None
    is_refused: bool = False


class BlendedRequests:
    """The requests of one engine that have segments.

    Args:
        questions: Compares questions with segments; None if questions are not compared.
        learning: Has segments computed that no client has stored; None if nothing is learned.
        on_used: Called with each used entry that other engines may have, once keys are checked.
    """

    def __init__(
        self,
        parts: SchedulerParts,
        store: SegmentStore,
        options: BlendOptions,
        questions: Questions | None,
        learning: SegmentLearning | None,
        checks: KeyChecks,
        counters: SegmentCounters,
        on_used: Callable[[Entry], None] = lambda _: None,
    ) -> None:
        self._view = parts.view
        self._holes = parts.holes
        self._window_pages = parts.layout.window_pages
        self._windows = DenseWindows(parts.holes.blocks)
        self._loads = BlendedLoads(parts.layout, len(parts.view.managers))
        self._store = store
        self.options = options
        self.questions = questions
        self._learning = learning
        self._checks = checks
        self._counters = counters
        self._on_used = on_used
        self._states: dict[str, _State] = {}
        self._new_probes: list[ProbeJob] = []  # The probes of the step that is being scheduled.
        self._probed: dict[str, str] = {}  # Request ids, by the rows of their previews.

    # Admission.

    def note_new(self, request: Request) -> None:
        """Note the segments of a request that has arrived, and that stores no segment."""
        token_ids = request.prompt_token_ids
        if token_ids is None or request.sampling_params is None:
            return
        try:
            segments = named_segments(request.sampling_params.extra_args, len(token_ids))
        except SegmentError as error:
            self._refuse(request.request_id, SegmentRefusal.WRONG_SEGMENTS)
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
            self._refuse(request.request_id, SegmentRefusal.UNSUITED_REQUEST)
            return
        # The engine learns nothing from a request that must not be stored.
        learning = self._learning if read_options(request).may_store else None
        if learning is not None:
            self._store.contexts.note_prompt(token_ids, segments[0], request.cache_salt)
        known = [
            _KnownSegment(
                each, self._store.prefixes(token_ids[slice(*each)], request.cache_salt, num_before)
            )
            for num_before, each in enumerate(long_enough)
        ]
        self._states[request.request_id] = _State(known)
        if learning is not None:
            runs = [(self._reusable(each, each.num_tokens), prefixes) for each, prefixes in known]
            worth_storing = [
                each
                for run, prefixes in runs
                if run and run.num_tokens >= self.options.min_tokens
                for each in self._store.to_learn(prefixes, learning.learns_new)
            ]
            learning.note_seen(worth_storing, request.cache_salt, request._block_hasher)

    def pieces_to_get(self, request_id: str) -> list[WantedPiece]:
        """The pieces of the segments of a request that host memory lacks."""
        state = self._states.get(request_id)
        pieces = []
        for _, prefixes in state.known if state is not None else ():
            for prefix, piece in self._store.lacking(prefixes):
                contents = self._store.contents(prefix, piece)
                num_bytes = self._store.num_bytes(contents)
                on_got = self._checks.note_elsewhere
                pieces.append(WantedPiece(prefix, piece, contents, num_bytes, on_got))
        return pieces

    def plan(
        self, request: Request, hit: Hit, has_room: Callable[[LoadPlan], bool]
    ) -> BlendedPlan | None:
        """Plan a request that reuses segments behind a hit; None if it reuses none."""
        plan = self._plan(request, hit)
        if plan is None or has_room(plan):
            return plan
        self._refuse(request.request_id, SegmentRefusal.ROOM)
        return None

    def _plan(self, request: Request, hit: Hit) -> BlendedPlan | None:
        request_id = request.request_id
        state = self._states.get(request_id)
        if state is None or not state.known:
            return None
        if not self._checks.are_passed:
            if not state.is_refused:
                self._have_keys_checked(request, state.known)
            self._refuse(request_id, SegmentRefusal.UNCHECKED_KEYS)
            return None
        exact_tokens = hit.boundary_tokens
        if (
            self._windows.has_windows
            and exact_tokens
            and hit.tails is None
            and self._cached_windows(request, exact_tokens) is None
        ):
            self._refuse(request_id, SegmentRefusal.NO_WINDOW)
            return None
        found: list[Span] = []
        candidates: list[TokenRange] = []
        for segment, prefixes in state.known:
            if segment.end_tokens <= exact_tokens:
                continue
            spans = self._store.find(prefixes, segment.first_tokens)
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
        return BlendedPlan(
            hit.prefix,
            hit.after_tokens,
            plan.resume_tokens,
            (*exact, *behind),
            tails,
            first_blended_tokens=exact_tokens,
            segments_end_tokens=state.known[-1].segment.end_tokens,
            window_blocks=self._windows.num_blocks(exact_tokens, plan.resume_tokens),
        )

    def _have_keys_checked(self, request: Any, known: Iterable[_KnownSegment]) -> None:
        """Have keys checked if a document is stored, but keys have not been compared yet."""
        if self._learning is None:
            return
        stored = (each for _, prefixes in known for each in prefixes if self._store.find([each], 0))
        prefix = next(stored, None)
        if prefix is not None:
            wanted = WantedSegment(prefix, request.cache_salt, request._block_hasher)
            self._learning.check_keys(wanted)

    def _reusable(
        self, segment: TokenRange, stored_tokens: int, is_exact: bool = False
    ) -> TokenRange | None:
        options = self.options
        heads = (0, 0) if is_exact else (options.head_tokens, options.min_head_tokens)
        return behind_head(segment, stored_tokens, *heads)

    def _cached_windows(
        self, request: Request, exact_tokens: int
    ) -> dict[int, Sequence[Block]] | None:
        """The cached blocks of the windows before a token, by KV cache group with windows.

        Returns:
            None if the device lacks some of these blocks.
        """
        cached: dict[int, Sequence[Block]] = {}
        for group, (first_page, end_page) in self._window_pages(exact_tokens).items():
            blocks = self._view.cached_blocks(request, group, first_page, end_page)
            if blocks is None:
                return None
            cached[group] = blocks
        return cached

    def hold(self, request: Request, plan: LoadPlan) -> bool:
        """Keep the cached windows that a request reads, until it begins; False if they are gone.

        Nothing is kept if the request reads no windows, or loads them.
        """
        if not self._windows.has_windows or plan.exact_tokens in plan.tails:
            return True
        if self._windows.is_held(request.request_id):
            return True
        cached = self._cached_windows(request, plan.exact_tokens)
        if cached is not None:
            self._windows.hold(request.request_id, cached)
        return cached is not None

    def begin(
        self, request: Request, plan: BlendedPlan, block_ids: tuple[list[int], ...]
    ) -> LoadJob:
        """Begin a request that has got blocks for a plan of `plan`; returns its load."""
        tables = self._park(request, plan, block_ids)
        self._note_begun(request, plan)
        return self._loads.plan(request.request_id, plan, block_ids, tables)

    def _park(
        self, request: Request, plan: BlendedPlan, block_ids: tuple[list[int], ...]
    ) -> WindowTables:
        """Have the request's holes computed. A previewed question is computed before them.

        Returns:
            The window tables, by KV cache group with windows. Empty if the model has no windows, or
            if there are too few blocks for them. In the second case the load has to fail.
        """
        request_id = request.request_id
        preview_plan = None
        if self.questions is not None:
            preview_plan = self.questions.begin(request, plan)
        if not (plan.holes or self._windows.has_windows or preview_plan):
            return {}
        is_held = self._windows.is_held(request_id)
        tables = self._windows.begin(request_id, plan.exact_tokens, block_ids)
        if tables is None:
            return {}
        holes = plan.holes
        preview = None
        if preview_plan is not None:
            holes = preview_plan.missing
            preview = self._states[request_id].preview = QuestionPreview(
                request_id,
                preview_plan,
                plan.holes,
                tuple(map(len, block_ids)),
                self._holes,
                self._windows,
                self._counters,
                self._note_probe,
            )
        self._holes.park(
            request_id,
            holes,
            plan.after_tokens,
            tables,
            reads_loaded_windows=not is_held,
            preview=preview,
        )
        return tables.by_group

    def _note_begun(self, request: Request, plan: BlendedPlan) -> None:
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
        """A request has lost its blocks, or its load has failed."""
        state = self._states.get(request_id)
        if state is not None and state.blended is not None:
            blended = state.blended
            state.blended = None
            self._count(blended)
            blended.hashes.take_back()
            # From here on, all KV of the request is exact. Its answer so far is approximate.
            request = self._view.requests.get(request_id)
            if request is not None and _known_tokens(request) > blended.known_tokens:
                state.answered = blended
        self._forget_question(request_id)

    # Steps.

    def _note_probe(self, row: HoleRow) -> None:
        """Plan the probe of a question that is in the step that is being scheduled."""
        assert self.questions is not None
        request_id = row.request_id
        block_ids = [
            [block.block_id for block in manager.req_to_blocks.get(request_id, ())]
            for manager in self._view.managers
        ]
        parts = tuple(TablePart(0, tuple(ids)) for ids in row.tables(block_ids))
        queries = self.questions.queries(request_id, row.run)
        self._new_probes.append(
            ProbeJob(row.row_id, queries, self.questions.scored(request_id), parts)
        )
        self._probed[row.row_id] = request_id

    def end_step(self) -> tuple[ProbeJob, ...]:
        """End the scheduling of a step; returns the probes of its rows."""
        self._windows.release_held()
        probes = tuple(self._new_probes)
        self._new_probes.clear()
        return probes

    def end_probe(self, row_id: str, scores: Scores | None) -> None:
        """End a probe: a question was compared with segments. Its request may have ended already.

        Args:
            scores: One score per scored token, in their order; None if there are no scores.
        """
        request_id = self._probed.pop(row_id, None)
        state = self._states.get(request_id) if request_id is not None else None
        if state is None or state.preview is None:
            return
        preview = state.preview
        state.preview = None
        assert request_id is not None
        if self._holes.preview_of(request_id) is not preview:
            return  # The preview was given up.
        runs = self._choose(request_id, scores)
        preview.end(runs)
        if runs:
            self._holes.note_new_holes(request_id, runs)

    def _choose(self, request_id: str, scores: Scores | None) -> tuple[TokenRange, ...]:
        """The runs of a request that are computed because its question attends to them."""
        assert self.questions is not None
        runs = self.questions.choose(request_id, scores)
        blended = self._blended(request_id)
        if blended is not None:
            blended.reused_tokens -= sum(run.num_tokens for run in runs)
        return runs

    # Answers to other parts.

    def visible_tokens(self, request_id: str) -> int | None:
        """The length of the exact beginning of a request; None if all of its KV is exact."""
        blended = self._blended(request_id)
        return None if blended is None else blended.exact_tokens

    def params(self, request: Request) -> Mapping[str, int] | None:
        """The fields that mark the response of a request; None if all of its KV was exact.

        A preempted request is marked as it was when it last answered with reused tokens.
        """
        state = self._states.get(request.request_id, _State())
        blended = state.blended or state.answered
        if blended is None:
            return None
        computed_tokens = request.num_prompt_tokens - blended.exact_tokens - blended.reused_tokens
        return {
            "kvext_exact_tokens": blended.exact_tokens,
            "kvext_reused_tokens": blended.reused_tokens,
            "kvext_recomputed_tokens": computed_tokens,
        }

    # Ends.

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._forget_question(request_id)
        state = self._states.pop(request_id, None)
        if state is not None and state.blended is not None:
            self._count(state.blended)

    def _forget_question(self, request_id: str) -> None:
        """Forget the question of a request, and its probe if one is under way."""
        state = self._states.get(request_id)
        if state is not None and state.preview is not None:
            self._probed.pop(state.preview.row_id, None)
            state.preview = None
        if self.questions is not None:
            self.questions.forget(request_id)

    def _put(self, entry: Entry) -> None:
        """Offer an entry to other engines, which do not check keys, once keys were checked."""
        if self._checks.are_passed and not self._store.has_context(entry):
            self._on_used(entry)

    def _refuse(self, request_id: str, refusal: SegmentRefusal) -> None:
        state = self._states.setdefault(request_id, _State())
        if not state.is_refused:
            state.is_refused = True
            self._counters.refusals[refusal] += 1

    def _count(self, blended: _Blended) -> None:
        """Count tokens when their numbers are final, because counters never go down."""
        self._counters.reused_tokens += blended.reused_tokens
        self._counters.recomputed_tokens += blended.hit_tokens - blended.reused_tokens

    def _blended(self, request_id: str) -> _Blended | None:
        state = self._states.get(request_id)
        return None if state is None else state.blended


def _is_exact(
    request: Request, segment: TokenRange, prefixes: Iterable[SegmentPrefix], span: Span
) -> bool:
    """Whether a stored segment was computed behind the same tokens as stand before it now."""
    assert span.entry is not None and request.prompt_token_ids is not None
    for each in prefixes:
        if each.sink_tokens == segment.first_tokens:
            ids_before = tuple(request.prompt_token_ids[: segment.first_tokens])
            is_found = each.key_at(span.entry.piece.end_tokens) == span.entry.key
            if is_found and each.sink.token_ids == ids_before:
                return True
    return False


def _known_tokens(request: Request) -> int:
    """The tokens of a request, placeholders of tokens that are being computed included."""
    return request.num_tokens + request.num_output_placeholders
