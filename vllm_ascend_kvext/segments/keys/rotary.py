# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Reads from a rotary module how keys turn with their position, and tells it to the transfer op.

vLLM's classes are recognised by their exact type, because a subclass may compute other angles. A
class that turns keys by a fixed angle per position has a reader. Other classes have a reason why
they are refused. This module does not see what a model does to keys behind its rotary module, such
as HunYuan's scaling.

This module imports no vLLM: it reads the modules that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_ascend_kvext.errors import BlendingError
from vllm_ascend_kvext.transfer.key_rotation import KeyRotation
from vllm_ascend_kvext.transfer.schema import (
    DTYPE,
    PairStyle,
    RotationColumn,
    RowDtype,
    ShiftColumn,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class RotarySignature:
    """The rotary embedding of one layer's keys, as they lie in a row.

    ``frequencies`` are radians per position, one per pair, with the scaling of the embedding.
    ``head_elements`` counts the elements of one head, or of the whole row if heads share a latent.
    The rotated part begins at ``offset_elements``. YaRN multiplies this part by its attention
    factor. The factor is already in stored keys, so a rotation must not apply it again.
    """

    frequencies: tuple[float, ...]
    pair_style: PairStyle
    head_elements: int
    offset_elements: int
    dtype: RowDtype

    @property
    def rotary_elements(self) -> int:
        """The number of rotated elements of a head, from `offset_elements` on."""
        return 2 * len(self.frequencies)

    @property
    def rotated(self) -> slice:
        """The rotated elements of a head."""
        return slice(self.offset_elements, self.offset_elements + self.rotary_elements)

    @property
    def pairs(self) -> tuple[slice, slice]:
        """The first and the second elements of the pairs of a head."""
        first, end = self.rotated.start, self.rotated.stop
        if self.pair_style is PairStyle.NEIGHBOURS:
            return slice(first, end, 2), slice(first + 1, end, 2)
        half = first + len(self.frequencies)
        return slice(first, half), slice(half, end)


@dataclass(frozen=True, slots=True)
class KeyPlane:
    """A plane of keys in a transfer. ``plane`` is its row in the table of planes."""

    plane: int
    signature: RotarySignature
    num_heads: int


def key_rotation(key_planes: Iterable[KeyPlane], shifts: Mapping[int, int]) -> KeyRotation:
    """The tables of a transfer that moves keys. ``shifts`` has positions, by transfer group."""
    frequencies: list[float] = []
    first_frequencies: dict[tuple[float, ...], int] = {}
    rows = []
    for key_plane in key_planes:
        signature = key_plane.signature
        first = first_frequencies.setdefault(signature.frequencies, len(frequencies))
        if first == len(frequencies):
            frequencies += signature.frequencies
        element_bytes = signature.dtype.element_bytes
        rows.append(
            (
                key_plane.plane,
                signature.dtype,
                signature.pair_style,
                key_plane.num_heads,
                signature.head_elements * element_bytes,
                signature.offset_elements * element_bytes,
                len(signature.frequencies),
                first,
            )
        )
    return KeyRotation(
        np.array(rows, DTYPE).reshape(len(rows), len(RotationColumn)),
        np.array(sorted(shifts.items()), DTYPE).reshape(len(shifts), len(ShiftColumn)),
        np.array(frequencies, np.float64),
    )


_PACKAGE = "vllm.model_executor.layers.rotary_embedding"

Frequencies = tuple[float, ...]


def _of_base(module: Any) -> Frequencies:
    """Compute the frequencies from the base. NTK scaling and Llama 3 override the method."""
    return _as_tuple(module._compute_inv_freq(module.base))


def _of_linear_scaling(module: Any) -> Frequencies:
    """Divide the frequencies by the factor. The module divides positions, which is the same."""
    factors = module.scaling_factors
    if len(factors) != 1:
        raise BlendingError(
            f"{_name(type(module))}: expected one scaling factor, found {list(factors)}: the "
            "adapter of a request decides which of them its keys were rotated with. Serve this "
            "model without segments."
        )
    return tuple(frequency / factors[0] for frequency in _of_base(module))


def _of_yarn(module: Any) -> Frequencies:
    """Compute the frequencies from the scaling factor. YaRN's method knows the base."""
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
"""Readers of vLLM's classes, by full name. Each returns radians per position, one per pair."""

_ASCEND_PACKAGE = "vllm_ascend.ops.rotary_embedding"

ASCEND_READERS: dict[str, Callable[[Any], Frequencies]] = {
    f"{_ASCEND_PACKAGE}.AscendRotaryEmbedding": _of_base,
    f"{_ASCEND_PACKAGE}.AscendYaRNRotaryEmbedding": _of_yarn,
}
"""Readers of vLLM-Ascend's classes that differ from vLLM's classes only in their kernels."""

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
    f"{_PACKAGE}.bailing_mrope.BailingMRotaryEmbedding": _SEVERAL_POSITIONS,
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
"""Reasons why the keys of a class cannot be moved by a rotation, by full name."""


def read_rotary_signature(
    module: Any,
    dtype: torch.dtype,
    *,
    head_elements: int | None = None,
    offset_elements: int = 0,
) -> RotarySignature:
    """Read how stored keys turn. ``module`` is the rotary module of vLLM that has rotated them.

    A stored head may have more elements than the module rotates, as with MLA. Then the module's
    part begins at ``offset_elements``, behind the latent.

    Raises:
        BlendingError: These keys cannot be moved by a rotation; the message says why.
    """
    name = _name(type(module))
    if name in REFUSED:
        raise BlendingError(
            f"{name}: expected an embedding that turns keys by one angle per position, found that "
            f"{REFUSED[name]}. Serve this model without segments."
        )
    reader = READERS.get(name) or ASCEND_READERS.get(name)
    if reader is None:
        known = ", ".join(sorted(each.rpartition(".")[2] for each in READERS))
        raise BlendingError(
            f"{name}: expected one of {known}, found a class whose angles are not known. Serve "
            "this model without segments."
        )
    frequencies = reader(module)
    if 2 * len(frequencies) != module.rotary_dim or module.rotary_dim > module.head_size:
        raise BlendingError(
            f"{name}: expected {module.rotary_dim} rotated elements of {module.head_size}, found "
            f"{len(frequencies)} frequencies. Serve this model without segments."
        )
    head_elements = module.head_size if head_elements is None else head_elements
    return RotarySignature(
        frequencies=frequencies,
        pair_style=PairStyle.HALVES if module.is_neox_style else PairStyle.NEIGHBOURS,
        head_elements=head_elements,
        offset_elements=offset_elements,
        dtype=row_dtype(dtype),
    )


def row_dtype(dtype: torch.dtype) -> RowDtype:
    """The type of keys as descriptors name it; raises if such keys cannot be rotated."""
    name = str(dtype).removeprefix("torch.")
    try:
        return RowDtype[name.upper()]
    except KeyError:
        raise BlendingError(
            f"dtype of keys: expected float32, bfloat16 or float16, found {name}: quantised keys "
            "would have to be scaled anew. Serve this model without segments, or with keys of one "
            "of these types."
        ) from None


def is_of_ascend(module: Any) -> bool:
    """Whether a rotary module is one of vLLM-Ascend's."""
    return _name(type(module)) in ASCEND_READERS


def torch_dtype(dtype: RowDtype) -> torch.dtype:
    """The reverse of `row_dtype`."""
    import torch

    found: torch.dtype = getattr(torch, dtype.name.lower())
    return found


def _name(of: type) -> str:
    return f"{of.__module__}.{of.__qualname__}"
