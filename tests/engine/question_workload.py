# SPDX-License-Identifier: Apache-2.0
"""Blend prompts as their questions have it, on the installed vLLM, and write what came of it.

    python question_workload.py REPORT MODEL CHECK_LAYER

``REPORT`` becomes JSON: answers of prompts by label, and facts. Three engines follow each other:
one without a connector, one that blends, and one that blends with asynchronous scheduling, whose
requests end while their question is looked at.
"""

from __future__ import annotations

import json
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

HEAD_TOKENS = 16
RATIO = 0.1
REPLY_TOKENS = 8
STEP_TOKENS = 256
SYSTEM_TOKENS = 37
STORED_LENGTHS = (137, 203, 90, 300)
MISSING_LENGTH = 71
MISSING = len(STORED_LENGTHS)
"""The document that is not stored."""
ORDERS = ((2, 0, 1), (1, 3, 0, 2), (3, 1), (0, MISSING, 2), (1, 0, 1))
"""Of documents; one stands in two places."""
QUESTION_TOKENS = (23, 40, 23, 1, 200)
"""Of each order. The last one is longer than half a step."""
SEPARATOR_TOKENS = (3, 0, 3, 3, 3)
CROWD = (0, 1, 2, 3, 4, 0, 2, 3)
MOST_STEPS = 400


class Prompts:
    """What is asked."""

    def __init__(self) -> None:
        rng = random.Random(3)

        def tokens(number: int) -> list[int]:
            return [rng.randrange(4, 512) for _ in range(number)]

        self.documents = [tokens(number) for number in (*STORED_LENGTHS, MISSING_LENGTH)]
        for document in self.documents:
            document[40:60] = document[5:25]  # Keys are compared before they are reused.
        system = tokens(SYSTEM_TOKENS)
        self.prompts: list[list[int]] = []
        self.segments: list[list[list[int]]] = []
        for order, num_question, num_between in zip(
            ORDERS, QUESTION_TOKENS, SEPARATOR_TOKENS, strict=True
        ):
            prompt, segments = list(system), []
            for place, number in enumerate(order):
                prompt += tokens(num_between if place else 0)
                segments.append([len(prompt), len(prompt) + len(self.documents[number])])
                prompt += self.documents[number]
            self.prompts.append(prompt + tokens(num_question))
            self.segments.append(segments)


