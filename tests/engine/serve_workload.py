# SPDX-License-Identifier: Apache-2.0
"""Serve a fixed workload on the installed vLLM, in a process of its own; write what happened.

    python serve_workload.py MODEL REPORT OPTIONS

``OPTIONS`` is JSON: ``scenario`` names a function below, ``engine`` holds arguments of ``LLM``.
The process is steered by environment variables, as a user's would be. It knows the plugin only to
say whether anything is wrapped.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

VOCABULARY_TOKENS = 512
BLOCK_TOKENS = 16
POOL_BLOCKS = 480
SYSTEM_PROMPT_TOKENS = 320
DOCUMENT_TOKENS = 333

Tokens = list[int]


class Server:
    """An engine, and a report that grows with everything asked of it.

    Args:
        model: Folder of the model.
        engine_args: For ``LLM``, on top of what all runs have in common.
    """

    def __init__(self, model: str, engine_args: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(
            model,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            max_model_len=2048,
            max_num_seqs=10,
            max_num_batched_tokens=128,
            num_gpu_blocks_override=POOL_BLOCKS,
            disable_log_stats=False,
            **engine_args,
        )
        self._request_ids = count()
        self.report: dict[str, Any] = {"asked": {}}

    @property
    def _scheduler(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def _is_in_process(self) -> bool:
        return hasattr(self._llm.llm_engine.engine_core, "engine_core")

    def ask(
        self,
        label: str,
        prompts: Sequence[Tokens],
        reply_tokens: int = 24,
        extra_args: dict[str, Any] | None = None,
    ) -> list[Tokens]:
        """Send all prompts at once; report the answers under ``label`` and return the replies."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0,
            max_tokens=reply_tokens,
            ignore_eos=True,
            logprobs=5,
            detokenize=False,
            extra_args=extra_args,
        )
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
        )
        self.report["asked"][label] = {
            "answers": [
                {
                    "prompt_tokens": len(prompt),
                    "hit_tokens": output.num_cached_tokens or 0,
                    "reply": list(output.outputs[0].token_ids),
                    "logprobs": [
                        {token: entry.logprob for token, entry in step.items()}
                        for step in output.outputs[0].logprobs
                    ],
                }
                for prompt, output in zip(prompts, outputs, strict=True)
            ],
            "kept_blocks": self._kept_blocks() if self._is_in_process else None,
        }
        return [list(output.outputs[0].token_ids) for output in outputs]

    def reset(self) -> None:
        """Empty the prefix cache."""
        self.report["was_reset"] = self._llm.reset_prefix_cache()

    def corrupt(self, kind: str) -> None:
        """Zero the KV of every cached block of the groups of one kind."""
        groups = set(self._group_ids(kind))
        pool = self._scheduler.kv_cache_manager.block_pool
        block_ids = [
            block.block_id
            for block in pool.blocks
            if block.block_hash and _group_id(block.block_hash) in groups
        ]
        self._llm.collective_rpc(zero_blocks, args=(block_ids, len(pool.blocks)))

    def finish(self) -> None:
        """Add the engine's own counts to the report."""
        metrics = {metric.name: metric for metric in self._llm.get_metrics()}
        for name in ("prefix_cache_hits", "prefix_cache_queries", "num_preemptions"):
            self.report[name] = metrics[f"vllm:{name}"].value
        own = Counter()
        for metric in self._llm.get_metrics():
            if metric.name.startswith("vllm:kvext_"):
                own[metric.name.removeprefix("vllm:kvext_")] += int(metric.value)
        self.report["retention"] = own
        self.report["wrapped"] = wrapped_attributes()

    def _group_ids(self, kind: str) -> list[int]:
        from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

        spec = {"full": FullAttentionSpec, "window": SlidingWindowSpec}[kind]
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        return [
            index for index, group in enumerate(groups) if isinstance(group.kv_cache_spec, spec)
        ]

    def _kept_blocks(self) -> dict[str, list[int]]:
        """Cached blocks of each group, by the group's kind."""
        blocks = self._scheduler.kv_cache_manager.block_pool.blocks
        kept = Counter(_group_id(block.block_hash) for block in blocks if block.block_hash)
        return {
            kind: [kept[group_id] for group_id in self._group_ids(kind)]
            for kind in ("full", "window")
        }


