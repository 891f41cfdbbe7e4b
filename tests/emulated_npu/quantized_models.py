# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Quantizes models on disk in the form that vLLM-Ascend reads (``--quantization ascend``).

A file beside the weights names the kind of each tensor (``quant_model_description.json``). Weights
of 8 bits have a scale for each row. Their inputs have a scale for each token, or one for all tokens
(static). Keys and values of 8 bits (C8) have a scale for each channel. What reads these is
``vllm_ascend/quantization``: ``modelslim_config.py``, ``w8a8_dynamic.py``, ``w8a8_static.py`` and
``kv_c8.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import random_models
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

DESCRIPTION = "quant_model_description.json"
EIGHT_BITS = "W8A8_DYNAMIC"
"""Weights of 8 bits. The inputs of a layer are quantized token by token."""
STATIC = "W8A8"
"""Weights of 8 bits. One scale and one offset quantize all inputs of a layer.

vLLM-Ascend has no such experts.
"""
MIXED = "W8A8_MIX"
"""The same weights for both kinds of inputs. vLLM-Ascend decides by the role of the connector."""
KEYS_OF_EIGHT_BITS = "C8"
FLOATS = "FLOAT"

LARGEST = 127
"""The largest number of 8 bits that is used."""
LARGEST_KEY = 4.0
"""The keys of a model with norms have a size of about one."""
LARGEST_VALUE = 8.0
LARGEST_INPUT = {"o_proj": 8.0, "down_proj": 40.0}
"""The largest inputs of layers that follow no norm. Larger ones are cut off."""
LARGEST_NORMED = 4.0
INPUT_OFFSET = 3
"""The number of 8 bits that stands for an input of zero, if the scale is static."""

Described = Iterator[tuple[str, Tensor, str]]
"""Tensors of a checkpoint: the name, the tensor, and its kind."""

_LINEAR = re.compile(r"\.(?:[qkvo]_proj|gate_proj|up_proj|down_proj)\.weight$")
_LATENT = re.compile(r"\.(?:q_[ab]_proj|kv_a_proj_with_mqa)\.weight$")
_EXPERT = re.compile(r"\.(?:experts\.\d+|shared_experts)\.")


def quantize_weights(folder: Path) -> None:
    """Quantize the weights of attention, of dense layers and of experts."""
    _rewrite(folder, _quantized, {})


def quantize_weights_statically(folder: Path) -> None:
    """The same, and latents. Inputs of all layers but experts have one scale and one offset.

    vLLM-Ascend computes shared experts as the others, whose inputs are quantized token by token.
    """
    _rewrite(folder, _statically_quantized, {})


def quantize_weights_for_both(folder: Path) -> None:
    """The same, with what inputs that are quantized token by token need."""
    _rewrite(folder, _quantized_for_both, {})


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
        prefix = name.removesuffix("weight")
        numbers, scale = _in_eight_bits(weight)
        yield name, numbers, EIGHT_BITS
        yield f"{prefix}weight_scale", scale, EIGHT_BITS
        yield f"{prefix}weight_offset", torch.zeros_like(scale), EIGHT_BITS


def _statically_quantized(weights: dict[str, Tensor]) -> Described:
    """What a checkpoint has of a static layer. The weights' own scales are not among it."""
    for name, weight in weights.items():
        is_static = (_LINEAR.search(name) or _LATENT.search(name)) and not _EXPERT.search(name)
        if not is_static:
            yield from _quantized({name: weight})
            continue
        prefix, layer, _ = name.rsplit(".", 2)
        numbers, scale = _in_eight_bits(weight)
        input_scale = torch.tensor([LARGEST_INPUT.get(layer, LARGEST_NORMED) / LARGEST])
        of_offset = -INPUT_OFFSET * numbers.sum(-1, dtype=torch.int32)
        found = {
            "weight": numbers,
            "input_scale": input_scale,
            "input_offset": torch.tensor([INPUT_OFFSET], dtype=torch.int8),
            "deq_scale": input_scale * scale.flatten(),
            "quant_bias": of_offset,
        }
        for what, tensor in found.items():
            yield f"{prefix}.{layer}.{what}", tensor, STATIC


def _quantized_for_both(weights: dict[str, Tensor]) -> Described:
    for name, tensor, kind in _statically_quantized(weights):
        yield name, tensor, MIXED if kind == STATIC else kind
        if kind == STATIC and name.endswith(".weight"):
            _, scale = _in_eight_bits(weights[name])
            yield f"{name}_scale", scale, MIXED
            yield f"{name}_offset", torch.zeros_like(scale), MIXED


def _in_eight_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight as int8, and the scale of each row: ``[rows, 1]``."""
    scale = weight.abs().amax(-1, keepdim=True) / LARGEST
    return (weight / scale).round().to(torch.int8), scale


def _rewrite(
    folder: Path, rewritten: Callable[[dict[str, Tensor]], Described], description: dict[str, str]
) -> None:
    """Rewrite the weights of a model, and add to its description."""
    described = folder / DESCRIPTION
    before = json.loads(described.read_text()) if described.exists() else {}
    for file in folder.glob("*.safetensors"):
        tensors = {}
        for name, tensor, kind in rewritten(load_file(file)):
            tensors[name] = tensor.contiguous()
            description[name] = kind if kind != FLOATS else before.get(name, FLOATS)
        save_file(tensors, file, {"format": "pt"})
    described.write_text(json.dumps(before | description))


def write_eight_bits(folder: Path) -> None:
    """Full attention. Weights have 8 bits and static scales, and keys have 8 bits."""
    random_models.write(folder, random_models.full_attention())
    quantize_weights_statically(folder)
    quantize_keys(folder)


WRITERS: dict[str, Callable[[Path], None]] = {"full attention, 8 bits": write_eight_bits}
