# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Start in this process what ``vllm serve`` would start, and report what it is.

    python start.py STAGE REPORT ARGUMENTS...

The stages: ``config`` reads the arguments like the command does, and makes the engine's
configuration, which the platform checks. ``scheduler`` also makes the scheduler with its connector,
from the model's layers. ``engine`` starts the engine, and answers a prompt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 300


def main() -> None:
    stage, report, *arguments = sys.argv[1:]
    config = engine_config(arguments)
    found = {"policy": getattr(config.kv_transfer_config, "kv_load_failure_policy", "")}
    if stage == "scheduler":
        found |= describe(make_scheduler(config))
    elif stage == "engine":
        from vllm.v1.engine.llm_engine import LLMEngine

        has_no_stats = "--disable-log-stats" in arguments
        engine = LLMEngine.from_vllm_config(config, disable_log_stats=has_no_stats)
        found |= describe(engine.engine_core.engine_core.scheduler)
        found["answer"] = answer(engine)
    from vllm.platforms import current_platform

    found["platform"] = type(current_platform).__name__
    Path(report).write_text(json.dumps(found))


def engine_config(arguments: list[str]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(parsed)
    parsed.model = parsed.model_tag
    return AsyncEngineArgs.from_cli_args(parsed).create_engine_config()


def make_scheduler(config: Any) -> Any:
    """The scheduler of an engine. Its worker has two layers. One of them may have states."""
    from vllm.v1.core import kv_cache_utils, single_type_kv_cache_manager
    from vllm.v1.structured_output import StructuredOutputManager

    single_type_kv_cache_manager.register_all_kvcache_specs(config)
    config.cache_config.num_gpu_blocks = config.cache_config.num_gpu_blocks_override
    groups = kv_cache_utils.get_kv_cache_groups(config, layer_specs(config))
    planned = kv_cache_utils.get_kv_cache_config_from_groups(
        config, groups, available_memory=1 << 30
    )
    planned = kv_cache_utils.generate_scheduler_kv_cache_config([planned])
    block_size, hash_block_size = kv_cache_utils.resolve_kv_cache_block_sizes(planned, config)
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=planned,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=hash_block_size,
    )


def layer_specs(config: Any) -> dict[str, Any]:
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    cache = config.cache_config
    model = config.model_config
    attention = {
        "block_size": cache.block_size,
        "num_kv_heads": model.get_num_kv_heads(config.parallel_config),
        "head_size": model.get_head_size(),
        "dtype": model.dtype,
        "page_size_padded": cache.mamba_page_size_padded,
    }
    specs: dict[str, Any] = {"full": FullAttentionSpec(**attention)}
    if model.is_hybrid:
        kind, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
        specs["state"] = MambaSpec(
            block_size=cache.mamba_block_size,
            shapes=kind.get_mamba_state_shape_from_config(config),
            dtypes=kind.get_mamba_state_dtype_from_config(config),
            page_size_padded=cache.mamba_page_size_padded,
            mamba_cache_mode=cache.mamba_cache_mode,
        )
    else:
        window = model.hf_text_config.sliding_window
        specs["window"] = SlidingWindowSpec(**attention, sliding_window=window)
    return specs


def describe(scheduler: Any) -> dict[str, Any]:
    from vllm_ascend_kvext.patches.repairs.scheduler import is_recovering

    return {
        "scheduler": type(scheduler).__name__,
        "connector": type(scheduler.connector).__name__,
        "recomputes": is_recovering(scheduler) and scheduler.recompute_kv_load_failures,
    }


def answer(engine: Any) -> list[int]:
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": [1] * PROMPT_TOKENS}
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    engine.add_request("0", prompt, sampling)
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return list(outputs[-1].outputs[0].token_ids)


if __name__ == "__main__":
    main()
