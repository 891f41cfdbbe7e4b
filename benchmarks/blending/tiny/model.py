# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Folders of the trained models: Llama's layers, with full attention or, in turns, with windows.

The models were trained in three stages, each until nearly all answers were right. In the first they
copied random tokens that repeat. In the second they learned the task with one to eight documents.
In the third they learned the task with eight documents while the learning rate fell to zero. Seeds
that had not learned the task in 1,100 steps were dropped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from blending.tiny.task import BOS, EOS, VOCABULARY_TOKENS

Variant = Literal["full", "window"]

CHECK_LAYERS: Mapping[Variant, Mapping[int, int]] = {
    "full": {2: 2, 3: 2, 5: 2},
    "window": {0: 1, 1: 3, 2: 1},
}
"""By variant and seed: the full-attention layer whose attention to the documents selects best. It
was chosen on prompts that are not asked."""

NUM_LAYERS = 4
WINDOW_TOKENS = 8
"""The window, about half a document. The window of most tokens lies inside their document."""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY_TOKENS,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's CPU attention supports no smaller size.
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "torch_dtype": "float16",
}
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2),
    "sliding_window": WINDOW_TOKENS,
}


def write_folder(variant: Variant, seed: int, folder: Path) -> None:
    """Write a model folder that vLLM and transformers can load."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | (WINDOWS if variant == "window" else {})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    weights = Path(__file__).parent / "weights" / f"{variant}-{seed}.safetensors"
    shutil.copy(weights, folder / "model.safetensors")
