# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Prompts that are asked twice, so that the second hit ends wherever a unit of hits ends."""

from __future__ import annotations

import random
from typing import Any

from support.scenarios import engine, scenario
from support.scenarios.engine import Tokens, random_tokens

REPLY_TOKENS = 3
NUM_AT_A_TIME = 8
"""Prompts that are seen before the first of them is seen again."""

Engine = engine.Engine


def random_prompts(engine: Any) -> list[Tokens]:
    """Prompts of 1 to 13 units. The plan says how many there are."""
    rng = random.Random(31)
    unit = engine.plan["unit_tokens"]
    return [
        random_tokens(rng, rng.randrange(unit + 2, 13 * unit))
        for _ in range(engine.plan["num_requests"])
    ]


@scenario
def seen_twice(engine: Engine) -> None:
    """Prompts, and the same prompts again while the pool still has them."""
    prompts = random_prompts(engine)
    for start in range(0, len(prompts), NUM_AT_A_TIME):
        for label in ("first", "again"):
            for prompt in prompts[start : start + NUM_AT_A_TIME]:
                engine.ask(label, [prompt], REPLY_TOKENS)
