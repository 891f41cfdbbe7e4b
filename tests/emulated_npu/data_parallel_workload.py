# SPDX-License-Identifier: Apache-2.0
"""Serves prompts on data-parallel ranks, each an engine in a process of its own.

    python data_parallel_workload.py REPORT PLANS

``PLANS`` is as of ``connector_workload.py``. A scenario deals its prompts out to the ranks in
turns. With one rank, that gets all of them.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import connector_workload
from connector_workload import CHUNK_TOKENS, REPLY_TOKENS, Tokens, random_tokens

BLOCK_TOKENS = 128
MOST_REQUESTS = 4
"""Of a rank at the same time."""


class Asked(NamedTuple):
    """A prompt, and where to send it.

    Attributes:
        rank: Modulo the number of ranks.
        is_late: Whether it waits until another rank runs as many requests as it can.
    """

    prompt: Tokens
    rank: int
    reply_tokens: int
    is_late: bool = False


class Ranks:
    """Several engines behind one client, in the words of ``connector_workload.Engine``."""

    def __init__(self, model: str, engine_args: dict[str, Any]) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        common = {
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK_TOKENS,
            "max_model_len": 2048,
            "max_num_seqs": MOST_REQUESTS,
            "max_num_batched_tokens": 512,
            "distributed_executor_backend": "uni",
            "worker_extension_cls": "data_parallel_rank.WorkerExtension",
        }
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        config = AsyncEngineArgs(model, **common | engine_args).create_engine_config()
        # After vLLM-Ascend has patched vLLM. Processes that are forked have it from here; those
        # that are spawned, from the worker extension.
        importlib.import_module("data_parallel_rank")
        self._llm = AsyncLLM.from_vllm_config(config)
        self._client: Any = self._llm.engine_core
        self.num_ranks = len(self._client.core_engines)
        self.has_connector = "kv_transfer_config" in engine_args
        self._asked: dict[str, Any] = {}
        self._num_requests = 0

    def ask(
        self, label: str, prompts: Sequence[Tokens], reply_tokens: int = REPLY_TOKENS
    ) -> list[Tokens]:
        """Send all prompts at once, in turns to the ranks; see ``connector_workload.Engine``."""
        asked = [Asked(prompt, rank, reply_tokens) for rank, prompt in enumerate(prompts)]
        return self.ask_ranks(label, asked)

    def ask_ranks(self, label: str, asked: Sequence[Asked]) -> list[Tokens]:
        """Send each prompt to its rank, modulo their number; report the answers under ``label``."""

        async def answers() -> list[dict[str, Any]]:
            return await asyncio.gather(*map(self._answer, asked))

        self._steer("take_counted")
        found = self._loop.run_until_complete(answers())
        self._asked[label] = {
            "answers": found,
            "ranks": [each.rank % self.num_ranks for each in asked],
            "counted": self._steer("take_counted"),
        }
        return [answer["reply"] for answer in found]

    async def _answer(self, asked: Asked) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if asked.is_late and self.num_ranks > 1:
            while not any(await self._call_all("is_full")):
                await asyncio.sleep(0.01)
        sampling = SamplingParams(
            temperature=0,
            max_tokens=asked.reply_tokens,
            ignore_eos=True,
            logprobs=5,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._num_requests += 1
        outputs = self._llm.generate(
            {"prompt_token_ids": asked.prompt},
            sampling,
            str(self._num_requests),
            data_parallel_rank=asked.rank % self.num_ranks if self.num_ranks > 1 else None,
        )
        (output,) = [output async for output in outputs]
        (reply,) = output.outputs
        return {
            "prompt_tokens": len(asked.prompt),
            "hit_tokens": output.num_cached_tokens or 0,
            "reply": list(reply.token_ids),
            "logprobs": [
                {token: entry.logprob for token, entry in step.items()} for step in reply.logprobs
            ],
        }

    def reset(self, is_host_too: bool = False) -> None:
        """Empty the prefix caches of all devices, and the host tiers if asked."""
        self._steer("reset", is_host_too)

    def spoil_pages(self) -> None:
        self._steer("spoil_pages")

    def lose_rows(self, lost: Sequence[Sequence[int]]) -> None:
        self._steer("lose_rows", lost)

    @contextmanager
    def leaving_out_holes(self, is_left_out: bool) -> Iterator[None]:
        """Let holes count as computed that are not."""
        self._steer("leave_out_holes", is_left_out)
        yield
        self._steer("leave_out_holes", False)

    @contextmanager
    def failing_loads(self, rank: int) -> Iterator[None]:
        """Let every second load of one rank fail. The workers have to be in the engines."""
        self._steer("fail_loads", rank)
        yield
        self._steer("fail_loads", None)

    @contextmanager
    def skipping_loads(self) -> Iterator[None]:
        """Let loads end without having copied anything."""
        self._loop.run_until_complete(self._llm.collective_rpc("skip_loads", args=(True,)))
        yield
        self._loop.run_until_complete(self._llm.collective_rpc("skip_loads", args=(False,)))

    def take_computed_in_holes(self) -> list[int]:
        return self._steer("take_computed_in_holes")

    def note(self, label: str, fact: Any) -> None:
        """Report a fact about what was asked."""
        self._asked[label]["fact"] = fact

    def report(self) -> dict[str, Any]:
        return {"asked": self._asked, "ranks": self._steer("report")}

    def shutdown(self) -> None:
        self._llm.shutdown()
        self._loop.run_until_complete(asyncio.sleep(0))

    def _steer(self, method: str, *arguments: Any) -> list[Any]:
        return self._loop.run_until_complete(self._call_all(method, *arguments))

    async def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        """What a method of `data_parallel_rank.Rank` returns, by rank."""
        return await asyncio.gather(
            *(
                self._client._call_utility_async("steer", method, arguments, engine=engine)
                for engine in self._client.core_engines
            )
        )


def crowd(ranks: Ranks) -> None:
    """More requests on one rank than run at once; two on the other, which come meanwhile.

    They are sent twice, and then with changed ranks, whose host memories have none of them.
    """
    rng = random.Random(21)
    prompts = [
        random_tokens(rng, 2 * CHUNK_TOKENS + 9 * number) for number in range(MOST_REQUESTS + 4)
    ]
    asked = [
        Asked(prompt, rank=int(number > 5), reply_tokens=REPLY_TOKENS, is_late=number > 5)
        for number, prompt in enumerate(prompts)
    ]
    ranks.ask_ranks("crowd", asked)
    ranks.spoil_pages()
    ranks.ask_ranks("crowd again", asked)
    ranks.spoil_pages()
    ranks.ask_ranks("crowd elsewhere", [each._replace(rank=each.rank + 1) for each in asked])
    ranks.reset(is_host_too=True)


def failures(ranks: Ranks) -> None:
    """Loads fail on one rank, and not on the other."""
    rng = random.Random(22)
    prompts = [random_tokens(rng, 2 * CHUNK_TOKENS + 9 * number) for number in range(6)]
    ranks.ask("before failing loads", prompts)
    ranks.spoil_pages()
    with ranks.failing_loads(rank=1):
        ranks.ask("failing loads", prompts)
    ranks.spoil_pages()
    ranks.ask("after failing loads", prompts)
    ranks.reset(is_host_too=True)


def skipped(ranks: Ranks) -> None:
    """Loads that copy nothing: what a comparison has to see."""
    rng = random.Random(23)
    prompts = [random_tokens(rng, 3 * CHUNK_TOKENS + 9 * number) for number in range(2)]
    ranks.ask("before skipped loads", prompts)
    ranks.spoil_pages()
    with ranks.skipping_loads():
        ranks.ask("skipped loads", prompts)
    ranks.reset(is_host_too=True)


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (connector_workload.turns, connector_workload.holes, crowd, failures, skipped)
}


def serve(plan: dict[str, Any]) -> dict[str, Any]:
    """Serve one plan. If it fails, the report says why."""
    ranks = None
    began_s = time.monotonic()
    try:
        ranks = Ranks(plan["model"], plan["engine"])
        for scenario in plan["scenarios"]:
            SCENARIOS[scenario](ranks)
        return ranks.report() | {"seconds": time.monotonic() - began_s}
    except Exception:
        return {"error": traceback.format_exc()}
    finally:
        if ranks is not None:
            ranks.shutdown()


def main() -> None:
    report, plans = map(Path, sys.argv[1:])
    reports = {name: serve(plan) for name, plan in json.loads(plans.read_text()).items()}
    report.write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
