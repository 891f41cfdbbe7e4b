# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Plays a log on an engine: requests arrive when they arrived, and steps take time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from vllm_ascend_kvext.errors import TraceError
from vllm_ascend_kvext.replay.engine import Engine
from vllm_ascend_kvext.replay.pieces import ComputedPrefixes, RequestPieces
from vllm_ascend_kvext.replay.serving import BURST_TOKENS, DoesNotFitError, Outcome, Serving
from vllm_ascend_kvext.replay.trace import LoggedRequest


@dataclass(frozen=True, slots=True)
class Pace:
    """How long steps take, and how fast requests arrive.

    Attributes:
        decode_ms: The time of a step that computes one token of each answer.
        prefill_tokens_per_s: The tokens of prompts that the engine computes in a second.
        slow_down: A factor on the times between arrivals.
    """

    decode_ms: float = 30.0
    prefill_tokens_per_s: float = 20_000.0
    slow_down: float = 1.0


@dataclass(slots=True)
class Played:
    """The result of playing a log.

    Attributes:
        duration_s: The time from the first arrival to the last answer, by the pace.
        waited_s: For each request, in order of admission, the time from its arrival to its first
            step.
    """

    outcome: Outcome
    duration_s: float = 0.0
    waited_s: list[float] = field(default_factory=list)


class LoggedJob:
    """A request of a log on its way through an engine."""

    __slots__ = ("_output_tokens", "_pieces", "_prefixes", "num_prompt_tokens", "request")

    def __init__(
        self, logged: LoggedRequest, prefixes: ComputedPrefixes, hash_block_tokens: int
    ) -> None:
        pieces = RequestPieces(logged)
        hashes = pieces.block_hashes(hash_block_tokens)

        def next_hashes(request: Request) -> list[bytes]:
            return hashes[len(request.block_hashes) : request.num_tokens // hash_block_tokens]

        tokens = pieces.tokens()
        self._pieces = pieces
        self._prefixes = prefixes
        self._output_tokens = tokens[logged.prompt_tokens :]
        self.num_prompt_tokens = logged.prompt_tokens
        self.request = Request(
            request_id=f"line-{logged.line}",
            prompt_token_ids=tokens[: logged.prompt_tokens],
            sampling_params=SamplingParams(max_tokens=logged.output_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=next_hashes,
        )

    def next_outputs(self, limit_tokens: int) -> list[int]:
        request = self.request
        if request.num_computed_tokens < request.num_tokens:
            return []
        done = request.num_output_tokens
        # The last token is sampled alone, because it is not computed.
        num_tokens = max(1, min(limit_tokens, len(self._output_tokens) - done - 1))
        return self._output_tokens[done : done + num_tokens]

    def shared_tokens(self) -> int:
        return self._prefixes.longest(self._pieces)

    def note_computed(self, start_tokens: int, end_tokens: int) -> None:
        self._prefixes.note(self._pieces, start_tokens, end_tokens)


def play(
    requests: Iterable[LoggedRequest],
    engine: Engine,
    hash_block_tokens: int,
    pace: Pace,
    on_progress: Callable[[int], object] = lambda _: None,
) -> Played:
    """Play a log to its end.

    Args:
        requests: The requests in the order of their arrivals.
        hash_block_tokens: The tokens of a block hash of the engine.
        on_progress: Called after each step that ends requests, with the number of ended requests.

    Raises:
        TraceError: A request does not fit into the pool.
    """
    serving = Serving(engine, hash_block_tokens)
    prefixes = ComputedPrefixes()
    played = Played(serving.outcome)
    arrived_ms: dict[str, float] = {}
    coming = iter(requests)
    following = next(coming, None)
    first_ms = 0.0 if following is None else following.arrival_ms
    now_ms = 0.0
    num_ended = 0
    computes_prompts = False

    def next_arrival_ms() -> float:
        assert following is not None
        return (following.arrival_ms - first_ms) * pace.slow_down

    while following is not None or serving.has_requests:
        if following is not None and not serving.has_requests:
            now_ms = max(now_ms, next_arrival_ms())
        while following is not None and next_arrival_ms() <= now_ms:
            job = LoggedJob(following, prefixes, hash_block_tokens)
            arrived_ms[job.request.request_id] = next_arrival_ms()
            serving.add(job)
            following = next(coming, None)
        burst_tokens = 1 if computes_prompts else BURST_TOKENS
        if following is not None:
            # A burst ends where the next request arrives.
            missing_steps = (next_arrival_ms() - now_ms) / pace.decode_ms
            burst_tokens = max(1, min(burst_tokens, round(missing_steps)))
        engine.clock.now_s = now_ms / 1e3
        try:
            step = serving.run_step(burst_tokens)
        except DoesNotFitError:
            raise _does_not_fit(arrived_ms) from None
        # A step that computes prompts computes one token of each answer, however long it takes.
        computes_prompts = step.prompt_tokens > 0
        played.waited_s += [(now_ms - arrived_ms[each]) / 1e3 for each in step.begun]
        prefill_ms = 1e3 * step.prompt_tokens / pace.prefill_tokens_per_s
        now_ms += max(prefill_ms, step.decoded_tokens * pace.decode_ms)
        if not step.prompt_tokens and not step.decoded_tokens:
            now_ms += pace.decode_ms  # The step waits for a transfer.
        if step.ended:
            for request_id in step.ended:
                del arrived_ms[request_id]
            num_ended += len(step.ended)
            on_progress(num_ended)
    serving.settle()
    played.duration_s = now_ms / 1e3
    return played


def _does_not_fit(request_ids: Iterable[str]) -> TraceError:
    first = next(iter(request_ids)).removeprefix("line-")
    return TraceError(
        f"line {first}: expected a pool that holds the request with its answer, found too few "
        "blocks. Give more --blocks, or leave such requests out of the log."
    )
