# SPDX-License-Identifier: Apache-2.0
"""Engines with a connector that has gaps, one after the other; write what they answered.

    python gaps_workload.py REPORT PLANS

``PLANS`` is JSON: by name, what to start: ``model`` is a folder, ``engine`` holds arguments of
``LLM``. With ``leaves_out_gaps``, gaps count as computed that are not.
"""

from __future__ import annotations

import json
import random
import sys
import traceback
from pathlib import Path
from typing import Any

VOCABULARY_TOKENS = 512
BLOCK_TOKENS = 16
REPLY_TOKENS = 8

PROMPTS_TOKENS = (777, 300, 161, 1000)
LOST_BLOCKS = (
    ((4, 8), (20, 21), (40, 47)),
    ((0, 2),),
    ((9, 10),),
    ((0, 1), (5, 20), (61, 62)),
)
"""Of each prompt. The last full block is no gap, but belongs to the end that is computed."""


def prompts() -> list[list[int]]:
    rng = random.Random(32785)
    return [[rng.randrange(VOCABULARY_TOKENS) for _ in range(n)] for n in PROMPTS_TOKENS]


def serve(plan: dict[str, Any]) -> dict[str, Any]:
    """Start one engine, ask it, forget what the device has and some blocks, and ask it again."""
    import gaps_connector
    import torch
    from vllm import LLM
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    # As vLLM 0.23.0 does on a CPU; 0.20.2 asks CUDA to synchronize.
    torch.accelerator.synchronize = lambda *args, **more: None
    torch.accelerator.empty_cache = lambda *args, **more: None
    gaps_connector.KEPT.clear()
    common = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 400,
        "disable_log_stats": False,
        "distributed_executor_backend": UniProcExecutor,
    }
    llm = None
    try:
        llm = LLM(plan["model"], **common | plan["engine"])
        if plan.get("leaves_out_gaps"):
            from vllm_ascend_kvext.patches.connector import computed_token_gaps

            computed_token_gaps.add_rows = lambda *_: None
        computed = _count_computed(llm)
        asked = {"first": _ask(llm, prompts())}
        if not llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not reset")
        for prompt, lost in zip(prompts(), LOST_BLOCKS, strict=True):
            for block in (block for first, end in lost for block in range(first, end)):
                gaps_connector.KEPT.pop(tuple(prompt[: (block + 1) * BLOCK_TOKENS]), None)
        computed.clear()
        asked["together"] = _ask(llm, prompts())
        pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        held = sum(block.ref_cnt > 0 and not block.is_null for block in pool.blocks)
        return {"asked": asked, "computed": computed, "held_blocks": held}
    except Exception:
        return {"error": traceback.format_exc()}
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()


def _count_computed(llm: Any) -> list[dict[str, int]]:
    """By step, what is computed of each request and gap."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule, computed = scheduler.schedule, []

    def schedule_and_count() -> Any:
        output = schedule()
        if output.num_scheduled_tokens:
            computed.append(dict(output.num_scheduled_tokens))
        return output

    scheduler.schedule = schedule_and_count
    return computed


def _ask(llm: Any, asked: list[list[int]]) -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=REPLY_TOKENS, ignore_eos=True, logprobs=5, detokenize=False
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in asked], sampling, use_tqdm=False
    )
    return {
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
            for prompt, output in zip(asked, outputs, strict=True)
        ]
    }


def main() -> None:
    report, plans = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parent))
    reports = {name: serve(plan) for name, plan in json.loads(plans).items()}
    Path(report).write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
