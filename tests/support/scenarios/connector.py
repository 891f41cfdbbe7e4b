# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Prompts with and without a KvextConnector. KV is stored, loaded, lost, and made wrong.

A scenario sends the same prompts to every engine. Without a connector, it leaves out the steps that
need one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from support.scenarios import engine as scenarios_engine
from support.scenarios import scenario, sleep
from support.scenarios.engine import (
    CHUNK_TOKENS,
    Prompt,
    Tokens,
    random_tokens,
    watch,
    wrong_bytes,
)

sleeps = sleep.sleeps

PROMPT_LENGTHS = (300, 777, 64, 65, 16, 17)
DOCUMENT_TOKENS = 333
DAMAGED_TOKENS = 400
DAMAGED_BOUNDARIES_TOKENS = {"rows": CHUNK_TOKENS, "tails": 384}
"""The boundaries of damaged entries: the first chunk's end, and where the prompt resumes."""

HOLES_TOKENS = {
    "at the beginning": [(0, CHUNK_TOKENS)],
    "in the middle": [(2 * CHUNK_TOKENS, 3 * CHUNK_TOKENS)],
    "several": [(CHUNK_TOKENS, 2 * CHUNK_TOKENS), (3 * CHUNK_TOKENS, 5 * CHUNK_TOKENS)],
}
"""The tokens whose rows host memory loses."""

LONE_TURNS_TOKENS = (977, 1105, 1122)
"""The lengths of a conversation's prompts. All end inside chunks, the last two one block apart."""
LONE_REPLY_TOKENS = 8
LONE_HOLES_TOKENS = {
    "intact": (0, []),
    "at the beginning": (0, [(0, CHUNK_TOKENS)]),
    "adjacent, in one chunk": (0, [(960, 976), (976, 1024)]),
    "several": (0, [(0, 128), (128, 256), (512, 640)]),
    "at the end of the first turn": (0, [(960, 976)]),
    "at the last full block": (0, [(1104, 1120)]),
    "everything": (0, [(0, 1120)]),
    "behind what the device has": (256, [(256, 384)]),
    "on the device and behind it": (256, [(128, 256), (256, 384)]),
}
"""The tokens that the device has, and the tokens whose entries host memory loses."""

COMMON_TOKENS = 192
QUESTION_LENGTHS = (44, 60, 50, 40, 90)
"""Questions behind a common beginning. The windows of the first four reach into it."""

CONTINUED_QUESTION = 3
"""The number of the question whose tails are lost in part."""

NUM_EVICTED_PROMPTS = 8
STORM_REPLY_TOKENS = 250
SMALL_POOL_TOKENS = 5600
"""The size of the pool for all groups together. The pool is too small for the storm."""


