# SPDX-License-Identifier: Apache-2.0
"""The engine of one mode, in this process: stores the documents, and then asks every prompt.

Started by `run.py`. The engine's loop is here instead of in `LLM.generate`, so that the time to the
first token and what was computed until then are known.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Instead of this folder, whose modules are not to be found by their short names.
sys.path[0] = str(Path(__file__).parents[1])

from blending.answers import Answer, Answers, Reply  # noqa: E402
from blending.modes import FULL, MODES, Mode  # noqa: E402
from blending.prompts import FolderTokenizer, Prompt, Workload  # noqa: E402
from blending.sink_text import TEXT  # noqa: E402

ANSWER_TOKENS = 8
TOP_TOKENS = 50
TOP_TOKENS_OF_REPLY = 5
MOST_STORES = 256
MAX_MODEL_TOKENS = 4096
FORCED = "bench_forced_tokens"
WARM_UP = tuple(range(10, 100))
"""No prompt begins like this."""

ENVIRON = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class Engine:
    """vLLM with one mode.

    Args:
        mode: How it serves.
        model: Folder.
        host_gib: Host memory of the connector.
        options: For vLLM, beyond those of the benchmark.
    """

    def __init__(self, mode: Mode, model: str, host_gib: float, **options: Any) -> None:
        from vllm import LLM

        sink_ids = _text_sink(Path(model)) if mode.has_text_sink else None
        connector = mode.kv_transfer_config(host_gib, sink_ids)
        if connector is not None:
            options["kv_transfer_config"] = connector
        settings = {
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": MAX_MODEL_TOKENS,
            # All tokens that one prompt has, in one step.
            "max_num_batched_tokens": MAX_MODEL_TOKENS,
            "max_num_seqs": 64,
            "max_logprobs": TOP_TOKENS,
            "enable_prefix_caching": mode.prefix_caching,
            "disable_hybrid_kv_cache_manager": False,
            "async_scheduling": False,
            "logits_processors": [_forcing()],
            "seed": 0,
        }
        self._llm = LLM(model, **(settings | options))
        self._engine = self._llm.llm_engine
        self.scheduler = self._engine.engine_core.engine_core.scheduler
        self._count_tokens()
        self._num_requests = 0

    def _count_tokens(self) -> None:
        schedule = self.scheduler.schedule

        def counted() -> Any:
            output = schedule()
            self._computed_tokens += output.total_num_scheduled_tokens
            return output

        self._computed_tokens = 0
        self.scheduler.schedule = counted

    def store(self, segment: Sequence[int]) -> float:
        """Seconds until a segment is computed alone and stored."""
        began_s = time.perf_counter()
        self._serve(segment, 1, {"kvext_store_segment": True})
        self._settle()
        return time.perf_counter() - began_s

    def ask(
        self, prompt: Prompt, num_tokens: int = ANSWER_TOKENS, top_tokens: int | None = TOP_TOKENS
    ) -> Answer:
        """A prompt that the engine has not seen."""
        return self._serve(prompt.tokens, num_tokens, _segments(prompt), top_tokens)

    def ask_again(self, prompt: Prompt, said: Sequence[int]) -> list[dict[int, float]]:
        """The most probable tokens in place of each one said."""
        extra = {**_segments(prompt), FORCED: list(said)}
        return self._serve(prompt.tokens, len(said), extra, TOP_TOKENS).top

    def store_all(self, segments: Sequence[Sequence[int]]) -> None:
        """Compute segments alone, many at a time, and store them.

        Not all at once: where stores fall behind, the connector refuses what would hold too many
        blocks, and answers all the same.

        Raises:
            RuntimeError: Some were not stored.
        """
        for first in range(0, len(segments), MOST_STORES):
            some = segments[first : first + MOST_STORES]
            self._generate(some, [{"kvext_store_segment": True}] * len(some))
            self._settle()
        counters = self.scheduler.connector.scheduler_side.counters.blending
        if any(counters.refusals.values()):
            raise RuntimeError(
                f"segments: expected {len(segments)} stored ones, found refusals "
                f"{counters.refusals}; give the engine more blocks, or more host memory"
            )

    def ask_all(self, prompts: Sequence[Prompt]) -> tuple[list[Reply], int]:
        """Prompts that the engine has not seen, many at a time.

        Returns:
            The first token that follows each prompt, and the tokens computed for all of them.
        """
        self._computed_tokens = 0
        outputs = self._generate(
            [prompt.tokens for prompt in prompts], [_segments(prompt) for prompt in prompts]
        )
        self._settle()
        return [_reply(output) for output in outputs], self._computed_tokens

    def close(self) -> None:
        """End it: another engine may begin in this process."""
        self._engine.engine_core.shutdown()

    def _generate(
        self, prompts: Sequence[Sequence[int]], extra_args: Sequence[dict[str, Any]]
    ) -> list[Any]:
        """One token behind each prompt."""
        from vllm import SamplingParams

        sampling = [
            SamplingParams(
                temperature=0,
                max_tokens=1,
                detokenize=False,
                logprobs=TOP_TOKENS_OF_REPLY,
                extra_args=extra,
            )
            for extra in extra_args
        ]
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return list(self._llm.generate(requests, sampling, use_tqdm=False))

    def _serve(
        self,
        tokens: Sequence[int],
        num_tokens: int,
        extra: dict[str, Any],
        top_tokens: int | None = None,
    ) -> Answer:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=top_tokens,
            extra_args=extra or None,
        )
        self._num_requests += 1
        self._computed_tokens = 0
        first_token_s, first_tokens = 0.0, 0
        began_s = time.perf_counter()
        request = {"prompt_token_ids": list(tokens)}
        self._engine.add_request(f"request-{self._num_requests}", request, sampling)
        while True:
            for output in self._engine.step():
                if not first_tokens and output.outputs[0].token_ids:
                    first_token_s = time.perf_counter() - began_s
                    first_tokens = self._computed_tokens
                if output.finished:
                    self._settle()
                    return _answer(output, first_token_s, first_tokens)

    def _settle(self) -> None:
        """Until what follows an answer, such as a store, is done."""
        while self.scheduler.has_requests():
            self._engine.step()


def _text_sink(model: Path) -> list[int]:
    first_id = json.loads((model / "config.json").read_text())["bos_token_id"]
    return [first_id, *FolderTokenizer(model).encode(TEXT)]


def _segments(prompt: Prompt) -> dict[str, Any]:
    return {"kvext_segments": [list(each) for each in prompt.segments]}


def _answer(output: Any, first_token_s: float, computed_tokens: int) -> Answer:
    (said,) = output.outputs
    marks = output.kv_transfer_params or {}
    return Answer(
        tokens=list(said.token_ids),
        top=[{token: each.logprob for token, each in top.items()} for top in said.logprobs or ()],
        first_token_s=first_token_s,
        computed_tokens=computed_tokens,
        exact_tokens=marks.get("kvext_exact_tokens"),
        reused_tokens=marks.get("kvext_reused_tokens"),
        recomputed_tokens=marks.get("kvext_recomputed_tokens"),
    )


def _reply(output: Any) -> Reply:
    (said,) = output.outputs
    (token,) = said.token_ids
    marks = output.kv_transfer_params or {}
    top = [(each, found.logprob) for each, found in said.logprobs[0].items()]
    return Reply(token, top, marks.get("kvext_reused_tokens", 0))


def _forcing() -> type:
    """A logits processor: the next token is the one that the request wants.

    Log-probabilities that vLLM returns are those before it.
    """
    import math

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


def serve(engine: Engine, mode: Mode, workload: Workload, reference: Answers | None) -> Answers:
    """Everything that a mode is asked.

    Args:
        engine: Of the mode.
        mode: How it serves.
        workload: Documents and prompts.
        reference: What full recompute answered; None: this is it.
    """
    found = Answers(mode.name)
    if mode.blends:
        found.store_s = [engine.store(segment) for segment in workload.stored]
    began_s = time.monotonic()
    for number, prompt in enumerate(workload.prompts):
        answer = engine.ask(prompt)
        if reference is not None:
            said = reference.answers[number].tokens
            answer = Answer(**{**_fields(answer), "top": engine.ask_again(prompt, said)})
        found.answers.append(answer)
        print(
            f"{mode.name}: {number + 1} of {len(workload.prompts)} prompts, "
            f"{time.monotonic() - began_s:.0f} s",
            flush=True,
        )
    return found


def _fields(answer: Answer) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in Answer.__slots__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--reference", type=Path, help="answers of full recompute")
    parser.add_argument("--host-gib", type=float, default=2)
    parser.add_argument("--max-model-tokens", type=int, default=MAX_MODEL_TOKENS)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    mode = MODES[arguments.mode]
    if (mode == FULL) is not (arguments.reference is None):
        parser.error(f"--reference: expected for every mode but {FULL.name!r}, and for these only")
    workload = Workload.read(arguments.workload)
    reference = Answers.read(arguments.reference) if arguments.reference else None
    engine = Engine(
        mode, arguments.model, arguments.host_gib, max_model_len=arguments.max_model_tokens
    )
    # Memory is used for the first time.
    engine.ask(Prompt(WARM_UP, (), workload.prompts[0].kind, 0, ""))
    serve(engine, mode, workload, reference).write(arguments.out)


if __name__ == "__main__":
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRON.items()})
    main()
