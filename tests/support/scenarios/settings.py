# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A few prompts. Engines with any settings give the same answers to them."""

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
"""The name of the fact with the class that handles segments."""


@scenario
def answers(engine: Engine) -> None:
    """Prompts that are new, that the device has, and that the device has forgotten."""
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
