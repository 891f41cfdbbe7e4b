# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Runs one mode on the real engine: stores the documents, and then asks every prompt."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.cpu_engine import Asked, CpuEngine

from blending.modes import Mode
from blending.prompts import FolderTokenizer, Prompt, Workload
from blending.sink_text import TEXT

ANSWER_TOKENS = 8
TOP_TOKENS = 50
MAX_MODEL_TOKENS = 4096
HOST_GIB = 2
FORCED = "bench_forced_tokens"
STORE = {"kvext_store_segment": True}
WARM_UP = tuple(range(10, 100))
"""Tokens with which no prompt begins."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one prompt.

    Attributes:
        top: For each token of the reference's answer, the most probable tokens and their
            log-probabilities after the reference's tokens before it.
        reused_tokens: The reused tokens that the response reports; None if it reports none.
    """

    tokens: list[int]
    top: list[dict[int, float]]
    first_token_s: float
    computed_tokens: int
    reused_tokens: int | None = None


@dataclass(slots=True)
class Answers:
    """The answers of one mode.

    Attributes:
        store_s: The seconds for each stored document, including its stores behind contexts.
    """

    store_s: list[float] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)


def ask(engine: CpuEngine, prompt: Prompt, num_tokens: int = ANSWER_TOKENS, **extra: Any) -> Answer:
    """Ask one prompt. ``extra`` are further arguments of the request."""
    asked = engine.ask(
        prompt.tokens,
        num_tokens,
        logprobs=TOP_TOKENS,
        extra_args={"kvext_segments": [list(each) for each in prompt.segments], **extra},
    )
    engine.settle()
    return _answer(asked)


def store(engine: CpuEngine, segment: Sequence[int]) -> float:
    """Store a segment that is computed alone. Returns the seconds."""
    began_s = time.perf_counter()
    engine.ask(segment, extra_args=STORE)
    engine.settle()
    return time.perf_counter() - began_s


def finish_learning(engine: CpuEngine) -> None:
    """Wait until the engine has stored what it stores by itself while it is not busy."""
    from vllm_ascend_kvext.segments.scheduler.segments_side import segments_of

    segments = segments_of(engine.scheduler.connector.scheduler_side)
    learning = None if segments is None else segments.learning
    while learning is not None and (learning.has_queue or learning.request_ids):
        engine.ask(WARM_UP, num_output_tokens=4)  # This request waits during the first step.
        engine.settle()


def _answer(asked: Asked) -> Answer:
    (said,) = asked.output.outputs
    return Answer(
        tokens=list(said.token_ids),
        top=[{token: each.logprob for token, each in top.items()} for top in said.logprobs],
        first_token_s=asked.first_token_s,
        computed_tokens=asked.computed_tokens,
        reused_tokens=(asked.output.kv_transfer_params or {}).get("kvext_reused_tokens"),
    )


def serve(
    mode: Mode,
    model: str,
    workload: Workload,
    reference: Answers | None,
    max_model_tokens: int = MAX_MODEL_TOKENS,
) -> Answers:
    """Ask everything in one mode. The function runs in its own process.

    Args:
        reference: The answers of full recompute; None if this mode is full recompute.
        max_model_tokens: The length of the longest prompt with its answer.
    """
    from tqdm import tqdm

    engine = CpuEngine(
        model,
        mode.kv_transfer_config(HOST_GIB, _text_sink(Path(model)) if mode.has_text_sink else None),
        dtype="float32",
        max_model_len=max_model_tokens,
        # One step computes a whole prompt.
        max_num_batched_tokens=max_model_tokens,
        max_num_seqs=64,
        max_logprobs=TOP_TOKENS,
        enable_prefix_caching=mode.prefix_caching,
        logits_processors=[_forcing()],
    )
    # The first use of memory is not measured.
    engine.ask(WARM_UP)
    found = Answers()
    if mode.blends:
        found.store_s = [store(engine, segment) for segment in workload.stored]
        finish_learning(engine)
    for number, prompt in enumerate(tqdm(workload.prompts, mode.name, unit=" prompts")):
        answer = ask(engine, prompt)
        if reference is not None:
            said = reference.answers[number].tokens
            again = ask(engine, prompt, len(said), **{FORCED: list(said)})
            answer = replace(answer, top=again.top)
        found.answers.append(answer)
        if mode.blends:
            finish_learning(engine)
    engine.close()
    return found


def _text_sink(model: Path) -> list[int]:
    first_id = json.loads((model / "config.json").read_text())["bos_token_id"]
    return [first_id, *FolderTokenizer(model).encode(TEXT)]


def _forcing() -> type:
    """A logits processor that makes each next token the token that the request wants.

    vLLM returns the log-probabilities from before the processor.
    """
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class ForcedTokens(AdapterLogitsProcessor):  # type: ignore[misc]
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            forced = (params.extra_args or {}).get(FORCED)
            if forced is None:
                return None

            def process(said: list[int], logits: Any) -> Any:
                kept = logits[forced[len(said)]].clone()
                logits.fill_(-math.inf)
                logits[forced[len(said)]] = kept
                return logits

            return process

    return ForcedTokens
