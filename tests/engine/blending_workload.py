# SPDX-License-Identifier: Apache-2.0
"""Blend prompts on the installed vLLM, and serve prompts without a connector; write the answers.

    python blending_workload.py REPORT PLANS

``PLANS`` is JSON: by name, what to serve: ``model`` is a folder, ``engine`` holds arguments of
``LLM``, ``scenarios`` names functions below. One engine follows the other in this process. With
``blending`` (options of the connector) an engine blends; without, ``prompts`` are asked: by label,
lists of token ids, and how many tokens their replies have.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import mixed_requests
from blended_prompts import (
    BLOCK_TOKENS,
    MISSING,
    STORED_LENGTHS,
    Prompt,
    Tokens,
    documents,
    in_order,
    random_tokens,
    separated,
)

CHUNK_TOKENS = 128
REPLY_TOKENS = 8
ORDERS = ((2, 0, 1), (1, 3, 0, 2), (3, 1), (0, MISSING, 2), (4, 2, 1, 5))
SWAPPED = (4, 5)
HEADS_TOKENS = (0, 16, 32)

CROWD_POOL_BLOCKS = 150
CROWD_REPLY_TOKENS = 100
ALONE_REPLY_TOKENS = 24
CROWD = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": CROWD_POOL_BLOCKS,
}
"""As many requests as there are, small steps, and a pool that is too small for them."""

LEARNING: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((0, 1), ()),
    ((1, 2), (1,)),
    ((2, 1, 0), (2, 0)),
    ((0, 3, 2, 1), ()),
)
"""Documents of prompts, and those that two prompts have had for the first time."""

LONGER_THAN_A_STEP = 3
"""A document."""

MIXED_REPLY_TOKENS = 16


class KeptBlock(NamedTuple):
    """A block of a prefix cache.

    Attributes:
        prefix: Tokens whose last ones it holds, by its hash.
        group: KV cache group.
        pages: By layer: what it holds.
    """

    prefix: tuple[int, ...]
    group: int
    pages: dict[str, Any]


class Engine:
    """An engine, and a report that grows with everything asked of it."""

    def __init__(self, plan: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        common = {
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK_TOKENS,
            "max_model_len": 2048,
            "max_num_seqs": 10,
            "max_num_batched_tokens": 256,
            "num_gpu_blocks_override": 700,
            "disable_hybrid_kv_cache_manager": False,
        }
        if "tensor_parallel_size" not in plan["engine"]:
            common["distributed_executor_backend"] = UniProcExecutor
        if "blending" in plan:
            extra = {
                "host_memory_gib": 0.125,
                "chunk_tokens": CHUNK_TOKENS,
                "load_if_slower": True,
                "store_policy": "never",
                "blending": True,
                **plan["blending"],
            }
            common["kv_transfer_config"] = {
                "kv_connector": "KvextConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            }
        self.plan = plan
        self._llm = LLM(plan["model"], **common | plan["engine"])
        self._core = self._llm.llm_engine.engine_core.engine_core
        self.asked: dict[str, list[dict[str, Any]]] = {}
        self._facts: dict[str, Any] = {}
        self._prefixes: dict[bytes, tuple[int, ...]] = {}
        self._num_served = 0
        self.scheduler = self._core.scheduler
        if "blending" in plan:
            self.side = self.scheduler.connector.scheduler_side
            self._blending = self.side._parts.blending

    def ask(
        self,
        label: str,
        prompts: Sequence[Prompt],
        reply_tokens: int = REPLY_TOKENS,
        is_plain: bool = False,
    ) -> list[Tokens]:
        """Send all prompts at once; report the answers under ``label`` and return the replies."""
        outputs = self._generate(
            prompts,
            [
                {"kvext_segments": prompt.segments} if prompt.is_named and not is_plain else None
                for prompt in prompts
            ],
            reply_tokens,
        )
        return [
            self._note(label, prompt, output, is_plain)
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    def serve(self, wave: Sequence[mixed_requests.Asked]) -> list[Tokens | None]:
        """Send all at once; report the answers and return the replies, None of what is aborted.

        What has ended before it was to be aborted is reported.
        """
        engine = self._llm.llm_engine
        numbers = [str(self._num_served + number) for number in range(len(wave))]
        self._num_served += len(wave)
        names = {}
        for number, asked in zip(numbers, wave, strict=True):
            token_ids, segments, _, cache_salt = asked.prompt
            extra: dict[str, Any] = {"kvext_segments": segments} if segments else {}
            if asked.label == "stored":
                extra = {"kvext_store_segment": True}
            salt = {} if cache_salt is None else {"cache_salt": cache_salt}
            names[number] = engine.add_request(
                number,
                {"prompt_token_ids": token_ids, **salt},
                _sampling(extra or None, 1 if asked.label == "stored" else MIXED_REPLY_TOKENS),
            )
        outputs: dict[str, Any] = {}
        steps = 0
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in engine.step()}
            steps += 1
            due = [
                n for n, asked in zip(numbers, wave, strict=True) if asked.steps_to_abort == steps
            ]
            engine.abort_request([n for n in due if n not in outputs or not outputs[n].finished])
        replies: list[Tokens | None] = []
        for number, asked in zip(numbers, wave, strict=True):
            output = outputs.get(number)
            if output is not None and output.finished and asked.label != "stored":
                replies.append(self._note(asked.label, asked.prompt, output, id=names[number]))
                continue
            replies.append([] if asked.label == "stored" else None)
            sink = self.sink_ids if asked.label == "stored" else ()
            begun = [] if output is None else output.outputs[0].token_ids
            self._learn((*sink, *asked.prompt.token_ids, *begun), asked.prompt.cache_salt)
        return replies

    def _note(
        self, label: str, prompt: Prompt, output: Any, is_plain: bool = False, **more: Any
    ) -> Tokens:
        """Report an answer under ``label`` and return the reply."""
        reply = list(output.outputs[0].token_ids)
        self._learn((*prompt.token_ids, *reply), prompt.cache_salt)
        self.asked.setdefault(label, []).append(
            {
                "prompt": prompt.token_ids,
                "segments": [] if is_plain else prompt.segments,
                "reply": reply,
                "logprobs": [
                    {token: entry.logprob for token, entry in step.items()}
                    for step in output.outputs[0].logprobs
                ],
                "params": output.kv_transfer_params,
                "hit_tokens": output.num_cached_tokens or 0,
                **more,
            }
        )
        return reply

    def store(self, documents: Sequence[Tokens], cache_salt: str | None = None) -> None:
        """Have each document stored as a segment."""
        for document in documents:
            prompt = Prompt(document, [], cache_salt=cache_salt)
            self._generate([prompt], [{"kvext_store_segment": True}], 1)
            self.finish_transfers()
            self._learn((*self.sink_ids, *document), cache_salt)
        self.note("sink", list(self.sink_ids))

    def idle(self) -> int:
        """Let the engine do what it does without requests; how many answers come of it."""
        num_answers = 0
        while self.scheduler.has_requests():
            num_answers += len(self._llm.llm_engine.step())
        return num_answers

    @property
    def sink_ids(self) -> tuple[int, ...]:
        return self._blending.requests._store.sink_ids

    def finish_transfers(self) -> None:
        """Step until nothing is on its way."""
        while self.side.has_transfers:
            self._llm.llm_engine.step()

    def reset(self) -> None:
        """Empty the prefix cache of the device."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not reset")

    def sleep(self) -> None:
        """All that runs is aborted, and what caches hold is forgotten."""
        self._llm.sleep(level=1)

    def wake_up(self) -> None:
        """Go on."""
        self._llm.wake_up()

    def note(self, label: str, fact: Any) -> None:
        """Report a fact."""
        self._facts[label] = fact

    @contextmanager
    def with_heads(self, head_tokens: int) -> Iterator[None]:
        """As an engine with another ``blend_head_tokens``."""
        requests = self._blending.requests
        options = requests.options
        requests.options = dataclasses.replace(options, head_tokens=head_tokens)
        yield
        requests.options = options

    @contextmanager
    def not_rotating(self) -> Iterator[None]:
        """Let keys keep the rotation of the position at which they were computed."""
        from vllm_ascend_kvext.connector import load_jobs

        rows_to_load = load_jobs.rows_to_load
        load_jobs.rows_to_load = lambda placed: rows_to_load(placed)._replace(shift_tokens=0)
        yield
        load_jobs.rows_to_load = rows_to_load

    @contextmanager
    def without(self, protections: Sequence[str]) -> Iterator[None]:
        """Let approximate KV into the prefix cache.

        Args:
            protections: ``clamp`` keeps blocks out of it; ``private hashes`` would keep them from
                being found.
        """
        from vllm_ascend_kvext.connector import blended_requests

        coordinator = self.scheduler.kv_cache_manager.coordinator
        clamp, private_hashes = coordinator.cache_blocks, blended_requests.PrivateHashes
        if "clamp" in protections:
            del coordinator.cache_blocks
        if "private hashes" in protections:
            blended_requests.PrivateHashes = _HashesOfTokens
        yield
        coordinator.cache_blocks = clamp
        blended_requests.PrivateHashes = private_hashes

    @contextmanager
    def swapping(self, one: Tokens, other: Tokens) -> Iterator[None]:
        """Let the bytes of two documents change places in host memory."""
        pairs = list(zip(self._entries(one), self._entries(other), strict=True))

        def swap() -> None:
            for first, second in pairs:
                first_bytes, second_bytes = self._host_bytes(first), self._host_bytes(second)
                kept = first_bytes.clone()
                first_bytes.copy_(second_bytes)
                second_bytes.copy_(kept)

        swap()
        yield
        swap()

    @contextmanager
    def without_keys(self, documents: Sequence[Tokens]) -> Iterator[None]:
        """Let the keys of documents be 0 in host memory."""
        kept = []
        mover = self._worker_side()._runner.segments
        for document in documents:
            for entry in self._entries(document):
                section = self._host_bytes(entry)
                kept.append((section, section.clone()))
                offsets = mover.layout.plane_offsets_bytes(entry.row_map.num_rows)
                for index, plane in enumerate(mover._pages.planes):
                    if plane.keys is not None:
                        section[offsets[index] : offsets[index + 1]].zero_()
        yield
        for section, before in kept:
            section.copy_(before)

    def _entries(self, document: Tokens) -> list[Any]:
        store = self._blending.requests._store
        return [placed.entry for placed in store.find(store.prefix(document, None), 0)]

    def _host_bytes(self, entry: Any) -> Any:
        return self._worker_side()._host.tensor[entry.offset_bytes :][: entry.num_bytes]

    def _worker_side(self) -> Any:
        from vllm.distributed import kv_transfer

        return kv_transfer.get_kv_transfer_group().worker_side

    def count_preemptions(self) -> Counter[str]:
        """Of blended and of plain requests, from here on."""
        counted: Counter[str] = Counter(blended=0, plain=0)
        preempt = self.scheduler._preempt_request

        def preempt_and_count(request: Any, *args: Any, **more: Any) -> Any:
            is_exact = self.side.shared_tokens(request.request_id) is None
            counted["plain" if is_exact else "blended"] += 1
            return preempt(request, *args, **more)

        self.scheduler._preempt_request = preempt_and_count
        return counted

    def watch_preemptions(self) -> set[str]:
        """Names of requests, from here on."""
        found: set[str] = set()
        preempt = self.scheduler._preempt_request

        def preempt_and_note(request: Any, *args: Any, **more: Any) -> Any:
            found.add(request.request_id)
            return preempt(request, *args, **more)

        self.scheduler._preempt_request = preempt_and_note
        return found

    def cached_blocks(self) -> list[KeptBlock]:
        """What is in the prefix cache; an empty prefix where a hash is that of no tokens."""
        from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

        pool = self.scheduler.kv_cache_manager.block_pool
        found = []
        for key, blocks in pool.cached_block_hash_to_block._cache.items():
            group = get_group_id(key)
            prefix = self._prefixes.get(get_block_hash(key), ())
            for block_id in blocks if isinstance(blocks, dict) else [blocks.block_id]:
                found.append(KeptBlock(prefix, group, self._pages(group, block_id)))
        return found

    def _learn(self, sequence: tuple[int, ...], cache_salt: str | None = None) -> None:
        """The hashes of the full blocks of some tokens."""
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import hash_block_tokens

        config = self._llm.llm_engine.vllm_config.cache_config
        if not config.enable_prefix_caching:
            return
        hash_function = get_hash_fn_by_name(config.prefix_caching_hash_algo)
        parent = None
        for end in range(BLOCK_TOKENS, len(sequence) + 1, BLOCK_TOKENS):
            tokens = sequence[end - BLOCK_TOKENS : end]
            salt = (cache_salt,) if cache_salt is not None and parent is None else None
            parent = hash_block_tokens(hash_function, parent, tokens, salt)
            self._prefixes[parent] = sequence[:end]

    def _pages(self, group: int, block_id: int) -> dict[str, Any]:
        """A page of each layer of a group."""
        layers = self.scheduler.kv_cache_config.kv_cache_groups[group].layer_names
        modules = self._llm.llm_engine.vllm_config.compilation_config.static_forward_context
        num_blocks = self.scheduler.kv_cache_config.num_blocks
        pages = {}
        for name in layers:
            cache = modules[name].kv_cache
            cache = cache[0] if isinstance(cache, list) else cache
            dimension = list(cache.shape).index(num_blocks)
            pages[name] = cache.select(dimension, block_id).clone()
        return pages

    def _generate(
        self,
        prompts: Sequence[Prompt],
        extra_args: Sequence[dict[str, Any] | None],
        reply_tokens: int,
    ) -> list[Any]:
        asked = [
            {"prompt_token_ids": prompt.token_ids}
            | ({} if prompt.cache_salt is None else {"cache_salt": prompt.cache_salt})
            for prompt in prompts
        ]
        sampling = [_sampling(extra, reply_tokens) for extra in extra_args]
        return self._llm.generate(asked, sampling, use_tqdm=False)

    def report(self) -> dict[str, Any]:
        """What was asked, and what is left when all is done."""
        pool = self.scheduler.kv_cache_manager.block_pool
        report: dict[str, Any] = {"asked": self.asked, "facts": self._facts}
        if "blending" in self.plan:
            self.finish_transfers()
            self.reset()
            report["own"] = self.side.counters.totals()
            report["left"] = {
                "blocks": sum(block.ref_cnt > 0 and not block.is_null for block in pool.blocks),
                "references": self.side.num_references,
                "pins": self.side.num_pinned,
            }
        return report

    def shutdown(self) -> None:
        shut_down(self._llm)


