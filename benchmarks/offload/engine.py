# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The engine of one contender, alone in its process, and its requests."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.cpu_engine import CpuEngine
from common.models import MAX_MODEL_TOKENS, VOCABULARY_TOKENS

from offload.contenders import Contender
from offload.taps import TAPS, Tap
from offload.workload import (
    COMPUTED_TOKENS,
    DECODER_OUTPUT_TOKENS,
    DECODER_PROMPT_TOKENS,
    NUM_DECODERS,
    OFFLOADED_TOKENS,
    PROMPT_TOKENS,
    STEP_TOKENS,
    STEPS_BETWEEN_VISITS,
    Prompt,
    Step,
    Visit,
)

SETTLE_LIMIT_S = 20
MAX_RESETS = 5


class Engine(CpuEngine):
    """vLLM in this process, and a tap on its transfers."""

    def __init__(
        self, model: str, num_blocks: int, contender: Contender, options: Mapping[str, Any]
    ) -> None:
        self.tap: Tap = TAPS[contender.tap]()
        self.tap.install()
        settings = {
            "dtype": "bfloat16",
            "max_model_len": MAX_MODEL_TOKENS,
            "max_num_batched_tokens": STEP_TOKENS,
            "max_num_seqs": NUM_DECODERS + 1,
            "num_gpu_blocks_override": num_blocks,
        }
        super().__init__(model, contender.kv_transfer_config, **(settings | dict(options)))

    def settle(self) -> None:
        """Run empty steps until no transfer is under way and no block is held.

        Raises:
            TimeoutError: A transfer is still under way, or a block is still held.
        """
        self._wait()
        # Ended transfers are reported in a step.
        self.ask([1, 2, 3])
        self._wait()

    def _wait(self) -> None:
        limit_s = time.monotonic() + SETTLE_LIMIT_S
        while self.scheduler.has_requests() or not self.tap.is_idle():
            if time.monotonic() > limit_s:
                raise TimeoutError(f"transfers have not ended in {SETTLE_LIMIT_S} s")
            self.step()

    def forget_local(self) -> None:
        """Empty the prefix cache on the device.

        Raises:
            RuntimeError: A block is still in use.
        """
        for _ in range(MAX_RESETS):
            self.settle()
            if self.llm.reset_prefix_cache():
                return
        raise RuntimeError("blocks are in use; the prefix cache cannot be emptied")


def start(
    contender: Contender, model: str, num_blocks: int, log: Path, options: Mapping[str, Any]
) -> None:
    """Start the engine of this process. Its log is written to a file.

    Args:
        options: Arguments of ``LLM``, on top of those of all engines.
    """
    global _engine
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # vLLM inspects models in a process that imports from this folder, so it is not the checkout.
    os.chdir(model)
    _engine = Engine(model, num_blocks, contender, options)
    _engine.ask(random_tokens("warm-up", 1000))


def random_tokens(seed: int | str, num_tokens: int) -> list[int]:
    # The seed is a text, because Random uses only the absolute value of a number.
    return random.Random(str(seed)).choices(range(VOCABULARY_TOKENS), k=num_tokens)


def cold_and_warm(seed: int, offloaded_tokens: int = OFFLOADED_TOKENS) -> Prompt:
    """Ask a prompt that is not cached, and again when only the host tier has it.

    Args:
        offloaded_tokens: The tokens that the second request can hit.
    """
    engine = _engine
    tap = _engine.tap
    tokens = random_tokens(seed, offloaded_tokens + COMPUTED_TOKENS)
    engine.forget_local()
    tap.take()
    cold = engine.ask(tokens)
    engine.forget_local()
    stored = tap.take()
    warm = engine.ask(tokens)
    engine.settle()
    return Prompt(
        cold_s=cold.first_token_s,
        warm_s=warm.first_token_s,
        cold_hit_tokens=cold.hit_tokens,
        warm_hit_tokens=warm.hit_tokens,
        store=stored["store"],
        load=tap.take()["load"],
        offloaded_tokens=offloaded_tokens,
    )


def visited(seeds: Sequence[int]) -> list[Visit]:
    """Ask one long prompt after the other for a token, while other requests decode."""
    engine = _engine
    engine.settle()
    decoders = [
        engine.add(random_tokens(f"decoder {number}", DECODER_PROMPT_TOKENS), DECODER_OUTPUT_TOKENS)
        for number in range(NUM_DECODERS)
    ]
    for _ in range(4 + NUM_DECODERS):  # After these steps all of them decode.
        engine.step()
    found = [_visit(engine, decoders, seed) for seed in seeds]
    engine.abort(decoders)
    engine.settle()
    return found


def _visit(engine: Engine, decoders: Sequence[str], seed: int) -> Visit:
    """Ask one long prompt.

    Raises:
        RuntimeError: The decoding requests have ended.
    """
    engine.tap.take()
    steps: list[Step] = []
    answer: Any = None
    num_left = STEPS_BETWEEN_VISITS
    last_s = time.perf_counter()
    last_cpu_s = time.thread_time()
    visitor = engine.add(random_tokens(seed, PROMPT_TOKENS))
    while num_left:
        outputs = {output.request_id: output for output in engine.step()}
        if any(outputs[name].finished for name in decoders if name in outputs):
            raise RuntimeError("the decoding requests have ended; make fewer visits in one round")
        if not outputs.keys().isdisjoint(decoders):
            ended_s = time.perf_counter()
            ended_cpu_s = time.thread_time()
            steps.append(
                Step(
                    seconds=ended_s - last_s,
                    cpu_seconds=ended_cpu_s - last_cpu_s,
                    has_prefill=engine.step_tokens > NUM_DECODERS,
                    has_transfer=engine.tap.was_busy(last_s, ended_s),
                )
            )
            last_s = ended_s
            last_cpu_s = ended_cpu_s
            num_left -= answer is not None
        answer = outputs.get(visitor, answer)
    moved = engine.tap.take()
    hit_tokens = answer.num_cached_tokens or 0
    return Visit(hit_tokens, steps, moved["store"].transfers, moved["load"].transfers)
