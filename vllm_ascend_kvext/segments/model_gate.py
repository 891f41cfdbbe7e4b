# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Checks whether the segments of a model may be reused: makes prompts, and judges the answers.

Prompts are random tokens. *In place* means that a segment stands where it was stored, behind the
same sink. Then all KV is exact, so the answer has to equal that of a prompt without reuse::

    stored      [sink][segment                     ]
    in place    [sink][segment                     ] others  copy
    reused              ---------------------------

*Moved* means that segments stand elsewhere, one behind the other, so answers differ. Each such
prompt is asked twice: with segments as they are stored, and with repaired segments, whose heads are
computed. Prompts end with a copy of some tokens of a segment. So a model that looks for earlier
copies finds one, as induction heads do (Olsson et al., arXiv 2209.11895).

``commands.check_model`` has an engine compute the prompts. This module knows nothing of vLLM.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import NamedTuple, Protocol

from vllm_ascend_kvext.errors import BlendingError
from vllm_ascend_kvext.segments.prompt_segments import behind_head
from vllm_ascend_kvext.token_range import TokenRange

NUM_SEGMENTS = 3
"""The number of stored segments. Each has one prompt in place."""

NUM_MOVED = 6
"""The number of prompts with several segments, which are moved."""

MIN_SEGMENT_TOKENS = 96
_MIN_REUSED_TOKENS = 48
"""The minimum number of tokens that are reused of each moved segment."""

_REPEATED_TOKENS = 32
"""The number of first tokens of a segment that occur in it twice, so that keys can be compared."""

_COPY_TOKENS = 12
_OTHER_TOKENS = 9
"""The number of other tokens before and behind segments. It is no multiple of a page."""

MIN_LIMITS = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 1e-1}
"""The minimum limits of a difference between log-probabilities, in nats, by the type of the model.
Sums in another order may change them by this much, even if two runs without reuse agree."""

NOISE_FACTOR = 4
"""The limit of a difference, as a multiple of the difference between two runs without reuse."""

SURE_ERRORS = 2.0
"""A model is refused if repair takes answers further away by more than this many standard errors.
If repair changes nothing in a model, the model passes with a chance of 95 %."""

Answer = Mapping[int, float]
"""Log-probabilities of the likeliest next tokens, by token id."""


class GateQuestion(NamedTuple):
    """A request that an engine is to compute.

    ``stores`` says that the prompt behind the sink is a segment to be stored. ``segments`` are the
    segments that the request names.
    """

    token_ids: tuple[int, ...]
    stores: bool = False
    segments: tuple[TokenRange, ...] = ()

    @property
    def cache_salt(self) -> str:
        """The salt. Requests without reuse have another salt, to miss the prefix cache."""
        return "kvext-check" if self.stores or self.segments else "kvext-check-whole"


GateReply = tuple[Answer, Mapping[str, object]]
"""The answer to the last token of a prompt, and the ``kv_transfer_params`` of the response."""


class Heads(NamedTuple):
    """How many first tokens of a reused segment are computed; see ``behind_head``."""

    head_tokens: int
    min_head_tokens: int

    def reused(self, segment: TokenRange) -> TokenRange | None:
        """The reused part of a segment that is stored whole."""
        return behind_head(segment, segment.num_tokens, *self)


_AS_STORED = Heads(0, 0)


InPlace = tuple[float, float, float]
"""Three answers to one prompt in place, compared with the answer without reuse: the differences in
nats. The first answer was given with reuse. The second is computed together with other prompts. The
third is to a prompt with other tokens in place of the reused tokens, and without reuse of KV."""

Moved = tuple[float, float]
"""Two such differences for a moved prompt: with segments as stored, and with repaired segments."""


