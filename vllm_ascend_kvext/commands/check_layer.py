# SPDX-License-Identifier: Apache-2.0
"""Find the layer for blend_check_layer of KvextConnector.

Starts vLLM without the connector, and computes a few prompts of random tokens that end with a copy
of some of them. Shows, for each layer with full attention, which share of what the copy attends to
is what followed the original. Needs neither a tokenizer nor texts. The exit status is 1 if no layer
finds it: leave blend_selector out then.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from vllm_ascend_kvext.blending.errors import BlendingError
from vllm_ascend_kvext.blending.layer_search import best_layer, copy_prompt, mean_shares
from vllm_ascend_kvext.commands.layer_search_worker import LayerSearchWorker
from vllm_ascend_kvext.settings import MODE_VARIABLE

_COPIED_TOKENS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder or name, as for vllm serve")
    parser.add_argument("--prompts", type=int, default=16, help="16")
    parser.add_argument("--tokens", type=int, default=512, help="of each prompt: 512")
    parser.add_argument(
        "--engine", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    shares = search(arguments.model, arguments.prompts, arguments.tokens, arguments.engine)
    best = best_layer(shares)
    if arguments.json:
        print(json.dumps({"blend_check_layer": best, "shares": shares}))
        return 0 if best is not None else 1
    for index, share in shares.items():
        print(f"layer {index:3}  {share:.3f}{'  <' if index == best else ''}")
    if best is None:
        print("No layer attends to what it has seen before. Leave blend_selector out.")
        return 1
    print(f'Set "blend_check_layer": {best}.')
    return 0


def search(
    model: str, num_prompts: int, num_tokens: int, options: Mapping[str, Any]
) -> dict[int, float]:
    """How much of what each layer with full attention attends to is what it is to find.

    Args:
        model: As for vLLM.
        num_prompts: That are computed.
        num_tokens: Of each.
        options: Further arguments of ``vllm.LLM``.

    Returns:
        See ``mean_shares``.

    Raises:
        BlendingError: The attention of some layer cannot be read, or there are no prompts.
    """
    if num_prompts < 1:
        raise BlendingError(f"--prompts: expected at least 1, found {num_prompts}.")
    os.environ[MODE_VARIABLE] = "off"
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # The result is on stdout.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = {
        "max_model_len": num_tokens + 1,
        "max_num_batched_tokens": num_tokens + 1,
        "max_num_seqs": 1,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "worker_extension_cls": f"{LayerSearchWorker.__module__}.{LayerSearchWorker.__qualname__}",
    }
    llm = LLM(model, **(settings | dict(options)))
    config = llm.llm_engine.model_config.hf_text_config
    first_id = getattr(config, "bos_token_id", None)
    first_ids = [first_id] if isinstance(first_id, int) else []
    rng = random.Random(0)
    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    found: dict[str, list[float | None]] = defaultdict(list)
    for _ in range(num_prompts):
        prompt = copy_prompt(rng, first_ids, config.vocab_size, num_tokens, _COPIED_TOKENS)
        llm.collective_rpc("kvext_begin_copy", args=tuple(prompt))
        llm.generate({"prompt_token_ids": list(prompt.token_ids)}, sampling, use_tqdm=False)
        for of_worker in llm.collective_rpc("kvext_end_copy"):  # stage after stage
            for name, share in of_worker.items():
                found[name].append(share)
    return mean_shares(found)
