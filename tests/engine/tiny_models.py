# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Tiny models with random weights. Their layers attend in different ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WINDOW_TOKENS = 64
WINDOWS_TOKENS = (32, 32, 64, 64, 160, None)
"""The window of each layer. `support.scenarios.connector` gives them to Gemma 3."""

_SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
_GEMMA3 = _SIZES | {
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "sliding_window": WINDOW_TOKENS,
    "query_pre_attn_scalar": 8,  # Attention is sharp, so each cached token matters.
}
_GPT_OSS = _SIZES | {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW_TOKENS,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 1024,
    },
    "bos_token_id": 1,
}


def _config(name: str) -> Any:
    import transformers

    match name:
        case "full":  # One KV cache group.
            return transformers.LlamaConfig(**_SIZES)
        case "qwen3":  # Keys are normalised, and then rotated.
            return transformers.Qwen3Config(**_SIZES)
        case "gpt-oss":  # A learned sink in each head, and YaRN.
            return transformers.GptOssConfig(**_GPT_OSS)
        case "one window":  # Five window layers and one full layer, in six KV cache groups.
            return transformers.Gemma3TextConfig(**_GEMMA3)
        case "alternating":  # The layers of gpt-oss alternate like this, in two groups of three.
            layer_types = ["sliding_attention", "full_attention"] * 3
            return transformers.Gemma3TextConfig(**_GEMMA3 | {"layer_types": layer_types})
        case "three windows":
            return transformers.Gemma3TextConfig(**_GEMMA3, windows_tokens=WINDOWS_TOKENS)
    raise LookupError(name)


def write(name: str, folder: Path) -> Path:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    config = _config(name)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 or parameter_name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.2)
            if parameter_name.endswith("sinks"):
                parameter.copy_(parameter.bfloat16())  # The CPU's kernel reads bfloat16 numbers.
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
