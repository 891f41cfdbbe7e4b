# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""An engine in this process, which scenarios ask."""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

VOCABULARY_TOKENS = 512
CHUNK_TOKENS = 128
REPLY_TOKENS = 24
POOL_BLOCKS = 700
"""The size of the pool. Stores may hold half of it, which is enough for a conversation's turns."""

Tokens = list[int]
Segments = list[list[int]]

COMMON = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 10,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": POOL_BLOCKS,
    "disable_log_stats": False,
    "disable_hybrid_kv_cache_manager": False,
}


class Prompt(NamedTuple):
    """A request: its tokens, and its documents by first and end token, named or not."""

    token_ids: Tokens
    segments: Segments = []  # noqa: RUF012 (nobody changes it)
    is_named: bool = True
    cache_salt: str | None = None

    @property
    def inputs(self) -> dict[str, Any]:
        """The prompt in the form of ``LLM.generate``."""
        salt = {} if self.cache_salt is None else {"cache_salt": self.cache_salt}
        return {"prompt_token_ids": self.token_ids, **salt}

    @property
    def arguments(self) -> dict[str, Any] | None:
        """The further arguments of the request."""
        return {"kvext_segments": self.segments} if self.segments and self.is_named else None


STORED = {"kvext_store_segment": True}
"""Arguments of a request that is stored as a segment."""


def sampling_of(reply_tokens: int, arguments: Mapping[str, Any] | None = None, **more: Any) -> Any:
    from vllm import SamplingParams

    chosen = {"temperature": 0, "ignore_eos": True, "logprobs": 5, "detokenize": False, **more}
    return SamplingParams(max_tokens=reply_tokens, extra_args=arguments, **chosen)


def answer_of(prompt: Prompt, output: Any, **more: Any) -> dict[str, Any]:
    """The result of a request, in the form of `answers.Answer`."""
    (reply,) = output.outputs
    return {
        "prompt_tokens": len(prompt.token_ids),
        "hit_tokens": output.num_cached_tokens or 0,
        "reply": list(reply.token_ids),
        "logprobs": [
            {token: entry.logprob for token, entry in step.items()} for step in reply.logprobs
        ],
        "prompt": prompt.token_ids,
        "segments": prompt.segments,
        "params": output.kv_transfer_params,
        **more,
    }


def random_tokens(rng: random.Random, num_tokens: int) -> Tokens:
    return rng.choices(range(VOCABULARY_TOKENS), k=num_tokens)


def watch(owner: Any, name: str, note: Callable[..., None]) -> None:
    """After each call of a method, call a function with its result and its arguments."""
    method = getattr(owner, name)

    def call_and_note(*args: Any, **more: Any) -> Any:
        result = method(*args, **more)
        note(result, *args, **more)
        return result

    setattr(owner, name, call_and_note)


def runner_of(worker: Any) -> Any:
    """What moves the pages of KvextConnector in the process of a worker."""
    from vllm.distributed import kv_transfer

    from vllm_ascend_kvext.patches.connector.scheduler import kvext_connector_in

    return kvext_connector_in(kv_transfer.get_kv_transfer_group()).worker_side._runner


def spoil_pages_of(worker: Any) -> None:
    """Fill all pages of a worker with wrong bytes."""
    for tensor in runner_of(worker).pools.tensors:
        tensor.fill_(0x44)  # This is 785.07 in float32.


def load_nothing(worker: Any, is_on: bool) -> None:
    """Let loads of a worker move nothing, or move again."""
    runner = runner_of(worker)
    move = getattr(runner._move, "moves_all", runner._move)

    def store_only(pools: Any, host: Any, planes: Any, runs: Any, way: Any, **more: Any) -> None:
        if way.name != "HOST_TO_PAGES":
            move(pools, host, planes, runs, way, **more)

    store_only.moves_all = move  # type: ignore[attr-defined]
    runner._move = store_only if is_on else move


def _allow_compilation() -> None:
    """Allow compilation. `processes.ENGINE_ENVIRON` turns it off for all processes.

    The emulated NPU does not compile: README.md of ``tests/emulated_npu``.
    """
    import torch._dynamo

    os.environ |= {"TORCHDYNAMO_DISABLE": "0", "VLLM_DISABLE_COMPILE_CACHE": "1"}
    torch._dynamo.config.disable = False


