# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, whose layers attend in different ways."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

EXAMPLES = Path(__file__).parents[2] / "examples"
VOCABULARY_TOKENS = 512
WINDOW_TOKENS = 64
WINDOWS_TOKENS = (32, 64, 160)


def example() -> ModuleType:
    """`examples/retention.py`, whose model the tests serve."""
    spec = importlib.util.spec_from_file_location("example_retention", EXAMPLES / "retention.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        spec.loader.exec_module(module)
    return module


def write_one_window(folder: Path) -> None:
    """A Gemma 3: five sliding-window layers and one full layer, in six KV cache groups."""
    example().write_model(folder, window_tokens=WINDOW_TOKENS)


def write_alternating(folder: Path) -> None:
    """Window and full layers in turns, as gpt-oss has them, in two groups of three layers."""
    write_one_window(folder)
    _change_config(folder, layer_types=["sliding_attention", "full_attention"] * 3)


def write_three_windows(folder: Path) -> None:
    """Windows of three sizes; the workload makes Gemma 3 read ``windows_tokens``."""
    write_one_window(folder)
    windows = [window for window in WINDOWS_TOKENS for _ in range(2)]
    windows_tokens = [*windows[:5], None]
    _change_config(folder, windows_tokens=windows_tokens)


def write_full(folder: Path) -> None:
    """A Llama of four layers: one KV cache group."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCABULARY_TOKENS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.2)
    config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


WRITERS: dict[str, Callable[[Path], None]] = {
    "one window": write_one_window,
    "alternating": write_alternating,
    "three windows": write_three_windows,
    "full": write_full,
}


def _change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