class GatePrompt(NamedTuple):
    """A prompt, and the ranges of the stored segments in it, ascending."""

    token_ids: tuple[int, ...]
    segments: tuple[TokenRange, ...]

    def without(self, runs: Sequence[TokenRange], others: Sequence[int]) -> tuple[int, ...]:
        """The tokens of the prompt, with other tokens in these runs."""
        token_ids = list(self.token_ids)
        for run in runs:
            token_ids[slice(*run)] = others[slice(*run)]
        return tuple(token_ids)


class GatePrompts(NamedTuple):
    """The stored segments, without the sink, and all prompts that a model is asked.

    ``in_place`` has one prompt per segment. ``others`` has as many tokens as the longest prompt.
    """

    segments: tuple[tuple[int, ...], ...]
    in_place: tuple[GatePrompt, ...]
    moved: tuple[GatePrompt, ...]
    others: tuple[int, ...]


class AskedEngine(Protocol):
    """An engine that only the check uses."""

    @property
    def keys_are_checked(self) -> bool: ...
    @property
    def why_no_reuse(self) -> str: ...

    def ask(self, questions: Sequence[GateQuestion]) -> list[GateReply]:
        """Compute these requests together, and wait until all transfers have ended."""

    def forget_cached(self) -> None:
        """Empty the prefix cache."""

    def compute_heads(self, heads: Heads) -> None:
        """From here on, compute these heads of each reused segment."""