def _group_id(block_hash: Any) -> int:
    from vllm.v1.core.kv_cache_utils import get_group_id

    return get_group_id(block_hash)


def zero_blocks(worker: Any, block_ids: list[int], pool_blocks: int) -> None:
    """Runs in the worker: overwrite blocks in every layer."""
    import torch

    index = torch.tensor(block_ids, dtype=torch.int64)
    for cache in worker.model_runner.kv_caches:
        cache.index_fill_(cache.shape.index(pool_blocks), index, 0)


def wrapped_attributes() -> list[str]:
    """Names of everything below ``vllm.v1.core`` that wrapt stands in front of."""
    from wrapt import FunctionWrapper

    modules = [m for name, m in sys.modules.items() if name.startswith("vllm.v1.core.") and m]
    owners = {value for m in modules for value in vars(m).values() if isinstance(value, type)}
    return sorted(
        f"{owner.__name__}.{name}"
        for owner in {*owners, *modules}
        for name, value in vars(owner).items()
        if isinstance(value, FunctionWrapper)
    )


def random_tokens(rng: random.Random, num_tokens: int) -> Tokens:
    return rng.choices(range(VOCABULARY_TOKENS), k=num_tokens)


def chat(server: Server) -> None:
    """Conversations with one system prompt: new, sent again, extended, edited."""
    rng = random.Random(1)
    system_prompt = random_tokens(rng, SYSTEM_PROMPT_TOKENS)
    # Two that end between blocks, two that end at a block, one of them at the unit of no hit.
    lengths = (37, 96, 151, 80)
    prompts = [system_prompt + random_tokens(rng, length) for length in lengths]
    replies = server.ask("first turn", prompts)
    server.ask("sent again", prompts)
    second = [
        prompt + reply + random_tokens(rng, 50)
        for prompt, reply in zip(prompts, replies, strict=True)
    ]
    server.ask("second turn", second)
    server.ask("edited", [prompt[:-40] + random_tokens(rng, 60) for prompt in second])


def storm(server: Server) -> None:
    """Requests that outgrow the pool together, so that some are preempted; then each goes on."""
    rng = random.Random(2)
    prompts = [random_tokens(rng, 180 + 7 * index) for index in range(10)]
    replies = server.ask("storm", prompts, reply_tokens=200)
    server.ask(
        "after the storm",
        [p + r + random_tokens(rng, 20) for p, r in zip(prompts, replies, strict=True)],
    )


def corruption(server: Server) -> None:
    """One prompt with an empty cache, an intact one, and two that were tampered with."""
    (prompt,) = [random_tokens(random.Random(3), 400)]
    server.reset()
    server.ask("empty cache", [prompt])
    server.ask("intact cache", [prompt])
    server.corrupt("window")
    server.ask("window corrupted", [prompt])
    server.reset()
    server.ask("emptied cache", [prompt])
    server.corrupt("full")
    server.ask("full corrupted", [prompt])
    server.reset()


def branches(server: Server) -> None:
    """Questions about one document, one after the other; then about another, whose end is named."""
    rng = random.Random(4)
    server.reset()
    for name, hints in (("document", None), ("hinted document", [DOCUMENT_TOKENS])):
        document = random_tokens(rng, DOCUMENT_TOKENS)
        for number in (1, 2, 3):
            extra_args = {"kvext_checkpoint_tokens": hints} if hints else None
            question = random_tokens(rng, 130 + 7 * number)
            server.ask(f"{name}, question {number}", [document + question], extra_args=extra_args)
    server.reset()


SCENARIOS = {"chat": chat, "storm": storm, "corruption": corruption, "branches": branches}


def main() -> None:
    model, report, options = sys.argv[1:]
    chosen = json.loads(options)
    server = Server(model, chosen["engine"])
    for scenario in chosen["scenarios"]:
        SCENARIOS[scenario](server)
    server.finish()
    Path(report).write_text(json.dumps(server.report))


if __name__ == "__main__":
    main()
