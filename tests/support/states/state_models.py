# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Small models with states and random weights. One has a draft layer (MTP).

Weights have a scale of 0.2, so that a wrong page changes an answer. The weights of states that say
how fast they forget stay as transformers draws them, with one exception: the gated delta rule would
forget within a few tokens, so that a lost state would not be seen. With ``A_log = -4`` it does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

NAMES = ("qwen3-next", "falcon-h1", "granite", "nemotron-h")
DRAFT_FILE = "model-draft.safetensors"
"""The file of the draft layer, which transformers does not know."""

SLOW = -4.0
"""The ``A_log`` of gated delta rules."""

EMBEDDING_SCALE = 100.0
"""The factor of embeddings where drafts shall be right now and then.

The last token alone then determines much of the next one, and both heads see it.
"""

_SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 32, "mamba_d_conv": 4}


def config_of(name: str) -> Any:
    """The configuration of a model.

    The states of the first one fit blocks of 16 tokens, also with two draft tokens. The others need
    blocks of about a hundred tokens.
    """
    import transformers

    match name:
        case "qwen3-next" | "qwen3-next, two layers per group":
            periods = 2 if "two" in name else 1
            return transformers.Qwen3NextConfig(
                **_SIZES,
                head_dim=64,
                num_hidden_layers=4 * periods,
                layer_types=(["linear_attention"] * 3 + ["full_attention"]) * periods,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=24,
                linear_value_head_dim=24,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                shared_expert_intermediate_size=64,
            )
        case "falcon-h1":  # Each layer has attention beside a state.
            return transformers.FalconH1Config(
                **_SIZES,
                **_MAMBA2,
                head_dim=32,
                num_hidden_layers=4,
                mamba_d_ssm=256,
                mamba_d_head=32,
                mamba_chunk_size=64,
            )
        case "granite":
            return transformers.GraniteMoeHybridConfig(
                **_SIZES,
                **_MAMBA2,
                num_hidden_layers=4,
                layer_types=["mamba", "mamba", "mamba", "attention"],
                mamba_d_head="auto",
                mamba_expand=2,
                mamba_chunk_size=64,
                num_local_experts=4,
                num_experts_per_tok=2,
                shared_intermediate_size=128,
                position_embedding_type="rope",
            )
        case "nemotron-h":
            return transformers.NemotronHConfig(
                **_SIZES,
                head_dim=32,
                layers_block_type=["mamba", "mlp", "attention", "mamba"],
                mamba_num_heads=8,
                mamba_head_dim=32,
                ssm_state_size=32,
                n_groups=2,
                conv_kernel=4,
                chunk_size=64,
                mlp_hidden_act="relu2",
            )
    raise LookupError(name)


def write(folder: Path, name: str, has_drafts: bool = False) -> Path:
    """Write a model.

    Args:
        has_drafts: Whether drafts by n-grams or by a draft layer shall be right now and then. A
            Qwen3-Next gets a draft layer.
    """
    from transformers import AutoModelForCausalLM

    config = config_of(name)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, tensor in model.state_dict().items():
            if parameter_name.endswith("A_log") and name.startswith("qwen3-next"):
                tensor.fill_(SLOW)
            elif parameter_name.endswith(("A_log", "dt_bias", ".D")):
                pass
            elif "norm" in parameter_name:
                tensor.add_(torch.randn_like(tensor) * 0.05)
            elif tensor.is_floating_point():
                tensor.normal_(std=0.2)
        if has_drafts:
            model.get_input_embeddings().weight.mul_(EMBEDDING_SCALE)
    config.architectures = [type(model).__name__]
    if has_drafts and name.startswith("qwen3-next"):
        config.num_nextn_predict_layers = 1
    model.save_pretrained(folder)
    if has_drafts and name.startswith("qwen3-next"):
        _write_draft_layer(folder, config)
    return folder


def _write_draft_layer(folder: Path, config: Any) -> None:
    save(draft_layer(load_file(folder / "model.safetensors"), config), folder / DRAFT_FILE)


def draft_layer(weights: Mapping[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """A draft layer of Qwen3-Next: like the last layer, with mostly the last token's embedding."""
    last = f"model.layers.{config.num_hidden_layers - 1}."
    draft = {
        "mtp.layers.0." + name.removeprefix(last): torch.randn_like(tensor) * tensor.std()
        if tensor.dim() > 1
        else tensor.clone()
        for name, tensor in weights.items()
        if name.startswith(last)
    }
    hidden = config.hidden_size
    draft["mtp.fc.weight"] = mostly_embedding(hidden) * 40  # The layer adds about 17.
    draft["mtp.norm.weight"] = weights["model.norm.weight"].clone()
    for name in ("pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        draft[f"mtp.{name}.weight"] = torch.zeros(hidden)  # These norms add one.
    return draft


def mostly_embedding(hidden_size: int) -> torch.Tensor:
    """A projection of an embedding and a hidden state side by side: mostly the embedding.

    Its shape is ``[hidden_size, 2 * hidden_size]``.
    """
    return torch.cat([torch.eye(hidden_size), torch.eye(hidden_size) * 0.05], 1)


def save(weights: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write weights as a file that vLLM loads."""
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        file,
        metadata={"format": "pt"},
    )
