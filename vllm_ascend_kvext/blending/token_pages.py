# SPDX-License-Identifier: Apache-2.0
"""Rows of single tokens in the pages of a worker, whatever order its kernels give to a page.

A *slot* is the place of one token in the pages of a KV cache group: its page times the tokens per
page, plus its row in the page. A *row* is what a token has in a plane, in the order in which the
model writes it: head by head, element by element.

Knows no segments and no requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from vllm_ascend_kvext.blending.rotary_signature import RotarySignature
from vllm_ascend_kvext.transfer.schema import RowDtype

if TYPE_CHECKING:
    import torch

Slots = Mapping[int, npt.NDArray[np.int64]]
"""Of the same tokens, by KV cache group. shape: [num_tokens], each slot once."""


@dataclass(frozen=True, slots=True)
class TokenPlane:
    """The keys, or the values, of one layer.

    Attributes:
        layer_name: Whose they are.
        group: KV cache group, whose slots they have.
        num_heads: Of a row; 1 where heads share a latent.
        head_elements: Of each head.
        dtype: Of the elements.
        keys: How they turn with their position; None for values.
    """

    layer_name: str
    group: int
    num_heads: int
    head_elements: int
    dtype: RowDtype
    keys: RotarySignature | None

    @property
    def row_elements(self) -> int:
        return self.num_heads * self.head_elements

    @property
    def row_bytes(self) -> int:
        return self.row_elements * self.dtype.element_bytes


class HostRows(NamedTuple):
    """Rows of consecutive tokens in host memory, plane after plane.

    Attributes:
        memory: dtype: uint8, shape: [num_bytes], contiguous.
        plane_offsets_bytes: Where row 0 of each plane lies, multiples of 64.
        first_row: Of the first token.
    """

    memory: torch.Tensor
    plane_offsets_bytes: Sequence[int]
    first_row: int = 0


class TokenPages(Protocol):
    """The pages of a worker. Methods may be called by several threads at once."""

    @property
    def planes(self) -> tuple[TokenPlane, ...]:
        """Those of the model's first layer come first, keys before values."""
        ...

    @property
    def tokens_per_page(self) -> Mapping[int, int]:
        """By KV cache group."""
        ...

    @property
    def num_pages(self) -> int:
        """Page 0 is the null page, of which no slot may be named."""
        ...

    def read(self, slots: Slots, rows: HostRows) -> None:
        """Copy rows out of pages: every plane of the tokens that the slots name."""
        ...

    def write(self, slots: Slots, rows: HostRows) -> None:
        """Copy rows into pages. No other byte of them changes."""
        ...

    def read_plane(self, index: int, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """Rows of one plane.

        Args:
            index: Of the plane.
            slots: In its KV cache group, each once. shape: [num_tokens].

        Returns:
            A copy. shape: [num_tokens, row_bytes].
        """
        ...


def numbers_of(rows: npt.NDArray[np.uint8], dtype: RowDtype) -> npt.NDArray[np.float64]:
    """Elements as numbers. shape of ``rows``: [..., num_bytes], contiguous in the last axis."""
    if dtype is RowDtype.BFLOAT16:
        wide = rows.view(np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64)
    return rows.view(np.float32 if dtype is RowDtype.FLOAT32 else np.float16).astype(np.float64)
