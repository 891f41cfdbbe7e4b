# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Blended prompts of documents, and prompts for a reference.

Options of a plan: ``heads`` has the lengths of heads that scenarios try. With ``has_context``,
documents are also stored behind others. ``prompts`` has, by label, lists of token ids and the
number of tokens of their replies.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest import mock

from support.scenarios import engine as scenarios_engine
from support.scenarios import scenario
from support.scenarios.documents import (
    MISSING,
    STORED_LENGTHS,
    documents,
    in_order,
    random_tokens,
    separated,
)
from support.scenarios.engine import (
    STORED,
    VOCABULARY_TOKENS,
    Prompt,
    Tokens,
    sampling_of,
    watch,
    wrong_bytes,
)
from vllm_ascend_kvext.segments.keys import key_check
from vllm_ascend_kvext.segments.scheduler.segments_side import segments_of

REPLY_TOKENS = 8
ORDERS = ((2, 0, 1), (1, 3, 0, 2), (3, 1), (0, MISSING, 2), (4, 2, 1, 5))
SWAPPED = (4, 5)
HEADS_TOKENS = (0, 16, 32)

CROWD_REPLY_TOKENS = 100
ALONE_REPLY_TOKENS = 24
CROWD_POOL_TOKENS = 2400
CROWD = {"max_num_seqs": 16, "max_num_batched_tokens": 64}
"""Engine options with small steps, and with a pool that is too small for all requests."""

INSTRUCTIONS_TOKENS = 140
SHORT_TOKENS = 48


class Engine(scenarios_engine.Engine):
    """An engine that reuses segments, or a reference for its answers."""

    reply_tokens = REPLY_TOKENS
    defaults = {"max_num_batched_tokens": 256}  # noqa: RUF012 (nobody changes it)

    def __init__(self, plan: dict[str, Any]) -> None:
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            let_sinks_be_float32()
        super().__init__(plan)
        if self.has_connector:
            self.segments = segments_of(self.side)

    def store_segments(self, documents: Sequence[Tokens]) -> None:
        """Store each document as a segment. If the plan has a context, store it behind others, too.

        The context begins with `instructions`.
        """
        from vllm_ascend_kvext.segments.scheduler.segment_contexts import NUM_DOCUMENTS, NUM_PROMPTS

        rng = random.Random("context")
        context = [random_tokens(rng, 60) for _ in range(NUM_DOCUMENTS)]
        if self.instructions is not None:
            for _ in range(NUM_PROMPTS):
                prompt = in_order(rng, [random_tokens(rng, 60)], [0], self.instructions)
                self.store([prompt], prompt.arguments)
            self.store(context, STORED)
        self.store(documents, STORED)
        self.learn(rng)
        self.note_sinks()

    def learn(self, rng: random.Random) -> None:
        """Let the engine compute everything that it has to learn."""
        learning = self.segments.learning
        while learning is not None and (learning.has_queue or learning.request_ids):
            # If no request waits, the engine learns in steps beside other requests.
            self.llm.generate([Prompt(random_tokens(rng, 5)).inputs], sampling_of(4))
            self.finish()
        # What the last prompt has learned may be on its way to host memory.
        self.finish()

    def note_sinks(self) -> None:
        sinks = self.segments.store.contexts.sinks(None, ())
        self.note("sinks", [(each.num_documents, list(each.token_ids)) for each in sinks])

    @property
    def instructions(self) -> Tokens | None:
        """The beginning of prompts, if the plan has a context."""
        if not self.plan.get("has_context"):
            return None
        return random_tokens(random.Random("instructions"), INSTRUCTIONS_TOKENS)

    @property
    def sink_ids(self) -> tuple[int, ...]:
        """The tokens behind which a document is stored if it comes first."""
        return self.segments.store.contexts.sink_ids

    @contextmanager
    def with_heads(self, head_tokens: int) -> Iterator[None]:
        """Let the engine work with another ``head_tokens``."""
        blended = self.segments.blended
        options = blended.options
        blended.options = dataclasses.replace(options, head_tokens=head_tokens)
        yield
        blended.options = options

    @contextmanager
    def not_rotating(self) -> Iterator[None]:
        """Let keys keep the rotation of the position at which they were computed."""
        from vllm_ascend_kvext.segments.scheduler import blended_loads

        rows_to_load = blended_loads.rows_to_load
        blended_loads.rows_to_load = lambda placed: rows_to_load(placed)._replace(shift_tokens=0)
        yield
        blended_loads.rows_to_load = rows_to_load

    @contextmanager
    def unprotected(self) -> Iterator[None]:
        """Let approximate KV get into the prefix cache, by the hashes of its tokens."""
        from vllm_ascend_kvext.segments.scheduler import blended_requests

        coordinator = self.scheduler.kv_cache_manager.coordinator
        cache_blocks = coordinator.cache_blocks
        private_hashes = blended_requests.PrivateHashes
        del coordinator.cache_blocks
        blended_requests.PrivateHashes = mock.Mock()
        yield
        coordinator.cache_blocks = cache_blocks
        blended_requests.PrivateHashes = private_hashes

    def swapping(self, one: Tokens, other: Tokens) -> AbstractContextManager[None]:
        """Exchange the bytes of two documents in host memory."""
        both = [list(map(self.host_bytes, self._entries(each))) for each in (one, other)]
        return wrong_bytes(*both)

    def without_keys(self, documents: Sequence[Tokens]) -> AbstractContextManager[None]:
        """Let the keys of documents be 0 in host memory."""
        keys = []
        mover = self.worker_side._runner.mover
        for entry in (entry for document in documents for entry in self._entries(document)):
            section = self.host_bytes(entry)
            offsets = mover.layout.plane_offsets_bytes(entry.row_map.num_rows)
            for index, plane in enumerate(mover.pages.planes):
                if plane.keys is not None:
                    keys.append(section[offsets[index] : offsets[index + 1]])
        return wrong_bytes(keys)

    def _entries(self, document: Tokens) -> list[Any]:
        store = self.segments.store
        return [placed.entry for placed in store.find(store.prefixes(document, None), 0)]

    def report(self) -> dict[str, Any]:
        self.finish()
        report = super().report()
        if self.has_connector:
            report["own"] |= self.segments.counters.totals()
        return report


