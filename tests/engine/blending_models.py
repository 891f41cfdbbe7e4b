# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, whose keys are made and read in different ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import connector_models
from connector_models import VOCABULARY_TOKENS, WINDOW_TOKENS

WEIGHT_SCALE = 0.2


def write_qwen3(folder: Path) -> None:
    """Keys that are normalised before they are rotated."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(architectures=["Qwen3ForCausalLM"], **_sizes())
    _write(Qwen3ForCausalLM(config), folder)


def write_gpt_oss(folder: Path) -> None:
    """Windows and full attention in turns, a learned sink in each head, and YaRN."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        architectures=["GptOssForCausalLM"],
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW_TOKENS,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 1024,
        },
        bos_token_id=1,
        **_sizes(),
    )
    _write(GptOssForCausalLM(config), folder)


WRITERS: dict[str, Callable[[Path], None]] = {
    "llama": connector_models.write_full,
    "qwen3": write_qwen3,
    "gemma3": connector_models.write_one_window,
    "gpt-oss": write_gpt_oss,
}


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY_TOKENS,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }


def _write(model: Any, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith(("bias", "sinks")):
                parameter.normal_(std=WEIGHT_SCALE)
            if name.endswith("sinks"):
                parameter.copy_(parameter.bfloat16())  # As the CPU's kernel reads them.
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
