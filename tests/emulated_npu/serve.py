# SPDX-License-Identifier: Apache-2.0
"""Serves prompts on the emulated NPU in a process of its own, and writes what came out as JSON.

All rounds are greedy; those after the first by ``top_k``, which takes the path of a sampled token.

Usage: ``serve.py MODEL REQUEST.json RESULT.json``. A round is a list of prompts. Before the round
with the number ``spoil_before``, the values that one layer has cached are set to zero.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

BLOCK_TOKENS = 128  # vllm-ascend takes no other for these models


def main() -> None:
    from torch_npu import emulation

    folder, request_file, result_file = sys.argv[1:]
    request = json.loads(Path(request_file).read_text())
    engine = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=4096,
        max_num_batched_tokens=512,  # less than a prompt: prefill in chunks, beside decode
        num_gpu_blocks_override=200,
        enable_prefix_caching=True,
        **request.get("engine", {}),
    )
    emulation.count_operators()  # without those of the profile run
    core = engine.llm_engine.engine_core.engine_core
    common = {"max_tokens": request["reply_tokens"], "ignore_eos": True, "logprobs": 5}
    greedy = SamplingParams(temperature=0, detokenize=False, **common)
    best_of_one = SamplingParams(temperature=1, top_k=1, top_p=0.9, detokenize=False, **common)
    result: dict[str, Any] = {"rounds": []}
    for number, prompts in enumerate(request["rounds"]):
        if number == request["spoil_before"]:
            forget_values(core, layer=1)
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            best_of_one if number else greedy,
            use_tqdm=False,
        )
        result["rounds"].append([describe(output) for output in outputs])
    result["operators"] = {
        name: calls
        for name, calls in emulation.operator_counts().items()
        if not name.startswith("aten::")
    }
    result["is_async"] = core.scheduler.vllm_config.scheduler_config.async_scheduling
    result["runner"] = type(runner_of(core)).__name__
    Path(result_file).write_text(json.dumps(result))
    engine.llm_engine.engine_core.shutdown()


def describe(output: Any) -> dict[str, Any]:
    reply = output.outputs[0]
    return {
        "tokens": list(reply.token_ids),
        "cached": output.num_cached_tokens,
        "log_probabilities": [
            {str(token): entry.logprob for token, entry in step.items()} for step in reply.logprobs
        ],
    }


def runner_of(core: Any) -> Any:
    worker = core.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner


def forget_values(core: Any, layer: int) -> None:
    """Latent attention has its latents first, which hold the values; others have them last.

    Linear attention has the tokens of its convolution first, and its states last.
    """
    cached = runner_of(core).kv_caches[layer]
    is_latent = cached[0].dim() == 4 and cached[0].shape[-1] != cached[1].shape[-1]
    cached[0 if is_latent else 1].zero_()


if __name__ == "__main__":
    main()