class Engine(scenarios_engine.Engine):
    """An engine that reports the state of its connector, if it has one."""

    def __init__(self, plan: dict[str, Any]) -> None:
        if "windows_tokens" in Path(plan["model"], "config.json").read_text():
            let_layers_have_windows()
        super().__init__(plan)

    def take_up(self, core: Any) -> None:
        super().take_up(core)
        self._hole_tokens = 0
        self.prefixes: dict[tuple[int, ...], Any] = {}
        if self.has_connector:
            self._count_what_becomes_of_holes()
        self._count_what_the_scheduler_counts()

    def entries(self, kind: str, end_tokens: int) -> list[Any]:
        """The entries of one kind, ``rows`` or ``tails``, that end at this token.

        They are in the order of their stores.
        """
        found = [
            entry
            for entry in self.side.tier._entries.values()
            if entry.piece.kind.name.lower() == kind and entry.piece.end_tokens == end_tokens
        ]
        return sorted(found, key=lambda entry: entry.number)

    def hit_of(self, prompt: Tokens) -> Any:
        """What host memory has of a prompt that was asked before."""
        return self.side.tier.look_up(self.prefixes[tuple(prompt)], len(prompt) - 1)

    def lose_rows(self, lost: Sequence[Sequence[int]], prompt: Tokens | None = None) -> None:
        """Evict the entries with these tokens, of any prompt or of a given one."""
        if not self.has_connector:
            return
        from support.connector.lost_rows import holds_rows_of

        lost_entries = {entry for entry in self._entries_of(prompt) if holds_rows_of(entry, lost)}
        self.side.tier.evict(lost_entries.__contains__)

    def _entries_of(self, prompt: Tokens | None) -> list[Any]:
        """All entries of host memory, or those with rows of a given prompt."""
        if prompt is None:
            return list(self.side.tier._entries.values())
        # The last token is always computed, so a block that ends with it is of no use.
        full_tokens = (len(prompt) - 1) // self.block_tokens * self.block_tokens
        runs = self.side.tier.lookup(self.prefixes[tuple(prompt)]).find_runs(full_tokens, 0)
        return [entry for run in runs for entry in run.entries]

    @contextmanager
    def leaving_out_holes(self, is_left_out: bool) -> Iterator[None]:
        """Let holes that are not computed count as computed."""
        if not (self.has_connector and is_left_out):
            yield
            return
        side = self.side
        take_rows = side.take_hole_rows

        def take_no_rows(*args: Any) -> list[Any]:
            take_rows(*args)
            side._hole_tokens = 0
            return []

        side.take_hole_rows = take_no_rows
        yield
        del side.take_hole_rows

    def take_computed_in_holes(self) -> int:
        """The number of tokens since the last call."""
        if not self.has_connector:
            return 0
        before = self._hole_tokens
        self._hole_tokens = self.side.counters.hole_tokens
        return int(self._hole_tokens - before)

    def _count_what_the_scheduler_counts(self) -> None:
        """Count what the scheduler's statistics have. vLLM drops those of steps without answers."""
        scheduler = self.scheduler
        counted = self.counted

        def note_stats(stats: Any, *_: Any, **__: Any) -> None:
            for name in ("prefix_cache_stats", "connector_prefix_cache_stats"):
                of_cache = getattr(stats, name, None)
                if of_cache is not None:
                    counted[name.removesuffix("_prefix_cache_stats")] += of_cache.hits

        def note_preemption(*_: Any, **__: Any) -> None:
            counted["preemptions"] += 1

        def note_drafts(
            *_: Any, num_draft_tokens: int, num_accepted_tokens: int, **__: Any
        ) -> None:
            counted["draft tokens"] += num_draft_tokens
            counted["accepted draft tokens"] += num_accepted_tokens

        def note_step(_: Any, output: Any, *__: Any) -> None:
            counted["computed tokens"] += (
                output.total_num_scheduled_tokens
            )  # Rows of holes are included.
            counted["steps"] += 1
            counted["steps before another schedule"] += "schedule" in vars(scheduler)

        watch(scheduler, "make_stats", note_stats)
        watch(scheduler, "make_spec_decoding_stats", note_drafts)
        watch(scheduler, "_preempt_request", note_preemption)
        watch(scheduler, "update_from_output", note_step)

    def _count_what_becomes_of_holes(self) -> None:
        """Count the tokens of holes, and remember the hashes under which prompts are stored."""
        side = self.side
        counted = self.counted
        end = side._loads.end
        add_request = self.scheduler.add_request

        def note_holes(holes: list[Any]) -> None:
            counted["hole tokens"] += sum(of_request.num_tokens for of_request in holes)

        def end_and_count(*args: Any) -> Any:
            before = side.counters.behind_hole_tokens
            lacking = end(*args)
            counted["tokens behind holes"] += side.counters.behind_hole_tokens - before
            return lacking

        def add_and_remember(request: Any) -> None:
            self.prefixes[tuple(request.prompt_token_ids)] = side._view.prefix(request)
            add_request(request)

        watch(side.holes, "take_new_holes", note_holes)
        side._loads.end = end_and_count
        self.scheduler.add_request = add_and_remember


@scenario
def turns(engine: Engine) -> None:
    """Prompts that end at many places of a block: new ones, the same again, and next turns."""
    rng = random.Random(1)
    prompts = [random_tokens(rng, length) for length in PROMPT_LENGTHS]
    replies = engine.ask("cold", prompts)
    engine.reset()
    engine.ask("warm", prompts)
    engine.ask("twice", prompts)
    engine.reset()
    second = [p + r + random_tokens(rng, 50) for p, r in zip(prompts, replies, strict=True)]
    engine.ask("second turn", second)
    engine.reset(is_host_too=True)
    engine.ask("forgotten", prompts[:1])
    engine.reset(is_host_too=True)


@scenario
def document(engine: Engine) -> None:
    """Questions about one document. The last four come at the same time."""
    rng = random.Random(2)
    document = random_tokens(rng, DOCUMENT_TOKENS)
    questions = [random_tokens(rng, 90 + 7 * number) for number in range(6)]
    engine.ask("first question", [document + questions[0]])
    engine.reset()
    engine.ask("second question", [document + questions[1]])
    engine.reset()
    engine.ask("four questions", [document + question for question in questions[2:]])
    engine.reset(is_host_too=True)


