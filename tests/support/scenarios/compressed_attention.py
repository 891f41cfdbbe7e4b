# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""DeepSeek-V4 on vLLM-Ascend on the emulated NPU: without and with KvextConnector."""

from __future__ import annotations

import random

from support.scenarios import connector, scenario
from support.scenarios.engine import random_tokens
from support.scenarios.models import window_blocks  # noqa: F401 (plans name it)

Engine = connector.Engine
LONG_CHUNK_TOKENS = 1024


@scenario
def answers(engine: Engine) -> None:
    """Prompts in several steps. Windows of 128 tokens and pages end in prompts, and in replies."""
    rng = random.Random(0)
    for length in (120, 700, 2400):
        prompt = random_tokens(rng, length)
        engine.note(f"prompt of {length}", prompt)
        engine.ask(f"answer to {length}", [prompt], reply_tokens=12)


@scenario
def turns(engine: Engine) -> None:
    """Conversations that continue after the device has lost them."""
    rng = random.Random(1)
    prompts = [random_tokens(rng, length) for length in (300, 700, 1500)]
    replies = engine.ask("first", prompts, reply_tokens=16)
    longer = [p + r + random_tokens(rng, 90) for p, r in zip(prompts, replies, strict=True)]
    for label in ("again", "again, nothing loaded"):
        engine.spoil_pages()
        with engine.loading_nothing(label != "again"):
            engine.ask(label, prompts, reply_tokens=16)
    engine.spoil_pages()
    engine.ask("next turn", longer, reply_tokens=16)


@scenario
def holes(engine: Engine) -> None:
    """A prompt of which host memory has lost the middle."""
    rng = random.Random(2)
    prompt = random_tokens(rng, 1500)
    for label in ("hole", "hole left out"):
        engine.store([prompt])
        engine.spoil_pages()
        engine.lose_rows([(512, 640)])
        engine.take_computed_in_holes()
        with engine.leaving_out_holes(label == "hole left out"):
            engine.ask(label, [prompt], reply_tokens=12)
        engine.note(label, engine.take_computed_in_holes())
        engine.reset(is_host_too=True)


@scenario
def device_hit(engine: Engine) -> None:
    """A prompt longer than the unit of vLLM-Ascend's own prefix cache, sent twice."""
    rng = random.Random(3)
    prompt = random_tokens(rng, 4200)
    engine.ask("long", [prompt], reply_tokens=8)
    engine.ask("long again", [prompt], reply_tokens=8)
    spoil_cached_blocks(engine)
    engine.ask("long again, spoiled", [prompt], reply_tokens=8)


@scenario
def host_bytes(engine: Engine) -> None:
    """The host memory that 1,024 tokens and the boundary behind them take."""
    from support.layout.byte_memory import chunk_bytes, dense_layout
    from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk
    from vllm_ascend_kvext.token_range import TokenRange

    engine.reset(is_host_too=True)
    engine.store([random_tokens(random.Random(4), LONG_CHUNK_TOKENS + 1)])
    parts = range(128, LONG_CHUNK_TOKENS + 1, 128)
    rows = [entry for end_tokens in parts for entry in engine.entries("rows", end_tokens)]
    kept = [*rows, *engine.entries("tails", LONG_CHUNK_TOKENS)]
    layout = engine.worker_side._runner.layout
    chunk = PlacedChunk(TokenRange(0, LONG_CHUNK_TOKENS))
    engine.note("stored pieces", len(kept))
    engine.note("stored bytes", sum(entry.num_bytes for entry in kept))
    engine.note("planned bytes", chunk_bytes(layout, chunk))
    engine.note("dense bytes", chunk_bytes(dense_layout(layout), chunk))


def spoil_cached_blocks(engine: Engine) -> None:
    """Write wrong bytes to the blocks of the prefix cache. Lookups still find the blocks."""
    executor = engine.core.model_executor
    for caches in executor.driver_worker.worker.model_runner.kv_caches:
        for tensor in caches if isinstance(caches, list | tuple) else [caches]:
            tensor.fill_(3)