@scenario
def orders(engine: Engine) -> None:
    """Documents in several orders, with heads of several lengths.

    Beginnings are new. With a context, every other prompt begins with the instructions.
    """
    rng = random.Random(1)
    texts = documents(rng)
    engine.store_segments(texts[:MISSING])
    for head_tokens in engine.plan["heads"]:
        with engine.with_heads(head_tokens):
            begun = zip(ORDERS, itertools.cycle([engine.instructions, None]), strict=False)
            prompts = [in_order(rng, texts, *each) for each in begun]
            engine.ask(f"heads {head_tokens}", prompts)
            engine.ask(f"heads {head_tokens}", [separated(rng, texts, (3, 0))])


@scenario
def exact(engine: Engine) -> None:
    """Prompts without any approximate reuse, although segments are stored."""
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


@scenario
def controls(engine: Engine) -> None:
    """Loads with wrong bytes, then right loads behind cached tokens, and then a plain request."""
    rng = random.Random(1)
    texts = documents(rng)
    instructions = random_tokens(rng, INSTRUCTIONS_TOKENS)
    prompt = in_order(rng, texts, (1, 4, 0), instructions)
    wrong: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "not rotated": engine.not_rotating,
        "swapped": lambda: engine.swapping(*(texts[index] for index in SWAPPED)),
        "zeroed keys": lambda: engine.without_keys(texts[:MISSING]),
    }
    for label, happens in wrong.items():
        engine.reset()
        with happens():
            engine.ask(f"wrong: {label}", [prompt])
    engine.reset()
    engine.ask("instructions", [instructions])
    engine.ask("right after wrong", [prompt])
    for label in ("follows", "follows unprotected"):
        engine.reset()
        with engine.unprotected() if label != "follows" else nullcontext():
            (reply,) = engine.ask("followed", [prompt])
            engine.ask(label, [prompt.token_ids + reply])


@scenario
def crowd(engine: Engine) -> None:
    """Blended requests alone. Then blended and plain ones at once, in a pool too small for them."""
    rng = random.Random(2)
    texts = documents(rng)
    engine.store_segments(texts[:MISSING])
    blended = [in_order(rng, texts, ORDERS[number % len(ORDERS)]) for number in range(8)]
    shared = random_tokens(rng, 100)
    plain = [Prompt(shared + random_tokens(rng, 60 + 31 * number)) for number in range(8)]
    for prompt in blended:
        engine.reset()
        engine.ask("alone", [prompt], ALONE_REPLY_TOKENS)
    engine.reset()
    preempted = mock.Mock()
    watch(engine.scheduler, "_preempt_request", preempted)
    outputs = [prompt for pair in zip(blended, plain, strict=True) for prompt in pair]
    engine.ask("crowd", outputs, CROWD_REPLY_TOKENS)
    engine.note("preemptions", preempted.call_count)


@scenario
def short(engine: Engine) -> None:
    """Three requests with documents that are not stored. No token of a document occurs twice."""
    rng = random.Random(4)
    texts = [rng.sample(range(4, VOCABULARY_TOKENS), SHORT_TOKENS) for _ in range(2)]
    for label, order in (("first", (0, 1)), ("second", (1, 0)), ("third", (0, 1))):
        engine.ask(label, [separated(rng, texts, order)])
        engine.learn(rng)
    engine.note_sinks()
    engine.note("why no reuse", engine.segments.checks.failure)


@scenario
def short_with_wrong_keys(engine: Engine) -> None:
    """Documents of a model that rotates keys in another way than its rotary module says."""
    turn = key_check.turn
    turning = mock.patch.object(
        key_check, "turn", lambda keys, signature, shifts: turn(keys, signature, 2 * shifts)
    )
    with turning:
        short(engine)


@scenario
def plain(engine: Engine) -> None:
    """Prompts, one after the other. There is no prefix cache."""
    for label, (prompts, reply_tokens) in engine.plan["prompts"].items():
        engine.ask(label, prompts, reply_tokens)


@cache
def let_sinks_be_float32() -> None:
    """Round the sinks of heads. The CPU's attention reads only bfloat16 ones."""
    from vllm.v1.attention.backends.cpu_attn import ops

    attend = ops.cpu_attention_with_kv_cache

    def attend_with_sinks(*args: Any, s_aux: Any = None, **more: Any) -> Any:
        return attend(*args, s_aux=None if s_aux is None else s_aux.bfloat16(), **more)

    ops.cpu_attention_with_kv_cache = attend_with_sinks