def shut_down(llm: Any) -> None:
    """End an engine: another one may begin in this process."""
    llm.llm_engine.engine_core.shutdown()


class _HashesOfTokens:
    """Leaves a request its hashes; see ``connector.private_hashes``."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def take_back(self) -> None:
        pass


def _sampling(extra_args: dict[str, Any] | None, reply_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0,
        max_tokens=reply_tokens,
        ignore_eos=True,
        logprobs=5,
        detokenize=False,
        extra_args=extra_args,
    )


def orders(engine: Engine) -> None:
    """Documents in several orders, with heads of several lengths; the beginnings are new."""
    rng = random.Random(1)
    texts = documents(rng)
    engine.store(texts[:MISSING])
    for head_tokens in engine.plan["heads"]:
        with engine.with_heads(head_tokens):
            prompts = [in_order(rng, texts, order) for order in ORDERS]
            engine.ask(f"heads {head_tokens}", prompts)
            engine.ask(f"heads {head_tokens}", [separated(rng, texts, (3, 0))])


def exact(engine: Engine) -> None:
    """Prompts of which nothing is approximate, although segments are known."""
    rng = random.Random(1)
    texts = documents(rng)
    with engine.with_heads(max(STORED_LENGTHS) + 1):
        engine.ask("exact: long heads", [in_order(rng, texts, order) for order in ORDERS])
    for index in (3, 1):
        first = len(engine.sink_ids)
        prompt = [*engine.sink_ids, *texts[index], *random_tokens(rng, 40)]
        for head_tokens in (0, 16):
            engine.reset()
            with engine.with_heads(head_tokens):
                in_place = Prompt(prompt, [[first, first + len(texts[index])]])
                engine.ask("exact: in place", [in_place])


def controls(engine: Engine) -> None:
    """What is loaded is wrong. Then all is right again."""
    rng = random.Random(1)
    texts = documents(rng)
    prompt = in_order(rng, texts, (1, 4, 0))
    wrong: dict[str, Callable[[], Any]] = {
        "not rotated": engine.not_rotating,
        "swapped": lambda: engine.swapping(*(texts[index] for index in SWAPPED)),
        "zeroed keys": lambda: engine.without_keys(texts[:MISSING]),
    }
    for label, happens in wrong.items():
        engine.reset()
        with happens():
            engine.ask(f"wrong: {label}", [prompt])
    engine.reset()
    engine.ask("right after wrong", [prompt])


def crowd(engine: Engine) -> None:
    """Blended and plain requests at once, in a pool too small for them; the blended ones alone."""
    rng = random.Random(2)
    texts = documents(rng)
    engine.store(texts[:MISSING])
    blended = [in_order(rng, texts, ORDERS[number % len(ORDERS)]) for number in range(8)]
    shared = random_tokens(rng, 100)
    plain = [Prompt(shared + random_tokens(rng, 60 + 31 * number), []) for number in range(8)]
    for prompt in blended:
        engine.reset()
        engine.ask("alone", [prompt], ALONE_REPLY_TOKENS)
    engine.reset()
    counted = engine.count_preemptions()
    outputs = [prompt for pair in zip(blended, plain, strict=True) for prompt in pair]
    engine.ask("crowd", outputs, CROWD_REPLY_TOKENS)
    engine.note("preemptions", counted)


def learned(engine: Engine) -> None:
    """Documents that nobody stores, or, with ``stores``, clients do when two prompts have had them.

    Each prompt waits until the engine has nothing left to do.
    """
    rng = random.Random(4)
    texts = documents(rng)
    sent: set[str] = set()
    update = engine.scheduler.update_from_output

    def update_and_note(*args: Any) -> Any:
        outputs = update(*args)
        sent.update(output.request_id for each in outputs.values() for output in each.outputs)
        return outputs

    engine.scheduler.update_from_output = update_and_note
    counts = []
    for order, popular in LEARNING:
        engine.ask("learned", [in_order(rng, texts, order)])
        engine.note("answers to nobody", engine.idle())
        if engine.plan["stores"]:
            engine.store([texts[index] for index in popular])
            sent.clear()
        counters = engine.side.counters.blending
        counts.append([counters.learned_segments, counters.stored_segments])
    engine.note("counts", counts)
    engine.note("sent", len(sent))


def asleep(engine: Engine) -> None:
    """The engine falls asleep while it computes a document, and another one is queued."""
    rng = random.Random(6)
    texts = documents(rng)
    assert len(texts[LONGER_THAN_A_STEP]) > 256
    both = (LONGER_THAN_A_STEP, 1)
    learning = engine.side.learning
    counters = engine.side.counters.blending

    def ask_twice() -> None:
        for _ in range(2):
            engine.ask("asleep", [in_order(rng, texts, both)])

    learning.is_held = True
    ask_twice()
    engine.idle()
    learning.is_held = False
    # The second step begins what is queued, and is the last one: the engine has no process.
    engine.ask("asleep", [in_order(rng, texts, ())], reply_tokens=2)
    engine.note("before sleep", [len(engine.scheduler.running), learning.has_queue])
    dropped = counters.learning_drops.copy()
    engine.sleep()
    new_drops = {
        drop.value: number - dropped[drop]
        for drop, number in counters.learning_drops.items()
        if number != dropped[drop]
    }
    engine.note("asleep", [len(engine.scheduler.requests), learning.has_queue, new_drops])
    engine.wake_up()
    num_learned = counters.learned_segments
    ask_twice()
    engine.idle()
    engine.note("learned after sleep", counters.learned_segments - num_learned)


def plain(engine: Engine) -> None:
    """Prompts, each for itself: there is no prefix cache."""
    for label, (prompts, reply_tokens) in engine.plan["prompts"].items():
        asked = [Prompt(token_ids, []) for token_ids in prompts]
        engine.ask(label, asked, reply_tokens, is_plain=True)


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        *(orders, exact, controls, crowd, learned, asleep, plain),
        *(mixed_requests.mixed, mixed_requests.recomputed),
    )
}


def let_sinks_be_float32() -> None:
    """Round the sinks of heads, which the CPU's attention reads as bfloat16 only."""
    from vllm.v1.attention.backends.cpu_attn import ops

    attend = ops.cpu_attention_with_kv_cache

    def attend_with_sinks(*args: Any, s_aux: Any = None, **more: Any) -> Any:
        return attend(*args, s_aux=None if s_aux is None else s_aux.bfloat16(), **more)

    ops.cpu_attention_with_kv_cache = attend_with_sinks


def serve(name: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Serve one plan. If it fails, the report says why: the others are served all the same."""
    engine = None
    try:
        engine = Engine({"name": name, "heads": HEADS_TOKENS, **plan})
        for scenario in plan["scenarios"]:
            SCENARIOS[scenario](engine)
        return engine.report()
    except Exception:
        return {"error": traceback.format_exc()}
    finally:
        if engine is not None:
            engine.shutdown()


def main() -> None:
    report, plans = map(Path, sys.argv[1:])
    let_sinks_be_float32()
    reports = {name: serve(name, plan) for name, plan in json.loads(plans.read_text()).items()}
    report.write_text(json.dumps(reports, default=bytes.hex))


if __name__ == "__main__":
    main()
