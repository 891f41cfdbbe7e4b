# SPDX-License-Identifier: Apache-2.0
"""A few prompts, which engines of any settings answer alike."""

from __future__ import annotations

import random

from support.scenarios import scenario
from support.scenarios.engine import Engine
from support.settings_starts import MAX_TOKEN_ID

PROMPT_LENGTHS = (300, 333)
REPLY_TOKENS = 4

ON_DEVICE = "sent again"
IN_HOST_MEMORY = "behind a reset"

SEGMENTS = "segments"
"""Of the facts: which class of ours looks after them."""


@scenario
def answers(engine: Engine) -> None:
    """New prompts, the same on the device, and the same where the device has forgotten them."""
    rng = random.Random(11)
    prompts = [rng.choices(range(1, MAX_TOKEN_ID), k=length) for length in PROMPT_LENGTHS]
    for label in ("new", ON_DEVICE, IN_HOST_MEMORY):
        if label == IN_HOST_MEMORY:
            engine.finish()
            engine.reset()
        engine.ask(label, prompts, REPLY_TOKENS)
    engine.finish()
    if engine.has_connector:
        engine.note(SEGMENTS, type(engine.side.extension).__name__)
