# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Quantizes models on disk in the form that vLLM-Ascend reads (``--quantization ascend``).

A file beside the weights names the kind of each tensor (``quant_model_description.json``). Weights
of 8 bits have a scale for each row. Keys and values of 8 bits (C8) have a scale for each channel.
What reads these is ``vllm_ascend/quantization``: ``modelslim_config.py``, ``w8a8_dynamic.py`` and
``kv_c8.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

DESCRIPTION = "quant_model_description.json"
EIGHT_BITS = "W8A8_DYNAMIC"
"""Weights of 8 bits. The inputs of a layer are quantized token by token."""
KEYS_OF_EIGHT_BITS = "C8"
FLOATS = "FLOAT"

LARGEST = 127
"""The largest number of 8 bits that is used."""
LARGEST_KEY = 4.0
"""The keys of a model with norms have a size of about one."""
LARGEST_VALUE = 8.0

Described = Iterator[tuple[str, Tensor, str]]
"""Tensors of a checkpoint: the name, the tensor, and its kind."""

_LINEAR = re.compile(r"\.(?:[qkvo]_proj|gate_proj|up_proj|down_proj)\.weight$")


def quantize_weights(folder: Path) -> None:
    """Quantize the weights of attention, of dense layers and of experts."""
    _rewrite(folder, _quantized, {})


def quantize_keys(folder: Path) -> None:
    """Add the scales of keys and values. All layers have full attention."""
    config = json.loads((folder / "config.json").read_text())
    channels = config["num_key_value_heads"] * config["head_dim"]

    def with_scales(weights: dict[str, Tensor]) -> Described:
        for name, weight in weights.items():
            yield name, weight, FLOATS
        for layer in range(config["num_hidden_layers"]):
            for kind, largest in (("k", LARGEST_KEY), ("v", LARGEST_VALUE)):
                prefix = f"model.layers.{layer}.self_attn.{kind}_proj.kv_cache"
                yield f"{prefix}_scale", torch.full((channels,), largest / LARGEST), FLOATS
                yield f"{prefix}_offset", torch.zeros(channels), FLOATS

    _rewrite(folder, with_scales, {"kv_cache_type": KEYS_OF_EIGHT_BITS})


def _quantized(weights: dict[str, Tensor]) -> Described:
    for name, weight in weights.items():
        if not _LINEAR.search(name):
            yield name, weight, FLOATS
            continue
        scale = weight.abs().amax(-1, keepdim=True) / LARGEST
        prefix = name.removesuffix("weight")
        yield name, (weight / scale).round().to(torch.int8), EIGHT_BITS
        yield f"{prefix}weight_scale", scale, EIGHT_BITS
        yield f"{prefix}weight_offset", torch.zeros_like(scale), EIGHT_BITS


def _rewrite(
    folder: Path, rewritten: Callable[[dict[str, Tensor]], Described], description: dict[str, str]
) -> None:
    """Rewrite the weights of a model, and add to its description."""
    (file,) = folder.glob("*.safetensors")
    described = folder / DESCRIPTION
    before = json.loads(described.read_text()) if described.exists() else {}
    tensors = {}
    for name, tensor, kind in rewritten(load_file(file)):
        tensors[name] = tensor.contiguous()
        description[name] = kind if kind != FLOATS else before.get(name, FLOATS)
    save_file(tensors, file, {"format": "pt"})
    described.write_text(json.dumps(before | description))