@dataclass(frozen=True, slots=True)
class ModelGate:
    """The check of one engine's model.

    ``heads`` come from the engine's options. Runs of fewer than ``min_tokens`` tokens are not
    reused. The largest blocks have ``page_tokens`` tokens.
    """

    engine: AskedEngine
    heads: Heads
    sink_ids: tuple[int, ...]
    min_tokens: int
    page_tokens: int
    max_prompt_tokens: int

    def check(self, vocabulary_tokens: int, dtype: str) -> str:
        """Check a model with a vocabulary of this size. ``dtype`` is like ``float32``.

        Returns:
            The measured numbers, if the segments of the model may be reused.

        Raises:
            BlendingError: The segments may not be reused. Or the model cannot be asked, because
                there is too little room, or because a store fails.
        """
        prompts = self.make_prompts(vocabulary_tokens)
        self._store(prompts)
        if self.engine.why_no_reuse:
            raise BlendingError(self.engine.why_no_reuse)
        in_place = self._ask_in_place(prompts)
        has_windows = self.heads.min_head_tokens > 0
        return judge(in_place, self._ask_moved(prompts) if has_windows else [], dtype)

    def make_prompts(self, vocabulary_tokens: int) -> GatePrompts:
        """Make prompts of random tokens, the same at each call.

        The first and the last quarter of the vocabulary are left out, because special tokens lie
        there. Segments and their reused parts span several pages.

        Raises:
            BlendingError: There is no room for a segment long enough to be reused.
        """
        repaired_tokens = max(self.heads)  # The minimum for each reused segment.
        segment_tokens = max(
            MIN_SEGMENT_TOKENS,
            2 * self.page_tokens,
            2 * repaired_tokens,
            repaired_tokens + max(_MIN_REUSED_TOKENS, self.min_tokens),
        )
        fixed_tokens = len(self.sink_ids) + _OTHER_TOKENS + _COPY_TOKENS
        num_together = min(NUM_SEGMENTS, (self.max_prompt_tokens - fixed_tokens) // segment_tokens)
        if num_together < 1:
            raise BlendingError(
                f"check-model: expected room for a prompt of {fixed_tokens + segment_tokens} "
                f"tokens, in which a segment of {segment_tokens} is reused, found room for "
                f"{self.max_prompt_tokens}. Give the engine a longer context or more KV blocks, or "
                "serve this model without segments."
            )
        draw = _Draw(vocabulary_tokens)
        segments = tuple(draw.segment(segment_tokens) for _ in range(NUM_SEGMENTS))
        in_place = tuple(draw.in_place(self.sink_ids, segment) for segment in segments)
        moved = []
        for number in range(NUM_MOVED):
            together = [segments[(number + each) % NUM_SEGMENTS] for each in range(num_together)]
            moved.append(draw.moved(self.sink_ids, together))
        num_others = max(len(prompt.token_ids) for prompt in (*in_place, *moved))
        return GatePrompts(segments, in_place, tuple(moved), draw.tokens(num_others))

    def _store(self, prompts: GatePrompts) -> None:
        for segment in prompts.segments:
            question = GateQuestion((*self.sink_ids, *segment), stores=True)
            ((_, params),) = self.engine.ask([question])
            if params.get("kvext_stored_tokens") != len(segment):
                raise BlendingError(
                    f"check-model: expected a segment of {len(segment)} tokens to be stored, found "
                    "no room for it. Give the connector more host_memory_gib, or the engine more "
                    "KV blocks."
                )
        if not (self.engine.keys_are_checked or self.engine.why_no_reuse):
            raise BlendingError(
                "check-model: expected the keys of stored segments to be compared, found that they "
                "were not: the store has failed. The log says why; serve without segments."
            )

    def _ask_in_place(self, prompts: GatePrompts) -> list[InPlace]:
        others = [
            GateQuestion(prompt.without(self._reused_runs(prompt, _AS_STORED), prompts.others))
            for prompt in prompts.in_place
        ]
        whole = [GateQuestion(prompt.token_ids) for prompt in prompts.in_place]
        alone = [self._whole([question])[0] for question in whole]
        beside = self._whole(whole)
        other = self._whole(others)
        found = self._reused(prompts.in_place, _AS_STORED)  # In place, segments have no head.
        differences = (_differences(alone, each) for each in (found, beside, other))
        return list(zip(*differences, strict=True))

    def _ask_moved(self, prompts: GatePrompts) -> list[Moved]:
        alone = self._whole([GateQuestion(prompt.token_ids) for prompt in prompts.moved])
        as_stored = self._reused(prompts.moved, _AS_STORED)
        repaired = self._reused(prompts.moved, self.heads)
        differences = (_differences(alone, each) for each in (as_stored, repaired))
        return list(zip(*differences, strict=True))

    def _whole(self, questions: Sequence[GateQuestion]) -> list[Answer]:
        """The answers without any reuse."""
        self.engine.forget_cached()
        return [answer for answer, _ in self.engine.ask(questions)]

    def _reused(self, prompts: Sequence[GatePrompt], heads: Heads) -> list[Answer]:
        """The answers with segments reused behind these heads."""
        self.engine.forget_cached()
        self.engine.compute_heads(heads)
        replies = self.engine.ask(
            [GateQuestion(each.token_ids, segments=each.segments) for each in prompts]
        )
        for prompt, (_, params) in zip(prompts, replies, strict=True):
            expected_tokens = sum(run.num_tokens for run in self._reused_runs(prompt, heads))
            found_tokens = params.get("kvext_reused_tokens", 0)
            if found_tokens != expected_tokens:
                raise BlendingError(
                    f"check-model: expected {expected_tokens} tokens of a prompt of "
                    f"{len(prompt.token_ids)} to be reused, found {found_tokens}. Give the engine "
                    "more KV blocks, and the connector more host_memory_gib. If a load has failed, "
                    "the log says why; serve without segments then."
                )
        return [answer for answer, _ in replies]

    def _reused_runs(self, prompt: GatePrompt, heads: Heads) -> list[TokenRange]:
        runs = [heads.reused(segment) for segment in prompt.segments]
        return [run for run in runs if run is not None]


class _Draw:
    """Draws random tokens."""

    def __init__(self, vocabulary_tokens: int) -> None:
        self._rng = random.Random(0)
        first_id = vocabulary_tokens // 4
        self._ids = range(first_id, first_id + max(1, vocabulary_tokens // 2))

    def tokens(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(self._ids, k=num_tokens))

    def segment(self, num_tokens: int) -> tuple[int, ...]:
        tokens = self.tokens(num_tokens - _REPEATED_TOKENS)
        return tokens + tokens[:_REPEATED_TOKENS]

    def in_place(self, sink: tuple[int, ...], segment: tuple[int, ...]) -> GatePrompt:
        token_ids = (*sink, *segment, *self.tokens(_OTHER_TOKENS), *self._copy(segment))
        return GatePrompt(token_ids, (TokenRange(len(sink), len(sink) + len(segment)),))

    def moved(self, sink: tuple[int, ...], segments: Sequence[tuple[int, ...]]) -> GatePrompt:
        token_ids = sink + self.tokens(_OTHER_TOKENS)
        places = []
        for segment in segments:
            places.append(TokenRange(len(token_ids), len(token_ids) + len(segment)))
            token_ids += segment
        return GatePrompt(token_ids + self._copy(self._rng.choice(segments)), tuple(places))

    def _copy(self, segment: tuple[int, ...]) -> tuple[int, ...]:
        """Consecutive tokens of a segment that were not repeated in it."""
        end = len(segment) - _REPEATED_TOKENS - _COPY_TOKENS
        first = self._rng.randrange(_REPEATED_TOKENS, end)
        return segment[first : first + _COPY_TOKENS]


def judge(in_place: Sequence[InPlace], moved: Sequence[Moved], dtype: str) -> str:
    """Judge a model by its answers to at least one prompt in place; see `ModelGate.check`.

    ``moved`` is given only for models with sliding windows, because published results disagree on
    whether recomputing heads helps such models. It is empty for other models.
    """
    reused = max(reused for reused, _, _ in in_place)
    noise = max(noise for _, noise, _ in in_place)
    other = min(other for _, _, other in in_place)
    limit = max(NOISE_FACTOR * noise, MIN_LIMITS.get(dtype, MIN_LIMITS["bfloat16"]))
    numbers = (
        f"log-probabilities differ by {reused:.2g} where segments are reused in place, by "
        f"{noise:.2g} between two runs without reuse, by {other:.2g} with other tokens there"
    )
    if not (math.isfinite(reused) and reused <= limit):  # The limit may be NaN, too.
        raise BlendingError(
            f"{numbers}: expected reuse in place to change them by at most {limit:.2g}. What is "
            "stored, loaded or computed between segments is not what the model computes. Serve it "
            "without segments, and report it."
        )
    if other <= limit:
        numbers += f": the limit is {limit:.2g}, which says nothing about what is reused in place"
    if not moved:
        return numbers
    as_stored, repaired = (mean(each) for each in zip(*moved, strict=True))
    numbers += f"; moved, by {as_stored:.2g} as stored and {repaired:.2g} repaired"
    gains = [before - after for before, after in moved]
    are_numbers = all(map(math.isfinite, gains))
    error = stdev(gains) / math.sqrt(len(gains)) if are_numbers and len(gains) > 1 else 0.0
    if not (are_numbers and mean(gains) >= -max(limit, SURE_ERRORS * error)):
        raise BlendingError(
            f"{numbers}: expected that computing the first tokens of segments brings answers "
            "nearer. It takes them further away in this model, which has sliding windows. Serve it "
            "without segments."
        )
    return numbers


def _differences(alone: Sequence[Answer], found: Sequence[Answer]) -> list[float]:
    return [difference(*each) for each in zip(alone, found, strict=True)]


def difference(wanted: Answer, found: Answer) -> float:
    """Mean absolute difference of log-probabilities, in nats, over the tokens of ``wanted``.

    A token that ``found`` lacks counts as if it had the lowest log-probability of ``found``. The
    result is infinite if an answer is empty or a difference is NaN or infinite.
    """
    if not wanted or not found:
        return math.inf
    last = min(found.values())
    pairs = [(value, found.get(token, last)) for token, value in wanted.items()]
    # Tokens that a model never answers have a log-probability of minus infinity.
    found_mean = mean(
        0.0 if one == other == -math.inf else abs(one - other) for one, other in pairs
    )
    return found_mean if math.isfinite(found_mean) else math.inf
