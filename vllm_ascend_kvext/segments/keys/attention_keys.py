# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Reads from a model how the keys of its layers turn.

In vLLM's models, the rotary module and the attention module of a layer are children of one module.
This parent passes the output of the rotary module to the attention module. Models with another
structure are refused. This module imports nothing of vLLM: it reads the modules that it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.errors import BlendingError
from vllm_ascend_kvext.segments.keys.rotary import (
    READERS,
    REFUSED,
    RotarySignature,
    read_rotary_signature,
)
from vllm_ascend_kvext.segments.keys.rotation_check import check_rotation

if TYPE_CHECKING:
    import torch

_MODELS = "vllm.model_executor.models"

SOMETIMES_ROTATED = frozenset(
    {
        f"{_MODELS}.afmoe.AfmoeAttention",
        f"{_MODELS}.cohere2_moe.Cohere2MoeAttention",
        f"{_MODELS}.commandr.CohereAttention",
        f"{_MODELS}.exaone4.Exaone4Attention",
        f"{_MODELS}.exaone_moe.ExaoneMoeAttention",
        f"{_MODELS}.k2_horizon.K2HorizonAttention",
        f"{_MODELS}.k2_horizon.K2HorizonMoVAAttention",
        f"{_MODELS}.olmo_hybrid.OlmoHybridAttention",
        f"{_MODELS}.step3p5.Step3p5Attention",
    }
)
"""Modules, by full name, that have a rotary module in every layer but do not use it as usual. Most
skip it in some layers. K2 Horizon, whose heads turn in part, reorders the output of its module."""


@dataclass(frozen=True, slots=True)
class LayerKeys:
    """The keys of one layer, and how they turn with their position.

    A layer without values stores latents (MLA), which serve as keys and as values.
    ``window_tokens`` counts the reading token; it is 0 with full attention.
    """

    signature: RotarySignature
    num_heads: int
    has_values: bool
    window_tokens: int


def read_layer_keys(
    model: torch.nn.Module,
    attention: Mapping[str, Any],
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, LayerKeys]:
    """Read how the keys of each layer turn, in the order of the model.

    Every rotary module is read, and compared with the transfer op, once for each dtype. Layers that
    use the pages of another layer are left out. ``attention`` has vLLM's attention modules, by
    layer name. ``dtypes`` has the types of their stored keys, by layer name.

    Raises:
        BlendingError: The keys of some layer cannot be moved by a rotation; the message says why.
    """
    names = {id(module): name for name, module in model.named_modules()}
    read: dict[object, RotarySignature] = {}
    found = {}
    for layer_name, module in _layers_in_order(model, attention).items():
        parent = model.get_submodule(names[id(module)].rpartition(".")[0])
        rotary = _rotary_module_of(parent, layer_name)
        rank = getattr(module, "kv_lora_rank", None)
        head_elements, offset_elements = _stored_head(module, rank)
        key = id(rotary), dtypes[layer_name], head_elements, offset_elements
        if key not in read:
            signature = read_rotary_signature(
                rotary,
                dtypes[layer_name],
                head_elements=head_elements,
                offset_elements=offset_elements,
            )
            check_rotation(rotary, signature)
            read[key] = signature
        found[layer_name] = LayerKeys(
            read[key],
            num_heads=1 if rank is not None else int(module.num_kv_heads),
            has_values=rank is None,
            window_tokens=int(getattr(module, "sliding_window", None) or 0),
        )
    return found


def _layers_in_order(model: torch.nn.Module, attention: Mapping[str, Any]) -> dict[str, Any]:
    """The attention modules that have pages of their own, by name, in the order of the model.

    Raises:
        BlendingError: One of them is a part of another model.
    """
    places = {id(module): place for place, module in enumerate(model.modules())}
    own = {name: module for name, module in attention.items() if not shares_pages(module)}
    for layer_name, module in own.items():
        if id(module) not in places:
            raise BlendingError(
                f"layer {layer_name}: expected a part of {type(model).__qualname__}, found one of "
                "another model, such as a draft model. Serve without segments, or without it."
            )
    return {name: own[name] for name in sorted(own, key=lambda name: places[id(own[name])])}


def shares_pages(attention: Any) -> bool:
    """Whether an attention module reads the pages of another layer, and has none of its own."""
    return getattr(attention, "kv_sharing_target_layer_name", None) is not None


def _stored_head(attention: Any, rank: int | None) -> tuple[int, int]:
    """The elements of a stored head, and the offset of its rotated part."""
    if rank is not None:
        return int(rank) + int(attention.qk_rope_head_dim), int(rank)
    return int(attention.head_size), 0


def _rotary_module_of(parent: Any, layer_name: str) -> Any:
    """The rotary module beside an attention module; refuses models that skip it in some layers."""
    name = f"{type(parent).__module__}.{type(parent).__qualname__}"
    if name in SOMETIMES_ROTATED:
        raise BlendingError(
            f"layer {layer_name}: expected a model whose layers all rotate their keys, found "
            f"{name}, which does not in some of them. Serve this model without segments."
        )
    found = {id(child): child for child in parent.children() if _is_rotary(child)}
    if len(found) != 1:
        described = ", ".join(type(child).__qualname__ for child in found.values())
        raise BlendingError(
            f"layer {layer_name}: expected one rotary module beside the attention module of "
            f"{name}, found {described or 'none'}"
            + (": keys of this layer are not rotated, or elsewhere" if not found else "")
            + ". Serve this model without segments."
        )
    return next(iter(found.values()))


def _is_rotary(module: Any) -> bool:
    """Whether a module has a known rotary class, or a known class as its base class."""
    return any(
        f"{base.__module__}.{base.__qualname__}" in READERS.keys() | REFUSED.keys()
        for base in type(module).__mro__
    )
