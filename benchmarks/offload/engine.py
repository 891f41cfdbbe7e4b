# SPDX-License-Identifier: Apache-2.0
"""One engine in this process: it reads a command per line, and writes a JSON object per command.

Started by `processes.py`. The engine's loop is here instead of in vLLM's server, so that every
step's time is known; like the server's, it waits a millisecond where a step computes nothing.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Instead of this folder, whose modules are not to be found by their short names.
sys.path[0] = str(Path(__file__).parents[1])

from offload.models import MAX_MODEL_TOKENS, VOCABULARY_TOKENS  # noqa: E402
from offload.taps import TAPS, TransferTap  # noqa: E402
from offload.workload import (  # noqa: E402
    DECODER_OUTPUT_TOKENS,
    DECODER_PROMPT_TOKENS,
    NUM_DECODERS,
    PROMPT_TOKENS,
    STEP_TOKENS,
    STEPS_BETWEEN_VISITS,
    Prompt,
    Step,
    Visit,
)

if TYPE_CHECKING:
    from vllm import RequestOutput

_POLL_S = 0.001
_SETTLE_LIMIT_S = 20
_MOST_RESETS = 5


@dataclass(frozen=True, slots=True)
class Answer:
    """A request's first token.

    Attributes:
        first_token_s: Since it was added.
        hit_tokens: Of its prompt, that were not computed.
    """

    first_token_s: float
    hit_tokens: int


class Engine:
    """vLLM in this process.

    Args:
        model: Folder.
        num_blocks: Of the KV cache.
        kv_transfer_config: For vLLM; None for no connector.
        tap: Installed.
    """

    def __init__(
        self,
        model: str,
        num_blocks: int,
        kv_transfer_config: dict[str, Any] | None,
        tap: TransferTap,
    ) -> None:
        from vllm import LLM, SamplingParams

        options = {"kv_transfer_config": kv_transfer_config} if kv_transfer_config else {}
        self._llm = LLM(
            model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=MAX_MODEL_TOKENS,
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=NUM_DECODERS + 1,
            num_gpu_blocks_override=num_blocks,
            enable_prefix_caching=True,
            disable_hybrid_kv_cache_manager=False,
            # A step's tokens and its time then belong together.
            async_scheduling=False,
            seed=0,
            **options,
        )
        self._sampling = lambda num_tokens: SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        self._engine = self._llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._tap = tap
        self._count_tokens()
        self._num_requests = 0

    def _count_tokens(self) -> None:
        """Note the tokens of every step."""
        schedule = self._scheduler.schedule

        def counted() -> Any:
            output = schedule()
            self._step_tokens = output.total_num_scheduled_tokens
            return output

        self._step_tokens = 0
        self._scheduler.schedule = counted

    @property
    def block_tokens(self) -> int:
        return self._engine.vllm_config.cache_config.block_size

    def add(self, tokens: Sequence[int], num_output_tokens: int) -> str:
        self._num_requests += 1
        request_id = f"request-{self._num_requests}"
        prompt = {"prompt_token_ids": list(tokens)}
        self._engine.add_request(request_id, prompt, self._sampling(num_output_tokens))
        return request_id

    def abort(self, request_ids: Sequence[str]) -> None:
        self._engine.abort_request(list(request_ids))

    def step(self) -> list[RequestOutput]:
        """Outputs of one step."""
        self._step_tokens = 0
        outputs = self._engine.step()
        if not self._step_tokens:
            time.sleep(_POLL_S)
        return outputs

    @property
    def step_tokens(self) -> int:
        """Computed by the last step."""
        return self._step_tokens

    def ask(self, tokens: Sequence[int]) -> Answer:
        """One request alone."""
        started_s = time.perf_counter()
        request_id = self.add(tokens, 1)
        while True:
            for output in self.step():
                if output.request_id == request_id and output.finished:
                    taken_s = time.perf_counter() - started_s
                    return Answer(taken_s, output.num_cached_tokens or 0)

    def settle(self) -> None:
        """Run empty steps until no transfer is on its way and no block is held.

        Raises:
            TimeoutError: Something is.
        """
        self._wait()
        # What has ended is reported in a step.
        self.ask([1, 2, 3])
        self._wait()

    def _wait(self) -> None:
        limit_s = time.monotonic() + _SETTLE_LIMIT_S
        while self._scheduler.has_requests() or not self._tap.is_idle():
            if time.monotonic() > limit_s:
                raise TimeoutError(f"transfers have not ended in {_SETTLE_LIMIT_S} s")
            self.step()

    def forget_local(self) -> None:
        """Empty the prefix cache on the device.

        Raises:
            RuntimeError: Some block is still in use.
        """
        for _ in range(_MOST_RESETS):
            self.settle()
            if self._llm.reset_prefix_cache():
                return
        raise RuntimeError("blocks are in use; the prefix cache cannot be emptied")


def random_tokens(seed: int | str, num_tokens: int) -> list[int]:
    # As a text: of a number, only the absolute value counts.
    return random.Random(str(seed)).choices(range(VOCABULARY_TOKENS), k=num_tokens)


def cold_and_warm(engine: Engine, tap: TransferTap, seed: int) -> dict[str, Any]:
    """A prompt that nothing knows, and again when only the host tier does."""
    tokens = random_tokens(seed, PROMPT_TOKENS)
    engine.forget_local()
    tap.take()
    cold = engine.ask(tokens)
    engine.forget_local()
    stored = tap.take()
    warm = engine.ask(tokens)
    engine.settle()
    loaded = tap.take()
    return asdict(
        Prompt(
            cold_s=cold.first_token_s,
            warm_s=warm.first_token_s,
            cold_hit_tokens=cold.hit_tokens,
            warm_hit_tokens=warm.hit_tokens,
            store=stored["store"],
            load=loaded["load"],
        )
    )


def visited(engine: Engine, tap: TransferTap, seeds: Sequence[int]) -> dict[str, Any]:
    """Other requests decode while one long prompt after the other comes by for a token."""
    engine.settle()
    decoders = [
        engine.add(random_tokens(f"decoder {number}", DECODER_PROMPT_TOKENS), DECODER_OUTPUT_TOKENS)
        for number in range(NUM_DECODERS)
    ]
    for _ in range(4 + NUM_DECODERS):  # All of them have begun.
        engine.step()
    visits = [asdict(visit(engine, tap, decoders, seed)) for seed in seeds]
    engine.abort(decoders)
    engine.settle()
    return {"visits": visits}


def visit(engine: Engine, tap: TransferTap, decoders: Sequence[str], seed: int) -> Visit:
    """One of them.

    Raises:
        RuntimeError: The decoding requests have ended.
    """
    tap.take()
    steps: list[Step] = []
    answer: RequestOutput | None = None
    num_left = STEPS_BETWEEN_VISITS
    last_s, last_cpu_s = time.perf_counter(), time.thread_time()
    visitor = engine.add(random_tokens(seed, PROMPT_TOKENS), 1)
    while num_left:
        outputs = {output.request_id: output for output in engine.step()}
        if any(outputs[name].finished for name in decoders if name in outputs):
            raise RuntimeError("the decoding requests have ended; make fewer visits in one round")
        if not outputs.keys().isdisjoint(decoders):
            ended_s, ended_cpu_s = time.perf_counter(), time.thread_time()
            steps.append(
                Step(
                    seconds=ended_s - last_s,
                    cpu_seconds=ended_cpu_s - last_cpu_s,
                    has_prefill=engine.step_tokens > NUM_DECODERS,
                    has_transfer=tap.was_busy(last_s, ended_s),
                )
            )
            last_s, last_cpu_s = ended_s, ended_cpu_s
            num_left -= answer is not None
        answer = outputs.get(visitor, answer)
    moved = tap.take()
    return Visit(
        hit_tokens=answer.num_cached_tokens or 0,
        steps=steps,
        stores=moved["store"].transfers,
        loads=moved["load"].transfers,
    )


def main() -> None:
    # vLLM prints to the standard output; only answers may go to the pipe.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    settings = json.loads(sys.stdin.readline())
    tap = TAPS[settings.pop("tap")]()
    tap.install()
    engine = Engine(tap=tap, **settings)
    engine.ask(random_tokens("warm-up", 1000))
    answers.write(json.dumps({"block_tokens": engine.block_tokens}) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        if "prompt" in command:
            answer = cold_and_warm(engine, tap, command["prompt"])
        else:
            answer = visited(engine, tap, command["visits"])
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