@scenario
def salts(engine: Engine) -> None:
    """One prompt with each of two salts, and without a salt."""
    prompt = random_tokens(random.Random(3), 200)
    engine.ask("salted", [Prompt(prompt, cache_salt="mine")])
    for label, salt in (("other salt", "yours"), ("no salt", None), ("same salt", "mine")):
        engine.reset()
        engine.ask(label, [Prompt(prompt, cache_salt=salt)])
    engine.reset(is_host_too=True)


@scenario
def damage(engine: Engine) -> None:
    """A prompt whose bytes in host memory are intact, zeroed, or those of another prompt.

    Rows of one prompt may change places, because keys are already rotated, and attention reads a
    set.
    """
    rng = random.Random(4)
    prompt, other = (random_tokens(rng, DAMAGED_TOKENS) for _ in range(2))
    for damage in ("intact", "zeroed rows", "swapped rows", "zeroed tails", "swapped tails"):
        engine.ask(f"before {damage}", [prompt], reply_tokens=2)
        engine.ask(f"other before {damage}", [other], reply_tokens=2)
        engine.reset()
        wrong: list[Any] = []
        if engine.has_connector and damage != "intact":
            what, _, kind = damage.partition(" ")
            entries = engine.entries(kind, DAMAGED_BOUNDARIES_TOKENS[kind])
            engine.note(damage, [(entry.piece.first_tokens, entry.num_bytes) for entry in entries])
            wrong = [[engine.host_bytes(entry)] for entry in entries[: 2 if "swap" in what else 1]]
        with wrong_bytes(*wrong) if wrong else nullcontext():
            engine.ask(damage, [prompt], reply_tokens=8)
        engine.reset(is_host_too=True)


@scenario
def continued_tails(engine: Engine) -> None:
    """Questions behind a common beginning, whose tails continue those of the beginning.

    Then a part of such tails is zeroed, or cannot be read.
    """
    rng = random.Random(17)
    common = random_tokens(rng, COMMON_TOKENS)
    questions = [common + random_tokens(rng, length) for length in QUESTION_LENGTHS]
    for question in questions:
        engine.ask("questions", [question], reply_tokens=2)
        engine.reset()
    if engine.has_connector:
        chains = [engine.hit_of(question).tails.chain for question in questions]
        engine.note("chains", [[entry.piece[1:] for entry in chain] for chain in chains])
    engine.spoil_pages()
    engine.ask("questions again", questions)
    question = questions[CONTINUED_QUESTION]
    for number, part in enumerate(("base", "rest")):
        engine.spoil_pages()
        wrong: list[Any] = []
        if engine.has_connector:
            wrong = [engine.host_bytes(engine.hit_of(question).tails.chain[number])]
        with wrong_bytes(wrong):
            engine.ask(f"zeroed {part}", [question], reply_tokens=8)
    engine.spoil_pages()
    chain: tuple[Any, ...] = ()
    numbers: tuple[int, ...] = ()
    if engine.has_connector:
        from vllm_ascend_kvext.holes.load_plan import plan_of_hit

        hit = engine.hit_of(question)
        chain = hit.tails.chain
        numbers = (1, 2 + plan_of_hit(hit).entries.index(chain[0]))
    # The load of all parts fails, and then that of the tails that others continue.
    with engine.failing("load", numbers=numbers):
        engine.ask("base fails", [question])
    engine.note("chain that has failed", [entry.state.value for entry in chain])
    engine.spoil_pages()
    engine.ask("after the base has failed", questions)
    engine.reset(is_host_too=True)


@scenario
def failures(engine: Engine) -> None:
    """Transfers that fail, and the requests after them."""
    rng = random.Random(5)
    prompts = [random_tokens(rng, 130 + 40 * number) for number in range(4)]
    with engine.failing("store"):
        engine.ask("failing stores", prompts)
        engine.reset()
    engine.ask("after failed stores", prompts)
    engine.spoil_pages()  # Rows that are not loaded would be wrong.
    with engine.failing("load"):
        engine.ask("failing loads", prompts)
        engine.spoil_pages()
    engine.ask("after failed loads", prompts)
    engine.reset()
    engine.ask("after failures", prompts)
    engine.reset()
    prompt = random_tokens(rng, max(250, 4 * engine.block_tokens - 20))
    engine.ask("before one part fails", [prompt])
    engine.spoil_pages()
    # The load of all parts fails, and then the load of the first chunk alone.
    with engine.failing("load", numbers=(1, 2)):
        engine.ask("one part fails", [prompt])
    engine.reset(is_host_too=True)


@scenario
def storm(engine: Engine) -> None:
    """Requests that together outgrow the pool, so some are preempted. Then each continues."""
    _crowd(engine, "storm", [180 + 7 * number for number in range(10)], STORM_REPLY_TOKENS)


