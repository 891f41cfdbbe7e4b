# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Prompts whose KV stays on the device. Environment variables control this, as for users.

The engine uses the package only to report whether anything is wrapped. Its core may be in another
process.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from typing import Any

from support.scenarios import engine as scenarios_engine
from support.scenarios import scenario
from support.scenarios.engine import Tokens, random_tokens

POOL_TOKENS = 7680
"""The size of the pool for all groups together. The pool is too small for the storm."""

SYSTEM_PROMPT_TOKENS = 320
DOCUMENT_TOKENS = 333


class Engine(scenarios_engine.Engine):
    """An engine that reports its cached blocks and its metrics."""

    def ask(self, label: str, *args: Any, **more: Any) -> list[Tokens]:
        replies = super().ask(label, *args, **more)
        self.asked[label]["kept_blocks"] = self._kept_blocks() if self.core is not None else None
        return replies

    def reset(self, is_host_too: bool = False) -> None:
        """Empty the prefix cache."""
        self.was_reset = self.llm.reset_prefix_cache()

    def corrupt(self, kind: str) -> None:
        """Set the KV of every cached block to zero, in the groups of one kind."""
        groups = set(self._group_ids(kind))
        pool = self.scheduler.kv_cache_manager.block_pool
        block_ids = [
            block.block_id
            for block in pool.blocks
            if block.block_hash and _group_id(block.block_hash) in groups
        ]
        self.llm.collective_rpc(zero_blocks, args=(block_ids, len(pool.blocks)))

    def report(self) -> dict[str, Any]:
        metrics = {metric.name: metric for metric in self.llm.get_metrics()}
        own: Counter[str] = Counter()
        for metric in self.llm.get_metrics():
            if metric.name.startswith("vllm:kvext_"):
                own[metric.name.removeprefix("vllm:kvext_")] += int(metric.value)
        return {
            "asked": self.asked,
            "was_reset": getattr(self, "was_reset", None),
            "prefix_cache_hits": metrics["vllm:prefix_cache_hits"].value,
            "num_preemptions": metrics["vllm:num_preemptions"].value,
            "retention": own,
            "wrapped": wrapped_attributes(),
        }

    def _group_ids(self, kind: str) -> list[int]:
        from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

        spec = {"full": FullAttentionSpec, "window": SlidingWindowSpec}[kind]
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        return [
            index for index, group in enumerate(groups) if isinstance(group.kv_cache_spec, spec)
        ]

    def _kept_blocks(self) -> dict[str, list[int]]:
        """The cached blocks of each group, by the kind of the group."""
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        kept = Counter(_group_id(block.block_hash) for block in blocks if block.block_hash)
        return {
            kind: [kept[group_id] for group_id in self._group_ids(kind)]
            for kind in ("full", "window")
        }


def _group_id(block_hash: Any) -> int:
    from vllm.v1.core.kv_cache_utils import get_group_id

    return get_group_id(block_hash)


def zero_blocks(worker: Any, block_ids: list[int], pool_blocks: int) -> None:
    """Overwrite blocks in every layer. The function runs in the worker."""
    import torch

    index = torch.tensor(block_ids, dtype=torch.int64)
    for cache in worker.model_runner.kv_caches:
        cache.index_fill_(cache.shape.index(pool_blocks), index, 0)


def wrapped_attributes() -> list[str]:
    """The names of everything in ``vllm.v1.core`` that wrapt has wrapped."""
    from wrapt import FunctionWrapper

    modules = [m for name, m in sys.modules.items() if name.startswith("vllm.v1.core.") and m]
    owners = {value for m in modules for value in vars(m).values() if isinstance(value, type)}
    return sorted(
        f"{owner.__name__}.{name}"
        for owner in {*owners, *modules}
        for name, value in vars(owner).items()
        if isinstance(value, FunctionWrapper)
    )


@scenario
def chat(engine: Engine) -> None:
    """Conversations with one system prompt: new, sent again, extended, and edited."""
    rng = random.Random(1)
    system_prompt = random_tokens(rng, SYSTEM_PROMPT_TOKENS)
    # Two prompts end inside blocks. Two end at a block, one of them not at a unit of hits.
    lengths = (37, 96, 151, 80)
    prompts = [system_prompt + random_tokens(rng, length) for length in lengths]
    replies = engine.ask("first turn", prompts)
    engine.ask("sent again", prompts)
    second = [
        prompt + reply + random_tokens(rng, 50)
        for prompt, reply in zip(prompts, replies, strict=True)
    ]
    engine.ask("second turn", second)
    engine.ask("edited", [prompt[:-40] + random_tokens(rng, 60) for prompt in second])


@scenario
def storm(engine: Engine) -> None:
    """Requests that together outgrow the pool, so some are preempted. Then each continues."""
    rng = random.Random(2)
    prompts = [random_tokens(rng, 180 + 7 * index) for index in range(10)]
    replies = engine.ask("storm", prompts, reply_tokens=200)
    engine.ask(
        "after the storm",
        [p + r + random_tokens(rng, 20) for p, r in zip(prompts, replies, strict=True)],
    )


@scenario
def corruption(engine: Engine) -> None:
    """One prompt: with an empty cache, with an intact cache, and with two corrupted caches."""
    prompt = random_tokens(random.Random(3), 400)
    engine.reset()
    engine.ask("empty cache", [prompt])
    engine.ask("intact cache", [prompt])
    engine.corrupt("window")
    engine.ask("window corrupted", [prompt])
    engine.reset()
    engine.ask("emptied cache", [prompt])
    engine.corrupt("full")
    engine.ask("full corrupted", [prompt])
    engine.reset()


@scenario
def branches(engine: Engine) -> None:
    """Questions about one document, one by one. Then about another document, whose end is named."""
    rng = random.Random(4)
    engine.reset()
    for name, hints in (("document", None), ("hinted document", [DOCUMENT_TOKENS])):
        document = random_tokens(rng, DOCUMENT_TOKENS)
        for number in (1, 2, 3):
            arguments = {"kvext_checkpoint_tokens": hints} if hints else None
            question = random_tokens(rng, 130 + 7 * number)
            engine.ask(f"{name}, question {number}", [document + question], arguments=arguments)
    engine.reset()
