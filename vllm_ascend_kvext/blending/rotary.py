# SPDX-License-Identifier: Apache-2.0
"""From a rotary module of vLLM to the signature of the keys that it has rotated.

A class is known by its exact type, and named here: a subclass may compute other angles. A class
that turns keys by a fixed angle per position has a reader; one that does not has the reason.

What a model does to keys behind its rotary module is not seen here. HunYuan scales them element by
element, for example, and such keys do not turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.blending.errors import RotationError
from vllm_ascend_kvext.blending.rotary_signature import RotarySignature
from vllm_ascend_kvext.transfer.schema import PairStyle, RowDtype

if TYPE_CHECKING:
    import torch

_PACKAGE = "vllm.model_executor.layers.rotary_embedding"

Frequencies = tuple[float, ...]


def _of_base(module: Any) -> Frequencies:
    """Computed from the base; NTK scaling and Llama 3 override how."""
    return _as_tuple(module._compute_inv_freq(module.base))


def _of_linear_scaling(module: Any) -> Frequencies:
    """Positions are divided by the factor, which is the same as to divide the frequencies."""
    factors = module.scaling_factors
    if len(factors) != 1:
        raise RotationError(
            f"{_name(type(module))}: expected one scaling factor, found {list(factors)}: which one "
            "a key was rotated with depends on its request's adapter. Serve this model without "
            "blending."
        )
    return tuple(frequency / factors[0] for frequency in _of_base(module))


def _of_yarn(module: Any) -> Frequencies:
    """YaRN's functions are handed the factor; the base they know."""
    return _as_tuple(module._compute_inv_freq(module.scaling_factor))


def _as_tuple(frequencies: torch.Tensor) -> Frequencies:
    return tuple(frequencies.detach().cpu().double().tolist())


READERS: dict[str, Callable[[Any], Frequencies]] = {
    f"{_PACKAGE}.base.RotaryEmbedding": _of_base,
    f"{_PACKAGE}.llama3_rope.Llama3RotaryEmbedding": _of_base,
    f"{_PACKAGE}.ntk_scaling_rope.NTKScalingRotaryEmbedding": _of_base,
    f"{_PACKAGE}.gemma4_rope.Gemma4RotaryEmbedding": _of_base,
    f"{_PACKAGE}.linear_scaling_rope.LinearScalingRotaryEmbedding": _of_linear_scaling,
    f"{_PACKAGE}.yarn_scaling_rope.YaRNScalingRotaryEmbedding": _of_yarn,
    f"{_PACKAGE}.telechat3_scaling_rope.TeleChat3RoPEScaledRotaryEmbedding": _of_yarn,
    f"{_PACKAGE}.deepseek_scaling_rope.DeepseekScalingRotaryEmbedding": _of_yarn,
}
"""By full name; each returns radians per position, one number per pair."""

_ASCEND_PACKAGE = "vllm_ascend.ops.rotary_embedding"

ASCEND_READERS: dict[str, Callable[[Any], Frequencies]] = {
    f"{_ASCEND_PACKAGE}.AscendRotaryEmbedding": _of_base,
    f"{_ASCEND_PACKAGE}.AscendYaRNRotaryEmbedding": _of_yarn,
}
"""The same of vLLM-Ascend's classes that differ from vLLM's by their kernels only."""

_SEVERAL_POSITIONS = "a token has several positions, such as a time, a row and a column"
_LENGTH_DECIDES = "its frequencies depend on the length that is served"

