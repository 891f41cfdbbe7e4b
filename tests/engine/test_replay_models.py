# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The KV cache that replay has vLLM plan of a ``config.json``, against that of a real engine."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support import run_scripts

PLAN = """
import json, os, sys
os.environ["VLLM_ASCEND_KVEXT_MODE"] = "off"
from pathlib import Path
from vllm_ascend_kvext.errors import ReplayError
from vllm_ascend_kvext.replay.geometry.model_config import plan_model

folder, arguments, num_blocks, max_tokens = json.loads(sys.argv[1])
try:
    model = plan_model(Path(folder), arguments, num_blocks, max_tokens)
except ReplayError as error:
    print(json.dumps({"error": str(error)}))
else:
    groups = model.kv_cache_config.kv_cache_groups
    print(json.dumps({
        "groups": [[type(g.kv_cache_spec).__name__, g.kv_cache_spec.block_size, len(g.layer_names),
                    g.kv_cache_spec.page_size_bytes] for g in groups],
        "blocks": [model.kv_cache_config.num_blocks, model.pages.num_pages],
        "sizes": [model.scheduler_block_tokens, model.hash_block_tokens, model.num_workers],
        "pool": model.pool_bytes,
        "rows": [g.planes[0].row_bytes for g in model.pages.groups],
        "lines": model.describe(),
    }))
"""

ENGINE = """
import json, os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
from vllm import LLM

folder, block_size = json.loads(sys.argv[1])
llm = LLM(folder, block_size=block_size, enforce_eager=True, skip_tokenizer_init=True,
          max_model_len=1024, disable_hybrid_kv_cache_manager=False)
scheduler = llm.llm_engine.engine_core.engine_core.scheduler
groups = scheduler.kv_cache_config.kv_cache_groups
print(json.dumps({
    "groups": [[type(g.kv_cache_spec).__name__, g.kv_cache_spec.block_size, len(g.layer_names),
                g.kv_cache_spec.page_size_bytes] for g in groups],
    "block_size": scheduler.block_size,
}))
"""

QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "full_attention_interval": 4,
    # Replay leaves this out: this device has no kernel for such weights.
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "qk_nope_head_dim": 32,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


HYBRID = "hybrid"
PLANS: dict[str, tuple[Mapping[str, Any], tuple[str, ...], int]] = {
    "states": (QWEN3_NEXT, (), 500),
    "states on two workers": (QWEN3_NEXT, ("--tensor-parallel-size", "2"), 500),
    "latents": (DEEPSEEK, ("--tensor-parallel-size", "4"), 500),
    "small pool": (DEEPSEEK, (), 20),
    "unknown architecture": (DEEPSEEK | {"architectures": ["NoSuchModel"]}, (), 500),
    "wrong value": (DEEPSEEK | {"n_routed_experts": "x"}, (), 500),
}
"""By name: a ``config.json``, arguments of vLLM, and the number of blocks."""


@pytest.fixture(scope="module")
def found(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What replay plans, by a name of `PLANS` or `HYBRID`, and what an engine has planned."""
    folder = model_folder("three windows")
    without_weights = tmp_path_factory.mktemp(HYBRID)
    shutil.copy(folder / "config.json", without_weights)
    asked = {HYBRID: (without_weights, ("--block-size", "32"), 500)}
    for name, (config, arguments, num_blocks) in PLANS.items():
        of_plan = tmp_path_factory.mktemp("config")
        (of_plan / "config.json").write_text(json.dumps(config))
        asked[name] = (of_plan, arguments, num_blocks)
    scripts = {"engine": with_values(ENGINE, str(folder), 32)}
    for name, (of_plan, arguments, num_blocks) in asked.items():
        scripts[name] = with_values(PLAN, str(of_plan), arguments, num_blocks, 1024)
    environ = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1"}
    return {
        name: json.loads(output.splitlines()[-1])
        for name, output in run_scripts.run(scripts, environ).items()
    }


def with_values(script: str, *values: Any) -> str:
    """A script that finds values as its first argument."""
    return f"import sys\nsys.argv[1:] = [{json.dumps(values)!r}]\n{script}"


def test_the_plan_is_that_of_an_engine_and_needs_no_weights(found: dict[str, Any]) -> None:
    plan, engine = found[HYBRID], found["engine"]
    assert plan["groups"] == engine["groups"] and len(plan["groups"]) > 1
    assert plan["sizes"] == [engine["block_size"], 32, 1]
    assert plan["blocks"] == [500, 500]


def test_states_and_a_config_of_quantized_weights(found: dict[str, Any]) -> None:
    whole, half = found["states"], found["states on two workers"]
    kinds = [group[0] for group in whole["groups"]]
    assert kinds.count("FullAttentionSpec") == 1 and kinds.count("MambaSpec") == 3
    assert len({group[1] for group in whole["groups"]}) == 1
    # A worker of two has half of the heads and half of the states.
    assert half["sizes"][2] == 2
    assert [2 * row for row in half["rows"]] == whole["rows"]


def test_latents_are_the_same_on_all_workers(found: dict[str, Any]) -> None:
    plan = found["latents"]
    assert plan["groups"] == [["MLAAttentionSpec", 16, 3, 16 * 576 * 2]]
    assert plan["pool"] == 4 * 500 * 3 * 16 * 576 * 2
    assert plan["lines"] == ["group 0: 3 layers, full, 16 tokens per block, 54 KiB per block"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("small pool", "expected a pool that holds the longest request, found one of 20 bl"),
        ("unknown architecture", "expected arguments that vllm"),
        ("wrong value", "expected "),
    ],
)
def test_what_cannot_be_planned_is_named_with_what_to_do(
    name: str, expected: str, found: dict[str, Any]
) -> None:
    error = found[name]["error"]
    assert expected in error and ("--groups" in error or "--blocks" in error)