class Engine:
    """An engine of a model."""

    def __init__(self, model: str, check_layer: int, is_blending: bool, is_async: bool) -> None:
        from vllm import LLM
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        options: dict[str, Any] = {}
        if is_blending:
            extra = {
                "host_memory_gib": 0.125,
                "chunk_tokens": 128,
                "store_policy": "never",
                "blending": True,
                "blend_head_tokens": HEAD_TOKENS,
                "blend_across_windows": True,
                "blend_selector": "question",
                "blend_check_layer": check_layer,
                "segment_sink": [7, 8, 9],
            }
            options["kv_transfer_config"] = {
                "kv_connector": "KvextConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            }
        self.llm = LLM(
            model,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            block_size=16,
            max_model_len=2048,
            max_num_seqs=10,
            max_num_batched_tokens=STEP_TOKENS,
            num_gpu_blocks_override=700,
            disable_hybrid_kv_cache_manager=False,
            distributed_executor_backend=UniProcExecutor,
            async_scheduling=is_async,
            **options,
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.scores: dict[str, dict[str, Any]] = {}
        if is_blending:
            self.side = self.scheduler.connector.scheduler_side
            self.requests = self.side._parts.blending.requests
            self.questions = self.requests._questions
            self._watch_scores()

    def ask(
        self, prompts: Sequence[list[int]], segments: Sequence[list[list[int]]] | None
    ) -> list[dict[str, Any]]:
        """Send all prompts at once."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=0,
                max_tokens=REPLY_TOKENS,
                ignore_eos=True,
                logprobs=5,
                detokenize=False,
                extra_args=None if segments is None else {"kvext_segments": segments[place]},
            )
            for place in range(len(prompts))
        ]
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        return [
            {
                "reply": list(output.outputs[0].token_ids),
                "logprobs": [
                    {token: entry.logprob for token, entry in step.items()}
                    for step in output.outputs[0].logprobs
                ],
                "params": output.kv_transfer_params,
                "hit_tokens": output.num_cached_tokens or 0,
                "probe": self.scores.get(self._key(prompts[place])),
            }
            for place, output in enumerate(outputs)
        ]

    def store(self, documents: Sequence[list[int]]) -> None:
        from vllm import SamplingParams

        for document in documents:
            extra_args = {"kvext_store_segment": True}
            params = SamplingParams(max_tokens=1, detokenize=False, extra_args=extra_args)
            self.llm.generate([{"prompt_token_ids": document}], params, use_tqdm=False)
            while self.side.has_transfers:
                self.llm.llm_engine.step()

    def ask_and(
        self,
        do: Callable[[], Any],
        name: str,
        prompt: list[int],
        segments: list[list[int]],
    ) -> list[Any]:
        """Send a prompt, and do something once its question has been computed.

        The scheduler has not been told yet: as with several steps in flight.
        """
        from vllm import SamplingParams

        update = self.scheduler.update_from_output
        done = []

        def update_once(*arguments: Any) -> Any:
            parked = self.side._holes._parked.values()
            if not done and any(each.probe and each.probe.row_id for each in parked):
                done.append(do())
            return update(*arguments)

        self.scheduler.update_from_output = update_once
        params = SamplingParams(
            max_tokens=4, detokenize=False, extra_args={"kvext_segments": segments}
        )
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
        self.run_out()
        del self.scheduler.update_from_output
        return done

    def run_out(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(MOST_STEPS):
            if not self.llm.llm_engine.has_unfinished_requests() and not self.side.has_work:
                self.llm.llm_engine.step()
                return
            self.llm.llm_engine.step()
        raise RuntimeError("something is left to do for ever")

    @contextmanager
    def ratio(self, ratio: float) -> Iterator[None]:
        """As an engine with another ``blend_ratio``."""
        options = self.questions._options
        self.questions._options = replace(options, ratio=ratio)
        yield
        self.questions._options = options

    @contextmanager
    def without_scores(self) -> Iterator[None]:
        """Workers see no question."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        probe = get_kv_transfer_group().worker_side._probe
        compare = probe._compare
        probe._compare = lambda queries: None
        yield
        probe._compare = compare

    def left(self) -> dict[str, int]:
        """What no request holds any more when there is none."""
        self.run_out()
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            "parked": len(self.side._holes),
            "probe blocks": len(self.side._holes.probe_blocks),
            "compared": len(self.questions._compared),
            "references": self.side.num_references,
            "pinned": self.side.num_pinned,
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        }

    def end(self) -> None:
        shutdown = getattr(self.core, "shutdown", None)
        if shutdown is not None:
            shutdown()

    @staticmethod
    def _key(prompt: Sequence[int]) -> str:
        return str(hash(tuple(prompt)))

    def _watch_scores(self) -> None:
        choose = self.requests.choose

        def watched(request_id: str, scores: Any) -> Any:
            scored = self.requests.scored(request_id)
            runs = choose(request_id, scores)
            prompt = self.scheduler.requests[request_id].prompt_token_ids
            self.scores[self._key(prompt)] = {
                "scored": [list(run) for run in scored],
                "scores": None if scores is None else scores.tolist(),
                "runs": [list(run) for run in runs],
            }
            return runs

        self.requests.choose = watched


def main(report_path: str, model: str, check_layer: str) -> None:
    asked = Prompts()
    report: dict[str, Any] = {"facts": {}, "answers": {}}
    answers, facts = report["answers"], report["facts"]

    engine = Engine(model, int(check_layer), is_blending=False, is_async=False)
    answers["cold"] = engine.ask(asked.prompts, None)
    engine.end()
    del engine

    engine = Engine(model, int(check_layer), is_blending=True, is_async=False)
    engine.store(asked.documents[:MISSING])
    with engine.ratio(1.0):
        answers["everything"] = engine.ask(asked.prompts, asked.segments)
    answers["solo"] = []
    for prompt, segments in zip(asked.prompts, asked.segments, strict=True):
        engine.llm.reset_prefix_cache()
        answers["solo"] += engine.ask([prompt], [segments])
    crowd = [asked.prompts[place] for place in CROWD], [asked.segments[place] for place in CROWD]
    answers["crowd"] = engine.ask(*crowd)
    with engine.without_scores():
        answers["no scores"] = engine.ask(asked.prompts, asked.segments)
    answers["plain"] = engine.ask(asked.prompts, None)
    facts["left"] = engine.left()
    facts["counters"] = engine.side.counters.totals()
    engine.end()
    del engine

    engine = Engine(model, int(check_layer), is_blending=True, is_async=True)
    engine.store(asked.documents[:MISSING])
    answers["async"] = engine.ask(*crowd)
    abort = partial(engine.llm.llm_engine.abort_request, ["aborted"])
    facts["aborted"] = engine.ask_and(abort, "aborted", asked.prompts[1], asked.segments[1])
    facts["left after abort"] = engine.left()
    reset = partial(engine.scheduler.reset_prefix_cache, reset_running_requests=True)
    facts["reset"] = engine.ask_and(reset, "reset", asked.prompts[1], asked.segments[1])
    facts["left after reset"] = engine.left()
    answers["async again"] = engine.ask(*crowd)
    facts["left at the end"] = engine.left()
    engine.end()
    Path(report_path).write_text(json.dumps(report))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception:
        traceback.print_exc()
        sys.exit(1)