@scenario
def large_storm(engine: Engine) -> None:
    """Requests that outgrow a pool of twice the size."""
    _crowd(engine, "large storm", [150 + 3 * number for number in range(16)], 250)


def _crowd(engine: Engine, label: str, lengths: Sequence[int], reply_tokens: int) -> None:
    rng = random.Random(label)
    prompts = [random_tokens(rng, length) for length in lengths]
    replies = engine.ask(label, prompts, reply_tokens=reply_tokens)
    engine.reset()
    following = [p + r + random_tokens(rng, 20) for p, r in zip(prompts, replies, strict=True)]
    engine.ask(f"after the {label}", following)
    engine.reset(is_host_too=True)


@scenario
def eviction(engine: Engine) -> None:
    """More prompts than a small host memory can hold, sent three times."""
    rng = random.Random(7)
    prompts = [random_tokens(rng, 200 + 9 * number) for number in range(NUM_EVICTED_PROMPTS)]
    for number in (1, 2, 3):
        for index, prompt in enumerate(prompts):
            engine.ask(f"round {number}, prompt {index}", [prompt], reply_tokens=4)
            engine.reset()


@scenario
def holes(engine: Engine) -> None:
    """Prompts of which host memory has lost chunks. All pages of the device have wrong bytes."""
    rng = random.Random(9)
    shared = random_tokens(rng, 6 * CHUNK_TOKENS)
    prompts = [shared + random_tokens(rng, length) for length in (1, 130, 200)]
    for name, lost in HOLES_TOKENS.items():
        engine.ask("stored", prompts)
        for label in ("hole", "hole left out"):
            engine.spoil_pages()
            engine.lose_rows(lost)
            with engine.leaving_out_holes(label == "hole left out"):
                engine.ask(f"{label}: {name}", prompts, reply_tokens=8)
                engine.note(f"{label}: {name}", engine.take_computed_in_holes())
        engine.reset(is_host_too=True)


@scenario
def lone_holes(engine: Engine) -> None:
    """The turns of a conversation, one at a time. So all computed tokens belong to the turn."""
    rng = random.Random(10)
    for name, (device_tokens, lost) in LONE_HOLES_TOKENS.items():
        prompt = random_tokens(rng, LONE_TURNS_TOKENS[-1])
        engine.store([prompt[:end_tokens] for end_tokens in LONE_TURNS_TOKENS])
        engine.spoil_pages()
        if device_tokens:
            engine.store([prompt[: device_tokens + 1]])
        engine.lose_rows(lost, prompt)
        engine.ask(f"lone hole: {name}", [prompt], reply_tokens=LONE_REPLY_TOKENS)
        engine.reset(is_host_too=True)


SHARED_LENGTHS = (300, 777, 65)
SHARED_TOKENS = 500
"""The tokens that another prompt shares with the second one. They end inside a chunk."""


@scenario
def shared(engine: Engine) -> None:
    """Prompts that other engines may have put into a shared tier. This engine also puts them."""
    rng = random.Random("shared")
    prompts = [random_tokens(rng, length) for length in SHARED_LENGTHS]
    engine.ask("shared", prompts)
    engine.finish()
    engine.ask("shared, again", prompts)
    engine.finish()
    parting = [*prompts[1][:SHARED_TOKENS], *random_tokens(rng, 100)]
    engine.ask("shared, parting", [parting])
    engine.finish()
    engine.ask("shared, salted", [Prompt(prompts[0], cache_salt="x")])
    engine.finish()


@scenario
def shared_for_long(engine: Engine) -> None:
    """Prompts for a shared tier, and then more prompts until the process is killed."""
    shared(engine)
    rng = random.Random("for long")
    while True:
        engine.ask("for long", [random_tokens(rng, 1024) for _ in range(4)], reply_tokens=1)


@cache
def let_layers_have_windows() -> None:
    """Give each layer of Gemma 3 its own window, if the config has ``windows_tokens``."""
    import copy

    from vllm.model_executor.models.gemma3 import Gemma3Attention
    from vllm.model_executor.models.utils import extract_layer_index

    make = Gemma3Attention.__init__

    def make_with_window(self: Any, config: Any, *args: Any, prefix: str = "", **more: Any) -> None:
        windows_tokens = getattr(config, "windows_tokens", None)
        if windows_tokens is not None:
            config = copy.copy(config)
            config.sliding_window = windows_tokens[extract_layer_index(prefix)]
        make(self, config, *args, prefix=prefix, **more)

    Gemma3Attention.__init__ = make_with_window
