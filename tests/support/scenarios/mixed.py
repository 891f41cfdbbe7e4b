# SPDX-License-Identifier: Apache-2.0
"""Requests of all kinds in one engine with a small pool, and what its prefix cache holds then.

Rounds of requests, each in two waves: first blended ones, one that stores a segment, and such as
are aborted; then plain ones that begin like the blended ones or go on where they have ended,
blended ones that go on, and such as are aborted. What blocks hold is kept, for an engine that
follows.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from support.scenarios import scenario
from support.scenarios.documents import (
    MISSING,
    STORED_LENGTHS,
    documents,
    in_order,
    random_tokens,
)
from support.scenarios.engine import Prompt, Tokens

ROUND_REQUESTS = 25
BLENDED, SALTED, ABORTED, CONTINUED = 6, 2, 3, 3
"""Blended requests of the first wave, how many of them have a salt; aborted requests of each wave,
blended ones of the second."""
PLAIN = ROUND_REQUESTS - BLENDED - 2 * ABORTED - CONTINUED - 1
RESET_ROUNDS = 3
"""The prefix cache is emptied after so many."""
ORDERS = ((0, 1), (0, 3), (2, 0), (MISSING, 1), (3, 1, 2), (3, 4), (5, 0, 2))
SALT = "mine"
MAX_PROMPT_TOKENS = 1000
MAX_STEPS_TO_ABORT = 12


class Asked(NamedTuple):
    """A request of a wave, which is aborted after some steps of it, or ends (None)."""

    label: str
    prompt: Prompt
    steps_to_abort: int | None = None


_kept: dict[str, list[Any]] = {}
"""By plan: blocks, see ``Engine.cached_blocks``."""


@scenario
def mixed(engine: Any) -> None:
    """As many requests as the plan says, without some protections of the prefix cache."""
    with engine.without(engine.plan.get("without", ())):
        _mixed(engine)


def _mixed(engine: Any) -> None:
    rng = random.Random(3)
    texts = documents(rng)
    for cache_salt in (None, SALT):
        engine.store_segments(texts[:MISSING], cache_salt)
    instructions = [random_tokens(rng, length) for length in (21, 64)]
    kept: dict[Any, Any] = {}
    counted: Counter[str] = Counter()
    chats: list[Prompt] = []
    preempted = engine.watch_preemptions()
    for number in range(engine.plan["requests"] // ROUND_REQUESTS):
        first = _first_wave(rng, texts, instructions)
        changed = rng.randrange(len(STORED_LENGTHS))
        new_text = random_tokens(rng, STORED_LENGTHS[changed])
        first.append(Asked("stored", Prompt(new_text, [])))
        counted += _serve(engine, rng, first, chats)
        texts[changed] = new_text
        engine.finish()
        # Beside others, there may have been no room to store it.
        for cache_salt in (None, SALT):
            engine.store_segments([new_text], cache_salt)
        _keep(kept, engine.cached_blocks())
        second = _second_wave(rng, texts, chats)
        counted += _serve(engine, rng, second, chats)
        _keep(kept, engine.cached_blocks())
        if number % RESET_ROUNDS == RESET_ROUNDS - 1:
            engine.finish()
            engine.reset()
    for asked in engine.asked.values():
        for answer in asked["answers"]:
            answer["is_preempted"] = answer.pop("id") in preempted
            counted["preempted"] += answer["is_preempted"]
    _kept[engine.plan["name"]] = [block for block in kept.values() if block.prefix]
    engine.note("counted", counted)
    engine.note("blocks", len(kept))
    engine.note("blocks of no tokens", sum(not each.prefix for each in kept.values()))


def _first_wave(
    rng: random.Random, texts: Sequence[Tokens], instructions: Sequence[Tokens]
) -> list[Asked]:
    wave = []
    for number in range(BLENDED + ABORTED):
        prompt = in_order(rng, texts, rng.choice(ORDERS), rng.choice(instructions))
        if number < SALTED:
            prompt = prompt._replace(cache_salt=SALT)
        steps_to_abort = None if number < BLENDED else _some_steps(rng)
        wave.append(Asked("blended", prompt, steps_to_abort))
    return wave


def _second_wave(rng: random.Random, texts: Sequence[Tokens], chats: list[Prompt]) -> list[Asked]:
    """Of chats that have been answered in the wave before; they end here, or go on once more."""
    rng.shuffle(chats)
    going_on = [chat for chat in chats if len(chat.token_ids) < MAX_PROMPT_TOKENS]
    wave = []
    for number in range(CONTINUED + ABORTED):
        chat = going_on[number % len(going_on)]
        token_ids = chat.token_ids + random_tokens(rng, 5 + number)
        steps_to_abort = None if number < CONTINUED else _some_steps(rng)
        wave.append(Asked("blended", chat._replace(token_ids=token_ids), steps_to_abort))
    for number in range(PLAIN):
        chat = chats[number % len(chats)]
        cut = rng.randrange(len(chat.token_ids) // 2, len(chat.token_ids))
        token_ids = rng.choice(
            [
                chat.token_ids,
                chat.token_ids + random_tokens(rng, 30),
                chat.token_ids[:cut] + random_tokens(rng, 20),
            ]
        )
        salt = rng.choice([chat.cache_salt, chat.cache_salt, None, "another"])
        wave.append(Asked("plain", Prompt(token_ids, [], cache_salt=salt)))
    chats.clear()
    return wave


def _some_steps(rng: random.Random) -> int:
    return rng.randrange(1, MAX_STEPS_TO_ABORT)


def _serve(engine: Any, rng: random.Random, wave: list[Asked], chats: list[Prompt]) -> Counter[str]:
    """Serve a wave; what blended requests have become is added to the chats."""
    rng.shuffle(wave)
    replies = engine.serve_wave(wave)
    counted: Counter[str] = Counter(requests=len(wave))
    for asked, reply in zip(wave, replies, strict=True):
        counted["aborted" if reply is None else asked.label] += 1
        counted["salted"] += asked.prompt.cache_salt is not None
        if asked.label == "blended" and reply is not None:
            chats.append(asked.prompt._replace(token_ids=asked.prompt.token_ids + reply))
    return counted


def _keep(kept: dict[Any, Any], blocks: Iterable[Any]) -> None:
    """Each block once, unless what it holds has changed."""
    for block in blocks:
        pages = tuple(page.numpy().tobytes() for page in block.pages.values())
        kept.setdefault((block.prefix, block.group, hash(pages)), block)


@scenario
def recomputed(engine: Any) -> None:
    """Compare the blocks that an engine before has kept with those of the same tokens here."""
    worst = 0.0
    compared = 0
    by_prefix: dict[tuple[int, ...], list[Any]] = {}
    for each in _kept[engine.plan["of"]]:
        by_prefix.setdefault(each.prefix, []).append(each)
    left = set(by_prefix)
    while left:
        longest = max(left, key=len)
        engine.reset()
        # The last token of a prompt is computed: with one more, its last block is cached, too.
        engine.ask("recomputed", [[*longest, 5]], reply_tokens=1)
        here = {(block.prefix, block.group): block for block in engine.cached_blocks()}
        for end in range(engine.block_tokens, len(longest) + 1, engine.block_tokens):
            for each in by_prefix.pop(longest[:end], ()):
                found = here.get((each.prefix, each.group))
                if found is not None:
                    worst = max(worst, _difference(each, found))
                    compared += 1
            left.discard(longest[:end])
    engine.asked.clear()
    engine.note("largest difference", worst)
    engine.note("compared", compared)


def _difference(one: Any, other: Any) -> float:
    """The largest of any number in two blocks."""
    return max(float((page - other.pages[name]).abs().max()) for name, page in one.pages.items())
