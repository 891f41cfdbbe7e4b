# SPDX-License-Identifier: Apache-2.0
"""Requests in whose prompts segments are reused, and requests that store one.

A blended request is loaded and computed like one with holes: what is reused is loaded, all between
is a hole. From its first reused token on its KV is approximate, and kept from everyone else: see
``exact_tokens`` and ``private_hashes``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vllm_ascend_kvext.blending.blend_plan import behind_head, plan_blend
from vllm_ascend_kvext.blending.errors import SegmentError
from vllm_ascend_kvext.blending.question_selection import Scores
from vllm_ascend_kvext.blending.segment_prefix import SegmentPrefix
from vllm_ascend_kvext.blending.segment_store import SegmentStore
from vllm_ascend_kvext.blending.segments import (
    Segment,
    named_segments,
    separated_segments,
)
from vllm_ascend_kvext.connector.blend_counters import BlendCounters, BlendRefusal
from vllm_ascend_kvext.connector.engine import Block, Engine, Request
from vllm_ascend_kvext.connector.private_hashes import PrivateHashes
from vllm_ascend_kvext.connector.questions import Questions
from vllm_ascend_kvext.connector.segment_learning import SegmentLearning
from vllm_ascend_kvext.holes.eligibility import why_no_holes
from vllm_ascend_kvext.holes.hole_queue import ProbePlan
from vllm_ascend_kvext.holes.span_plan import Run
from vllm_ascend_kvext.store.entries import Entry
from vllm_ascend_kvext.store.lookup import Hit, PlacedRows

logger = logging.getLogger("vllm.ascend_kvext.blending")


@dataclass(frozen=True, slots=True)
class BlendOptions:
    """What is reused; see ``ConnectorOptions``.

    Attributes:
        head_tokens: First tokens of each reused segment that are computed.
        least_head_tokens: The same, whatever the length of a segment: of models with windows, so
            many tokens read across its beginning.
        min_tokens: A shorter segment, or rest of one, is computed.
        separator_ids: What stands between segments; empty finds none.
    """

    head_tokens: int
    least_head_tokens: int
    min_tokens: int
    separator_ids: tuple[int, ...]


class _KnownSegment(NamedTuple):
    segment: Segment
    prefix: SegmentPrefix


@dataclass(slots=True)
class _Blended:
    """A request of which something is reused.

    Attributes:
        exact_tokens: Before it, everything is exact.
        reused_tokens: That are not computed.
        hashes: Of what is not exact.
        known_tokens: That it had when it got them, those on their way included.
    """

    exact_tokens: int
    reused_tokens: int
    hashes: PrivateHashes
    known_tokens: int


class BlendedRequests:
    """The segments of one engine's requests.

    Args:
        engine: The scheduler's parts.
        window_pages: Of a boundary: first and end page that going on there reads, by KV cache
            group with windows.
        store: What is stored of segments.
        options: What is reused.
        counters: Of the engine.
        questions: Compares questions with segments; None if nothing does.
        learning: Is told which segments requests have; None if nothing is learned.

    Attributes:
        options: What is reused.
        keys_are_checked: Whether this model's keys are known to turn with their positions alone.
    """

    def __init__(
        self,
        engine: Engine,
        window_pages: Callable[[int], Mapping[int, tuple[int, int]]],
        store: SegmentStore,
        options: BlendOptions,
        counters: BlendCounters,
        questions: Questions | None = None,
        learning: SegmentLearning | None = None,
    ) -> None:
        self._engine = engine
        self._window_pages = window_pages
        self._needs_tails = bool(window_pages(0))
        self._store = store
        self.options = options
        self._counters = counters
        self._questions = questions
        self._learning = learning
        self._known: dict[str, list[_KnownSegment]] = {}
        self._blended: dict[str, _Blended] = {}
        # Requests that have lost what they reused, and keep what they have answered by it.
        self._answered: dict[str, _Blended] = {}
        self._refused: set[str] = set()
        self._prescribed: dict[str, tuple[Run, ...]] = {}
        self.keys_are_checked = False

    def note_new(self, request: Request) -> None:
        """A request has arrived: find its segments."""
        token_ids = request.prompt_token_ids
        if token_ids is None or request.sampling_params is None:
            return
        try:
            segments = named_segments(request.sampling_params.extra_args, len(token_ids))
        except SegmentError as error:
            self._refuse(request.request_id, BlendRefusal.WRONG_SEGMENTS)
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
        self._known[request.request_id] = [
            _KnownSegment(
                segment, self._store.prefix(token_ids[slice(*segment)], request.cache_salt)
            )
            for segment in long_enough
        ]
        if self._learning is not None:
            self._note_seen(request, self._learning)

    def reuse_only(self, request_id: str, runs: Sequence[Run]) -> None:
        """Reuse these tokens of a request that has not arrived yet, whatever the options say.

        Args:
            request_id: Of the request, which names its segments.
            runs: Tokens of them; ascending.
        """
        self._prescribed[request_id] = tuple(runs)

    def _note_seen(self, request: Request, learning: SegmentLearning) -> None:
        """Have segments learned that would be reused if they were stored."""
        worth_storing = []
        for segment, prefix in self._known[request.request_id]:
            run = self.reusable(segment, segment.num_tokens)
            if run is not None and run.num_tokens >= self.options.min_tokens:
                worth_storing.append(prefix)
        learning.note_seen(worth_storing, request.cache_salt, request._block_hasher)

    def find(self, request: Request, hit: Hit) -> Hit | None:
        """What can be loaded of a request if segments are reused behind what is exact.

        Args:
            request: That is to be admitted.
            hit: What can be loaded of its own prefix; perhaps nothing.

        Returns:
            None if nothing is reused.
        """
        request_id = request.request_id
        known = self._known.get(request_id)
        if not known:
            return None
        if not self.keys_are_checked:
            self._refuse(request_id, BlendRefusal.UNCHECKED_KEYS)
            return None
        exact_tokens = hit.boundary_tokens
        exact_tails = self._tails_at(hit)
        if (
            self._needs_tails
            and exact_tokens
            and exact_tails is None
            and (hit.entries or self.cached_windows(request, exact_tokens) is None)
        ):
            self._refuse(request_id, BlendRefusal.NO_WINDOW)
            return None
        found: list[PlacedRows] = []
        candidates: list[Run] = []
        for segment, prefix in known:
            if segment.end_tokens <= exact_tokens:
                continue
            rows = self._store.find(prefix, segment.first_tokens)
            stored_tokens = rows[-1].end_tokens - segment.first_tokens if rows else 0
            runs = self._candidates(request_id, segment, stored_tokens)
            if runs:
                found += rows
                candidates += runs
        least_run_tokens = 1 if request_id in self._prescribed else self.options.min_tokens
        plan = plan_blend(request.num_tokens, exact_tokens, candidates, least_run_tokens)
        if plan is None:
            return None
        return replace(
            hit,
            boundary_tokens=plan.resume_tokens,
            entries=tuple(entry for entry in hit.entries if entry is not exact_tails),
            holes=plan.holes,
            hole_tails=(None,) * len(plan.holes),
            placed=tuple(_cut(found, plan.reused)),
            heads=() if self._questions_of(request_id) is None else tuple(_cut(found, plan.holes)),
            exact_tokens=exact_tokens,
            exact_tails=exact_tails,
        )

    def _candidates(self, request_id: str, segment: Segment, stored_tokens: int) -> list[Run]:
        prescribed = self._prescribed.get(request_id)
        if prescribed is None:
            run = self.reusable(segment, stored_tokens)
            return [] if run is None else [run]
        end_tokens = segment.first_tokens + stored_tokens
        return [
            run
            for run in prescribed
            if segment.first_tokens <= run.first_tokens and run.end_tokens <= end_tokens
        ]

    def reusable(self, segment: Segment, stored_tokens: int) -> Run | None:
        """What is reused of a segment, see ``behind_head``."""
        options = self.options
        return behind_head(segment, stored_tokens, options.head_tokens, options.least_head_tokens)

    def _tails_at(self, hit: Hit) -> Entry | None:
        """The tails where a hit ends; None where that is where the device's own rows end."""
        return hit.entries[-1] if self._needs_tails and hit.entries else None

    def cached_windows(
        self, request: Request, exact_tokens: int
    ) -> dict[int, Sequence[Block]] | None:
        """What the device has of the windows before a token, by KV cache group with windows.

        Returns:
            None if it lacks some of it.
        """
        cached: dict[int, Sequence[Block]] = {}
        for group, (first_page, end_page) in self._window_pages(exact_tokens).items():
            blocks = self._engine.cached_blocks(request, group, first_page, end_page)
            if blocks is None:
                return None
            cached[group] = blocks
        return cached

    def begin(self, request: Request, hit: Hit) -> None:
        """A request has got blocks for what `find` has found."""
        known = self._known[request.request_id]
        reused_tokens = sum(rows.end_tokens - rows.first_tokens for rows in hit.placed)
        starts = {rows.first_tokens - rows.entry_tokens for rows in hit.placed}
        hits = [each.segment for each in known if each.segment.first_tokens in starts]
        counters = self._counters
        counters.hit_segments += len(hits)
        counters.missed_segments += sum(
            each.segment.end_tokens > hit.exact_tokens for each in known
        ) - len(hits)
        counters.reused_tokens += reused_tokens
        counters.recomputed_tokens += (
            sum(each.end_tokens - max(each.first_tokens, hit.exact_tokens) for each in hits)
            - reused_tokens
        )
        hashes = PrivateHashes(request, hit.exact_tokens, self._engine.hash_tokens)
        self._blended[request.request_id] = _Blended(
            hit.exact_tokens, reused_tokens, hashes, _known_tokens(request)
        )

    def probe(self, request: Request, hit: Hit) -> ProbePlan | None:
        """How the question of a request that has begun is compared with its segments, if it is."""
        questions = self._questions_of(request.request_id)
        return None if questions is None else questions.begin(request, hit)

    def _questions_of(self, request_id: str) -> Questions | None:
        """What compares the question of a request with its segments; None if nothing does."""
        return None if request_id in self._prescribed else self._questions

    def scored(self, request_id: str) -> tuple[Run, ...]:
        """The tokens that the question of a request is compared with."""
        assert self._questions is not None
        return self._questions.scored(request_id)

    def choose(self, request_id: str, scores: Scores | None) -> tuple[Run, ...]:
        """What of a request is computed and not reused, as its question has it.

        Args:
            scores: Of the tokens of `scored`, one after the other; None if there are none.
        """
        assert self._questions is not None
        runs = self._questions.choose(request_id, scores)
        num_tokens = sum(run.num_tokens for run in runs)
        self._blended[request_id].reused_tokens -= num_tokens
        self._counters.reused_tokens -= num_tokens
        self._counters.recomputed_tokens += num_tokens
        return runs

    def restart(self, request_id: str) -> None:
        """A request has lost its blocks, or its load has failed: none of its KV is approximate.

        What it has answered till then, is.
        """
        blended = self._blended.pop(request_id, None)
        if blended is not None:
            blended.hashes.take_back()
            request = self._engine.requests.get(request_id)
            if request is not None and _known_tokens(request) > blended.known_tokens:
                self._answered[request_id] = blended
        if self._questions is not None:
            self._questions.forget(request_id)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._known.pop(request_id, None)
        self._prescribed.pop(request_id, None)
        self._blended.pop(request_id, None)
        self._answered.pop(request_id, None)
        self._refused.discard(request_id)
        if self._questions is not None:
            self._questions.forget(request_id)

    def exact_tokens(self, request_id: str) -> int | None:
        """Before which token the KV of a request is exact; None if all of it is."""
        blended = self._blended.get(request_id)
        return None if blended is None else blended.exact_tokens

    def params(self, request: Request) -> dict[str, int] | None:
        """What the response says of a request: its mark. None if all of it is exact.

        Of one that was preempted, as it was when it last answered with reused tokens.
        """
        blended = self._blended.get(request.request_id, self._answered.get(request.request_id))
        if blended is None:
            return None
        computed_tokens = request.num_prompt_tokens - blended.exact_tokens - blended.reused_tokens
        return {
            "kvext_exact_tokens": blended.exact_tokens,
            "kvext_reused_tokens": blended.reused_tokens,
            "kvext_recomputed_tokens": computed_tokens,
        }

    def refuse_for_room(self, request_id: str) -> None:
        """There is no room for what was found."""
        self._refuse(request_id, BlendRefusal.ROOM)

    def _refuse(self, request_id: str, refusal: BlendRefusal) -> None:
        if request_id not in self._refused:  # It may be asked about in every step.
            self._refused.add(request_id)
            self._counters.refusals[refusal] += 1


def _known_tokens(request: Request) -> int:
    """Tokens of a request, those that are being computed included."""
    return request.num_tokens + request.num_output_placeholders


def _cut(found: Sequence[PlacedRows], runs: Sequence[Run]) -> list[PlacedRows]:
    """What lies in some runs. Both ascend, and are disjoint; there may be thousands."""
    cut = []
    num_behind = 0  # Runs that end before what is looked at.
    for rows in found:
        while num_behind < len(runs) and runs[num_behind].end_tokens <= rows.first_tokens:
            num_behind += 1
        for index in range(num_behind, len(runs)):
            run = runs[index]
            if rows.end_tokens <= run.first_tokens:
                break
            first = max(rows.first_tokens, run.first_tokens)
            end = min(rows.end_tokens, run.end_tokens)
            entry_tokens = rows.entry_tokens + first - rows.first_tokens
            cut.append(PlacedRows(rows.entry, first, end, entry_tokens))
    return cut