class Engine:
    """An engine, its host memory, and a report that grows with each request."""

    reply_tokens = REPLY_TOKENS
    defaults: Mapping[str, Any] = {}
    """The ``LLM`` arguments of a module, in addition to the common ones."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        from vllm import LLM

        self.plan = plan
        arguments = COMMON | dict(self.defaults) | plan["engine"]
        if not arguments["enforce_eager"] and "torch_npu" not in sys.modules:
            _allow_compilation()
        self.llm = LLM(plan["model"], **arguments)
        self.request_ids = count()
        self.take_up(getattr(self.llm.llm_engine.engine_core, "engine_core", None))

    def take_up(self, core: Any) -> None:
        """Report on this engine from now on.

        The core is None if it is in another process. Then only requests can reach it.
        """
        self.core = core
        self.asked: dict[str, dict[str, Any]] = {}
        self.facts: dict[str, Any] = {}
        self.counted: Counter[str] = Counter()
        self.has_connector = False
        self.worker_side: Any = None  # Several workers have their own processes.
        self.batched_copies.clear()
        self.first_replay = self.num_replays()
        if core is None:
            return
        self.scheduler = core.scheduler
        self.block_tokens: int = core.vllm_config.cache_config.block_size
        if self.scheduler.connector is None:
            return
        from vllm.distributed import kv_transfer

        from vllm_ascend_kvext.patches.connector.scheduler import kvext_connector_in

        connector = kvext_connector_in(self.scheduler.connector)
        if connector is not None:
            self.has_connector = True
            self.side = connector.scheduler_side
            if kv_transfer.has_kv_transfer_group():
                group = kv_transfer.get_kv_transfer_group()
                self.worker_side = kvext_connector_in(group).worker_side

    @property
    def runner(self) -> Any:
        """The model runner of an engine with one worker."""
        worker = self.core.model_executor.driver_worker
        return getattr(worker, "worker", worker).model_runner

    # Requests.

    def ask(
        self,
        label: str,
        prompts: Sequence[Tokens | Prompt],
        reply_tokens: int | None = None,
        arguments: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> list[Tokens]:
        """Send all prompts at once, report the answers under ``label``, and return the replies.

        ``arguments`` replace those of the prompts.
        """
        asked = [each if isinstance(each, Prompt) else Prompt(each) for each in prompts]
        before = self.counted.copy()
        outputs = self.llm.generate(
            [each.inputs for each in asked],
            [
                sampling_of(
                    reply_tokens or self.reply_tokens, arguments or each.arguments, **sampling
                )
                for each in asked
            ],
            use_tqdm=False,
        )
        found = [answer_of(*both) for both in zip(asked, outputs, strict=True)]
        self.note_answers(label, found, self.counted - before)
        return [answer["reply"] for answer in found]

    def note_answers(
        self, label: str, answers: Iterable[dict[str, Any]], counted: Counter[str]
    ) -> None:
        """Report answers, in addition to earlier ones with the same label."""
        asked = self.asked.setdefault(label, {"answers": [], "counted": {}})
        asked["answers"] += answers
        asked["counted"] = counted + Counter(asked["counted"])

    def store(
        self, prompts: Iterable[Tokens | Prompt], arguments: Mapping[str, Any] | None = None
    ) -> None:
        """Store these prompts in host memory, and wait for all stores."""
        if not self.has_connector:
            return
        for each in prompts:
            prompt = each if isinstance(each, Prompt) else Prompt(each)
            sampling = sampling_of(1, arguments)
            self.llm.generate([prompt.inputs], sampling, use_tqdm=False)
            self.finish()

    def finish(self) -> None:
        """Step until no transfer is under way."""
        while self.has_connector and self.side.has_transfers:
            self.llm.llm_engine.step()

    def reset(self, is_host_too: bool = False) -> None:
        """Empty the local prefix cache, and also the host tier if asked."""
        if not self.llm.reset_prefix_cache(reset_connector=is_host_too and self.has_connector):
            raise RuntimeError("the prefix cache was not reset")

    # Faults.

    def spoil_pages(self) -> None:
        """Reset the device's prefix cache, and fill its pages with wrong bytes."""
        self.reset()
        if self.has_connector:
            self.core.model_executor.collective_rpc(spoil_pages_of)

    def host_bytes(self, entry: Any) -> Any:
        """The bytes of an entry in host memory. They can be read and written."""
        return self.worker_side._host.tensor[entry.offset_bytes :][: entry.num_bytes]

    @contextmanager
    def failing(self, direction: str, numbers: Sequence[int] = ()) -> Iterator[None]:
        """Let transfers of one direction fail: every second one, or those with the numbers from 1
        on.

        A transfer that fails moves nothing.
        """
        calls = count(1)

        def fail(way: str, move: Callable[[], None]) -> None:
            if way == direction:
                number = next(calls)
                if number in numbers if numbers else number % 2:
                    raise RuntimeError(f"injected: {direction} fails")
            move()

        with self._moving_by(fail):
            yield

    @contextmanager
    def loading_nothing(self, is_on: bool = True) -> Iterator[None]:
        """Let loads of all workers succeed without moving anything."""
        tell_workers = self.core.model_executor.collective_rpc if self.has_connector else None
        if not is_on or tell_workers is None:
            yield
            return
        tell_workers(load_nothing, args=(True,))
        yield
        tell_workers(load_nothing, args=(False,))

    @contextmanager
    def _moving_by(self, instead: Callable[[str, Callable[[], None]], None]) -> Iterator[None]:
        """In place of each transfer, call a function with the direction and the transfer."""
        if self.worker_side is None:
            yield
            return
        runner = self.worker_side._runner
        move = runner._move

        def moved(pools: Any, host: Any, planes: Any, runs: Any, way: Any, **more: Any) -> None:
            direction = "load" if way.name == "HOST_TO_PAGES" else "store"
            instead(direction, lambda: move(pools, host, planes, runs, way, **more))

        runner._move = moved
        yield
        runner._move = move

    # Reports.

    def note(self, label: str, fact: Any) -> None:
        """Report a fact."""
        self.facts[label] = fact

    def report(self) -> dict[str, Any]:
        """The requests, and what is left at the end."""
        self.reset()
        report: dict[str, Any] = {
            "asked": self.asked,
            "facts": self.facts,
            "num_groups": len(self.scheduler.kv_cache_config.kv_cache_groups),
            "is_v2_runner": self.scheduler.use_v2_model_runner,
            "left": self.left(),
            "batched copies": dict(self.batched_copies),
            "replays": self.num_replays() - self.first_replay,
        }
        if self.has_connector:
            report["own"] = self.side.counters.totals()
        return report

    def num_replays(self) -> int:
        """The replays of graphs on the emulated NPU. Zero on other devices."""
        emulation = sys.modules.get("torch_npu.emulation")
        return int(emulation.num_replays()) if emulation else 0

    @property
    def batched_copies(self) -> Counter[str]:
        """The counted calls of the emulated NPU. Empty on other devices."""
        copies = sys.modules.get("torch_npu.operators.block_copies")
        return copies.counts if copies else Counter()

    def left(self) -> dict[str, int]:
        """What is still held for ended requests."""
        pool = self.scheduler.kv_cache_manager.block_pool
        left = {"blocks": sum(block.ref_cnt > 0 and not block.is_null for block in pool.blocks)}
        if self.has_connector:
            from support.connector.held import Held, held_by

            left |= {"held": held_by(self.side) != Held(), "transfers": self.side.has_transfers}
        return left

    def shutdown(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


@contextmanager
def wrong_bytes(sections: Sequence[Any], others: Sequence[Any] = ()) -> Iterator[None]:
    """Inside the block, fill tensors with zeros, or exchange them with others of equal sizes."""
    kept = [section.clone() for section in (*sections, *others)]
    for section in sections:
        section.zero_()
    for section, other in zip(sections, others, strict=bool(others)):
        section.copy_(other)
    for other, before in zip(others, kept, strict=False):
        other.copy_(before)
    yield
    for section, before in zip((*sections, *others), kept, strict=True):
        section.copy_(before)
