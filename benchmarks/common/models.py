# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Two models with random weights. They compute little, but have the KV per token of real models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY_TOKENS = 512
MAX_MODEL_TOKENS = 6144
_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model and its KV cache.

    Attributes:
        kv_row_bytes: The bytes of keys and values of one token in one layer.
        num_groups: The number of KV cache groups that vLLM makes of the layers.
    """

    name: str
    num_layers: int
    kv_row_bytes: int
    num_groups: int
    write: Callable[[Path], None]

    def kv_bytes(self, num_tokens: int) -> int:
        """The KV bytes of some tokens if every layer keeps all of them."""
        return num_tokens * self.num_layers * self.kv_row_bytes


def write_qwen3(folder: Path, num_layers: int = 16) -> None:
    """Write a model with full attention in every layer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        **_SHAPE,
    )
    _write(folder, config, Qwen3ForCausalLM)


def write_gemma3(folder: Path) -> None:
    """Write a model with twelve layers of 1,024-token windows, and six with full attention."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=256,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 6,
        sliding_window=1024,
        query_pre_attn_scalar=256,
        **_SHAPE,
    )
    _write(folder, config, Gemma3ForCausalLM)


_SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY_TOKENS,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": MAX_MODEL_TOKENS,
    "tie_word_embeddings": False,
}


def _write(folder: Path, config: Any, model_class: type) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = model_class(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.05)
    config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


MODELS: Mapping[str, BenchModel] = {
    "qwen3": BenchModel("Qwen3-like, one group", 16, 2 * 8 * 128 * _BF16_BYTES, 1, write_qwen3),
    "gemma3": BenchModel(
        "Gemma-3-like, two window groups and a full one",
        18,
        2 * 4 * 256 * _BF16_BYTES,
        3,
        write_gemma3,
    ),
}