REFUSED: dict[str, str] = {
    f"{_PACKAGE}.base.RotaryEmbeddingBase": "it is a base class, and no model has one",
    f"{_PACKAGE}.deepseek_scaling_rope.DeepseekV4ScalingRotaryEmbedding": (
        "DeepSeek-V4 stores rows that stand for several tokens, and quantised ones"
    ),
    f"{_PACKAGE}.dual_chunk_rope.DualChunkRotaryEmbedding": (
        "keys turn by their place in a chunk, and queries differ by chunk"
    ),
    f"{_PACKAGE}.dynamic_ntk_scaling_rope.DynamicNTKScalingRotaryEmbedding": _LENGTH_DECIDES,
    f"{_PACKAGE}.dynamic_ntk_alpha_rope.DynamicNTKAlphaRotaryEmbedding": (
        "models that have it, such as HunYuan, scale keys behind the rotation"
    ),
    f"{_PACKAGE}.phi3_long_rope_scaled_rope.Phi3LongRoPEScaledRotaryEmbedding": _LENGTH_DECIDES,
    f"{_PACKAGE}.ernie45_vl_rope.Ernie4_5_VLRotaryEmbedding": _SEVERAL_POSITIONS,
    f"{_PACKAGE}.mrope.MRotaryEmbedding": _SEVERAL_POSITIONS,
    f"{_PACKAGE}.mrope_interleaved.MRotaryEmbeddingInterleaved": _SEVERAL_POSITIONS,
    f"{_PACKAGE}.xdrope.XDRotaryEmbedding": _SEVERAL_POSITIONS,
    f"{_PACKAGE}.llama4_vision_rope.Llama4VisionRotaryEmbedding": (
        "it is that of an image encoder, whose keys are not cached"
    ),
    f"{_PACKAGE}.fope.FourierRotaryEmbedding": (
        "it mixes sums of several frequencies, which is no rotation"
    ),
}
"""By full name: why keys cannot be moved by a rotation."""


def read_rotary_signature(
    module: Any,
    dtype: torch.dtype,
    *,
    head_elements: int | None = None,
    offset_elements: int = 0,
) -> RotarySignature:
    """How keys turn that ``module`` has rotated.

    Args:
        module: A rotary module of vLLM.
        dtype: Of the stored keys.
        head_elements: Elements of a head as it is stored; None: as many as the module is given.
        offset_elements: Where in it lies what the module is given. With MLA: the rank of the
            latent, behind which the rotated part of a row lies.

    Raises:
        RotationError: These keys cannot be moved by a rotation; the message says why.
    """
    name = _name(type(module))
    if name in REFUSED:
        raise RotationError(
            f"{name}: expected an embedding that turns keys by one angle per position, found that "
            f"{REFUSED[name]}. Serve this model without blending."
        )
    reader = READERS.get(name) or ASCEND_READERS.get(name)
    if reader is None:
        raise RotationError(
            f"{name}: expected one of {', '.join(sorted(_short(known) for known in READERS))}, "
            "found a class whose angles are not known. Serve this model without blending."
        )
    frequencies = reader(module)
    if 2 * len(frequencies) != module.rotary_dim or module.rotary_dim > module.head_size:
        raise RotationError(
            f"{name}: expected {module.rotary_dim} rotated elements of {module.head_size}, found "
            f"{len(frequencies)} frequencies. Serve this model without blending."
        )
    head_elements = module.head_size if head_elements is None else head_elements
    if offset_elements < 0 or offset_elements + module.head_size > head_elements:
        raise RotationError(
            f"{name}: expected a head of {head_elements} elements that has the module's "
            f"{module.head_size}, found them at element {offset_elements}. Pass the row's own "
            "number of elements, and the offset of its rotated part."
        )
    return RotarySignature(
        frequencies=frequencies,
        pair_style=PairStyle.HALVES if module.is_neox_style else PairStyle.NEIGHBOURS,
        head_elements=head_elements,
        offset_elements=offset_elements,
        dtype=row_dtype(dtype),
        attention_factor=float(getattr(module, "mscale", 1.0)),
    )


def row_dtype(dtype: torch.dtype) -> RowDtype:
    """The number that descriptors have for a type of keys.

    Raises:
        RotationError: Keys of this type cannot be rotated.
    """
    name = str(dtype).removeprefix("torch.")
    try:
        return RowDtype[name.upper()]
    except KeyError:
        raise RotationError(
            f"dtype of keys: expected float32, bfloat16 or float16, found {name}: quantised keys "
            "would have to be scaled anew. Serve this model without blending, or with keys of one "
            "of these types."
        ) from None


def is_of_ascend(module: Any) -> bool:
    """Whether a rotary module is vLLM-Ascend's."""
    return _name(type(module)) in ASCEND_READERS


def torch_dtype(dtype: RowDtype) -> torch.dtype:
    """The reverse of `row_dtype`."""
    import torch

    found = getattr(torch, dtype.name.lower())
    assert isinstance(found, torch.dtype)
    return found


def _name(of: type) -> str:
    return f"{of.__module__}.{of.__qualname__}"


def _short(name: str) -> str:
    return name.rpartition(".")[2]
