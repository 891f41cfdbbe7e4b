# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Small models with random weights on disk, one of each kind of attention.

Weights have a scale of 0.2, and norms are near one. At the usual scale of 0.02 all
log-probabilities are nearly the same, and a wrong page would not be detected. Heads have sizes that
the device's operators take.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3NextConfig,
)

VOCABULARY_TOKENS = 512
WINDOW_TOKENS = 200  # ends within a block of 128 tokens
COMMON = {
    "vocab_size": VOCABULARY_TOKENS,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
HEADS = COMMON | {"num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 256}
LATENT = COMMON | {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}


def full_attention(**other: int) -> PreTrainedConfig:
    """Full attention in all layers. Queries and keys are normed, and two heads share a key."""
    return Qwen3Config(**HEADS | other, num_hidden_layers=4)


def windows(window_tokens: int = WINDOW_TOKENS) -> PreTrainedConfig:
    """Five layers with a window and one without, with Gemma's norms."""
    return Gemma3TextConfig(
        **HEADS,
        num_hidden_layers=6,
        query_pre_attn_scalar=64,
        sliding_window=window_tokens,
    )


def sinks_and_experts() -> PreTrainedConfig:
    """Sinks in all layers, a window in every second layer, experts with biases, and YaRN."""
    return GptOssConfig(
        **HEADS | {"intermediate_size": 128},
        num_hidden_layers=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=128,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
            "rope_theta": 150000.0,
        },
    )


def latent() -> PreTrainedConfig:
    """Latent attention. Experts are chosen by softmax among all experts."""
    return DeepseekV2Config(**LATENT, topk_method="greedy", n_group=1, topk_group=1)


def latent_and_best_groups() -> PreTrainedConfig:
    """Latent attention. Experts are chosen by softmax in the groups with the best experts."""
    return DeepseekV2Config(
        **LATENT,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
    )


def latent_and_groups() -> PreTrainedConfig:
    """Latent attention. Experts are chosen by sigmoid and a bias in the best groups of experts."""
    return DeepseekV3Config(
        **LATENT,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        num_nextn_predict_layers=0,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
    )


def one_window_and_one_full() -> PreTrainedConfig:
    """The smallest model with two KV cache groups. Its pages leave the window soon."""
    return Gemma3TextConfig(
        **HEADS | {"num_key_value_heads": 1, "intermediate_size": 128},
        num_hidden_layers=2,
        query_pre_attn_scalar=64,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
    )


def states() -> PreTrainedConfig:
    """Three layers with states (gated delta rule), one with full attention, and experts.

    vLLM-Ascend starts only if a state has as many bytes as the keys of a whole number of blocks of
    128 tokens. Here it has as many as one block.
    """
    return Qwen3NextConfig(
        **HEADS,
        num_hidden_layers=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )


MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "full attention": full_attention,
    "windows": windows,
    "sinks, windows, experts": sinks_and_experts,
    "latent attention, experts": latent,
    "latent attention, groups of experts": latent_and_groups,
    "latent attention, best groups": latent_and_best_groups,
    "states": states,
}

CONFIGS = MODELS | {
    "one window": one_window_and_one_full,
    "windows of 120 tokens": partial(windows, 120),
    # The keys of a token have 256 bytes.
    "one head of keys": partial(full_attention, num_key_value_heads=1),
}


def write(folder: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """Writes the model to ``folder``, and returns it in float32 with the same weights."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" in name:
                tensor.add_(torch.randn_like(tensor) * 0.05)
            elif tensor.is_floating_point():
                tensor.normal_(std=1.0 if name.endswith("sinks") else 0.2)
    # The files have the form of a checkpoint. transformers can hold weights in another form in
    # memory.
    model.save_pretrained(folder)
    return model
