# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A small DeepSeek-V4 with random weights, named as in DeepSeek's checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

SCALE = 0.2

CONFIG: Mapping[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 512,
    # The compressor takes sizes of 1,024 and more. The heads of attention and of the indexer,
    # their sizes and the number of keys that the indexer chooses are those of the real models,
    # because the operators take no others.
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4],
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 4,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 32768,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def write_model(folder: Path) -> None:
    """Write config and weights. Every call writes the same ones."""
    file = folder / "config.json"
    file.write_text(json.dumps(CONFIG))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    for name, tensor in model.state_dict().items():
        if name.endswith("tid2eid"):
            experts = CONFIG["n_routed_experts"]
            for row in tensor:
                row.copy_(torch.randperm(experts)[: len(row)])
        else:
            is_about_one = "norm" in name or name.endswith("scale")
            tensor.normal_(float(is_about_one), SCALE / _smaller(name))
    model.save_pretrained(folder)
    # transformers writes other names than DeepSeek's checkpoints have.
    file.write_text(json.dumps(CONFIG))
    weights = load_file(folder / "model.safetensors")
    named = {_deepseeks_name(name): tensor for name, tensor in weights.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})


def _deepseeks_name(name: str) -> str:
    name = name.removeprefix("model.").replace("embed_tokens", "embed")
    return name.replace("hc_head.hc_", "hc_head_").replace("attn.norm.", "attn.kv_norm.")


def _smaller(name: str) -> int:
    if "gate_proj" in name and "compressor" in name:
        return 4  # a compressor has no window of one token
    # These projections sum up over all streams, and a sigmoid follows.
    return 8 if name.endswith("fn") else 1
