# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Data-parallel ranks. Each rank is an engine in its own process.

A scenario sends its prompts to the ranks in turns. If there is one rank, it gets all of them.
"""

from __future__ import annotations

import asyncio
import importlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from support.scenarios import connector, scenario
from support.scenarios.engine import (
    CHUNK_TOKENS,
    COMMON,
    REPLY_TOKENS,
    Prompt,
    Tokens,
    answer_of,
    random_tokens,
    sampling_of,
)

turns = connector.turns
holes = connector.holes
MAX_REQUESTS = 4
"""The most requests that run on one rank at the same time."""
RANK = "support.scenarios.data_parallel_rank"


class Asked(NamedTuple):
    """A prompt and its rank. The rank is taken modulo the number of ranks.

    A late prompt waits until another rank runs as many requests as it can.
    """

    prompt: Tokens
    rank: int
    reply_tokens: int
    is_late: bool = False


class Engine:
    """Several engines behind one client, with the methods of `connector.Engine`."""

    def __init__(self, plan: dict[str, Any]) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = {
            "max_num_seqs": MAX_REQUESTS,
            "max_num_batched_tokens": 512,
            "distributed_executor_backend": "uni",
            "worker_extension_cls": f"{RANK}.WorkerExtension",
            **plan["engine"],
        }
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        config = AsyncEngineArgs(plan["model"], **COMMON | arguments).create_engine_config()
        # By now, vLLM-Ascend has patched vLLM. Forked processes get the module from here. Spawned
        # processes get it through the worker extension.
        importlib.import_module(RANK)
        self._llm = AsyncLLM.from_vllm_config(config)
        self._client: Any = self._llm.engine_core
        self.num_ranks = len(self._client.core_engines)
        self.has_connector = "kv_transfer_config" in arguments
        self._asked: dict[str, Any] = {}
        self._num_requests = 0

    def ask(
        self, label: str, prompts: Sequence[Tokens], reply_tokens: int = REPLY_TOKENS
    ) -> list[Tokens]:
        """Send all prompts at once, to the ranks in turns; see `engine.Engine`."""
        asked = [Asked(prompt, rank, reply_tokens) for rank, prompt in enumerate(prompts)]
        return self.ask_ranks(label, asked)

    def ask_ranks(self, label: str, asked: Sequence[Asked]) -> list[Tokens]:
        """Send each prompt to its rank, modulo their number. Report the answers under ``label``."""

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
        from vllm.sampling_params import RequestOutputKind

        if asked.is_late and self.num_ranks > 1:
            while not any(await self._call_all("is_full")):
                await asyncio.sleep(0.01)
        sampling = sampling_of(asked.reply_tokens, output_kind=RequestOutputKind.FINAL_ONLY)
        self._num_requests += 1
        outputs = self._llm.generate(
            {"prompt_token_ids": asked.prompt},
            sampling,
            str(self._num_requests),
            data_parallel_rank=asked.rank % self.num_ranks if self.num_ranks > 1 else None,
        )
        (output,) = [output async for output in outputs]
        return answer_of(Prompt(asked.prompt), output)

    def reset(self, is_host_too: bool = False) -> None:
        """Empty the prefix caches of all devices, and also the host tiers if asked."""
        self._steer("reset", is_host_too)

    def spoil_pages(self) -> None:
        self._steer("spoil_pages")

    def lose_rows(self, lost: Sequence[Sequence[int]]) -> None:
        self._steer("lose_rows", lost)

    @contextmanager
    def leaving_out_holes(self, is_left_out: bool) -> Iterator[None]:
        """Let holes that are not computed count as computed."""
        self._steer("leave_out_holes", is_left_out)
        yield
        self._steer("leave_out_holes", False)

    @contextmanager
    def failing_loads(self, rank: int) -> Iterator[None]:
        """Let every second load of one rank fail. The workers must be in the engines' processes."""
        self._steer("fail_loads", rank)
        yield
        self._steer("fail_loads", None)

    @contextmanager
    def skipping_loads(self) -> Iterator[None]:
        """Let loads end without copying anything."""
        self._loop.run_until_complete(self._llm.collective_rpc("skip_loads", args=(True,)))
        yield
        self._loop.run_until_complete(self._llm.collective_rpc("skip_loads", args=(False,)))

    def take_computed_in_holes(self) -> list[int]:
        return self._steer("take_computed_in_holes")

    def note(self, label: str, fact: Any) -> None:
        """Report a fact about the requests."""
        self._asked[label]["fact"] = fact

    def report(self) -> dict[str, Any]:
        return {"asked": self._asked, "ranks": self._steer("report")}

    def shutdown(self) -> None:
        self._llm.shutdown()
        self._loop.run_until_complete(asyncio.sleep(0))

    def _steer(self, method: str, *arguments: Any) -> list[Any]:
        return self._loop.run_until_complete(self._call_all(method, *arguments))

    async def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `data_parallel_rank.Rank` on all ranks. Return the results by rank."""
        return await asyncio.gather(
            *(
                self._client._call_utility_async("steer", method, arguments, engine=engine)
                for engine in self._client.core_engines
            )
        )


@scenario
def crowd(ranks: Engine) -> None:
    """One rank gets more requests than it can run. Meanwhile the other rank gets two.

    They are sent twice. Then their ranks are swapped, so the host memories have none of their KV.
    """
    rng = random.Random(21)
    prompts = [
        random_tokens(rng, 2 * CHUNK_TOKENS + 9 * number) for number in range(MAX_REQUESTS + 4)
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


@scenario
def failures(ranks: Engine) -> None:
    """Loads fail on one rank, but not on the other."""
    rng = random.Random(22)
    prompts = [random_tokens(rng, 2 * CHUNK_TOKENS + 9 * number) for number in range(6)]
    ranks.ask("before failing loads", prompts)
    ranks.spoil_pages()
    with ranks.failing_loads(rank=1):
        ranks.ask("failing loads", prompts)
    ranks.spoil_pages()
    ranks.ask("after failing loads", prompts)
    ranks.reset(is_host_too=True)


@scenario
def skipped(ranks: Engine) -> None:
    """Loads that copy nothing. A comparison must notice this."""
    rng = random.Random(23)
    prompts = [random_tokens(rng, 3 * CHUNK_TOKENS + 9 * number) for number in range(2)]
    ranks.ask("before skipped loads", prompts)
    ranks.spoil_pages()
    with ranks.skipping_loads():
        ranks.ask("skipped loads", prompts)
    ranks.reset(is_host_too=True)
