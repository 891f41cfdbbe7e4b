# SPDX-License-Identifier: Apache-2.0
"""Serves DeepSeek-V4 with vllm-ascend on the emulated NPU, and reports what was answered.

Run by ``test_compressed_attention.py``: the report's path, and a plan in JSON.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS), str(TESTS / "engine")]

from connector_workload import Engine, Tokens  # noqa: E402

VOCABULARY_TOKENS = 512
CHUNK_TOKENS = 1024


def random_tokens(rng: random.Random, num_tokens: int) -> Tokens:
    return rng.choices(range(VOCABULARY_TOKENS), k=num_tokens)


def answers(engine: Engine) -> None:
    """In steps: windows of 128 and pages end in prompts and in replies."""
    rng = random.Random(0)
    for length in (120, 700, 2400):
        prompt = random_tokens(rng, length)
        engine.note(f"prompt of {length}", prompt)
        engine.ask(f"answer to {length}", [prompt], reply_tokens=12)


def turns(engine: Engine) -> None:
    """Conversations that go on after the device has lost them."""
    rng = random.Random(1)
    prompts = [random_tokens(rng, length) for length in (300, 700, 1500)]
    replies = engine.ask("first", prompts, reply_tokens=16)
    longer = [p + r + random_tokens(rng, 90) for p, r in zip(prompts, replies, strict=True)]
    for label in ("again", "again, nothing loaded"):
        forget_what_the_device_has(engine)
        with loading_nothing(engine, label != "again"):
            engine.ask(label, prompts, reply_tokens=16)
    forget_what_the_device_has(engine)
    engine.ask("next turn", longer, reply_tokens=16)


def holes(engine: Engine) -> None:
    """Host memory has lost the middle of a prompt."""
    rng = random.Random(2)
    prompt = random_tokens(rng, 1500)
    for label in ("hole", "hole left out"):
        engine.store([prompt])
        forget_what_the_device_has(engine)
        engine.lose_rows([(512, 640)])
        engine.take_computed_in_holes()
        with engine.leaving_out_holes(label == "hole left out"):
            engine.ask(label, [prompt], reply_tokens=12)
        engine.note(label, engine.take_computed_in_holes())
        engine.reset(is_host_too=True)


def device_hit(engine: Engine) -> None:
    """A prompt that is longer than the unit of vllm-ascend's own prefix cache, asked again."""
    rng = random.Random(3)
    prompt = random_tokens(rng, 4200)
    engine.ask("long", [prompt], reply_tokens=8)
    engine.ask("long again", [prompt], reply_tokens=8)
    spoil_cached_blocks(engine)
    engine.ask("long again, spoiled", [prompt], reply_tokens=8)


def host_bytes(engine: Engine) -> None:
    """What 1,024 tokens and the boundary behind them take in host memory."""
    from vllm_ascend_kvext.layout.host_arrangement import dense_chunk_bytes
    from vllm_ascend_kvext.layout.planner import TransferPlanner
    from vllm_ascend_kvext.layout.rows import TokenRange

    engine.reset(is_host_too=True)
    engine.store([random_tokens(random.Random(4), CHUNK_TOKENS + 1)])
    parts = range(128, CHUNK_TOKENS + 1, 128)
    rows = [entry for end_tokens in parts for entry in engine.entries("rows", end_tokens)]
    kept = [*rows, *engine.entries("tails", CHUNK_TOKENS)]
    layout, chunk = engine.worker_side._runner.layout, TokenRange(0, CHUNK_TOKENS)
    engine.note("stored pieces", len(kept))
    engine.note("stored bytes", sum(entry.num_bytes for entry in kept))
    engine.note("planned bytes", TransferPlanner(layout).chunk_bytes(chunk))
    engine.note("dense bytes", dense_chunk_bytes(layout, chunk))


def forget_what_the_device_has(engine: Engine) -> None:
    """Empty the prefix cache; where workers are in this process, pages hold wrong bytes as well."""
    if engine.has_connector:
        engine.spoil_pages()
    else:
        engine.reset()


def spoil_cached_blocks(engine: Engine) -> None:
    """What the prefix cache has is still found, and wrong."""
    executor = engine._core.model_executor
    for caches in executor.driver_worker.worker.model_runner.kv_caches:
        for tensor in caches if isinstance(caches, list | tuple) else [caches]:
            tensor.fill_(3)


@contextmanager
def loading_nothing(engine: Engine, is_on: bool) -> Iterator[None]:
    """Let loads end well that have moved nothing, where workers are in this process."""
    if not (is_on and engine.has_connector and engine.worker_side):
        yield
        return
    runner = engine.worker_side._runner
    move = runner._move

    def move_stores_only(*args: Any, **more: Any) -> None:
        if args[4].name != "HOST_TO_PAGES":
            move(*args, **more)

    runner._move = move_stores_only
    yield
    runner._move = move


def main() -> None:
    report, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    engine = Engine(plan["model"], plan["engine"])
    for scenario in plan["scenarios"]:
        globals()[scenario](engine)
    report.write_text(json.dumps(engine.report()))
    engine.shutdown()


if __name__ == "__main__":
    main()
