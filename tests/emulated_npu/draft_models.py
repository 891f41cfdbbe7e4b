# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Models with random weights, some of whose draft tokens are right.

The vocabulary has 512 tokens, so a random draft would be right once in 512 tokens. Here embeddings
are large beside what the layers add to them, both in the model and in its draft layer. The last
token alone therefore determines much of the next one, and both heads see it. The layers still
decide often enough that a wrong page changes an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import random_models
import torch
from safetensors.torch import load_file
from support.states.state_models import (
    DRAFT_FILE,
    EMBEDDING_SCALE,
    SLOW,
    draft_layer,
    mostly_embedding,
    save,
)
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

NUM_DRAFT_TOKENS = 2
"""Draft tokens per step. The second follows the first, so the draft layer reads its own keys."""


def write_with_mtp(folder: Path) -> None:
    """DeepSeek-V3 with its own draft layer, which predicts the token after the next."""
    config = random_models.latent_and_groups()
    # transformers knows no draft layer. The weights of the layer are written to another file.
    config.num_nextn_predict_layers = 1
    weights = _write_with_large_embeddings(folder, config)
    last, layer = (f"model.layers.{config.num_hidden_layers - less}." for less in (1, 0))
    draft = {
        layer + name.removeprefix(last): torch.randn_like(tensor) * tensor.std()
        if tensor.dim() > 1
        else tensor.clone()
        for name, tensor in weights.items()
        if name.startswith(last)
    }
    hidden = config.hidden_size
    draft |= {f"{layer}{norm}.weight": torch.ones(hidden) for norm in ("enorm", "hnorm")}
    draft[layer + "eh_proj.weight"] = mostly_embedding(hidden) * 40  # the layer adds about 17
    draft[layer + "shared_head.norm.weight"] = weights["model.norm.weight"]
    draft[layer + "shared_head.head.weight"] = weights["lm_head.weight"]
    draft[layer + "embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    save(draft, folder / DRAFT_FILE)


def write_states_with_mtp(folder: Path) -> None:
    """Qwen3-Next with its own draft layer, whose weights are in another file."""
    config = random_models.states()
    config.num_nextn_predict_layers = 1
    weights = _write_with_large_embeddings(folder, config)
    for name, tensor in weights.items():
        if name.endswith("A_log"):
            tensor.fill_(SLOW)
    save(weights, folder / "model.safetensors")
    save(draft_layer(weights, config), folder / DRAFT_FILE)


def write_with_eagle(folder: Path) -> None:
    """A model with full attention, and in ``folder / "draft"`` a head of EAGLE."""
    config = random_models.full_attention()
    weights = _write_with_large_embeddings(folder, config)
    head = LlamaConfig(
        **random_models.COMMON,
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=1,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=256,
    )
    hidden = head.hidden_size
    layer = AutoModelForCausalLM.from_config(head).model.layers
    draft = {
        f"layers.{name}": torch.randn_like(tensor) * 0.05
        for name, tensor in layer.state_dict().items()
        if "proj" in name
    }
    draft["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden)
    draft["fc.weight"] = mostly_embedding(hidden)
    draft["embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    folder = folder / "draft"
    head.save_pretrained(folder)
    save(draft, folder / "model.safetensors")


WRITERS: dict[str, Callable[[Path], None]] = {
    "full attention, EAGLE": write_with_eagle,
    "latent attention, MTP": write_with_mtp,
}
STATE_WRITERS: dict[str, Callable[[Path], None]] = {"states, MTP": write_states_with_mtp}
"""The writers of models with states, which have their own tests."""


def drafts(folder: Path) -> dict[str, object]:
    """Arguments of an engine that asks the draft layer of a model."""
    draft = folder / "draft"
    method = {"method": "eagle", "model": str(draft)} if draft.exists() else {"method": "mtp"}
    return {"speculative_config": method | {"num_speculative_tokens": NUM_DRAFT_TOKENS}}


def _write_with_large_embeddings(folder: Path, config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    model = random_models.write(folder, config)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(EMBEDDING_SCALE)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")
