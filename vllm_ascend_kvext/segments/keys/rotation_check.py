# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Checks that the transfer op moves keys as the model's own rotary module would rotate them.

A process makes this check before it moves keys. The op moves keys that the module has rotated to
one position, and the result is compared with the module's keys at another position.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_ascend_kvext.errors import BlendingError
from vllm_ascend_kvext.segments.keys.rotary import (
    KeyPlane,
    RotarySignature,
    is_of_ascend,
    key_rotation,
    torch_dtype,
)
from vllm_ascend_kvext.transfer.key_rotation import rotated_page_transfer
from vllm_ascend_kvext.transfer.pools import Pools
from vllm_ascend_kvext.transfer.schema import DTYPE, HOST_ALIGNMENT_BYTES, Direction, RowDtype

if TYPE_CHECKING:
    import torch

_ROWS = 5
_HEADS = 2

_ROUNDINGS = 8
"""The allowed number of roundings, each by half a unit in the last place, relative to the length of
a pair. The module rounds cosine, sine, two products and a sum at each position, and the op rounds
once."""

HALF_UNITS = {
    RowDtype.FLOAT32: 2.0**-24,
    RowDtype.BFLOAT16: 2.0**-8,
    RowDtype.FLOAT16: 2.0**-11,
}
"""The maximum relative error of one rounding, by type."""


def check_rotation(module: Any, signature: RotarySignature) -> None:
    """Compare the op with the module that ``signature`` was read from.

    The module rotates random keys to one position, and the op moves them to another position. The
    result is compared with the keys that the module rotates to this other position. Moves go near
    and far, and in both directions. They are made in the keys' type, and also in float32 if the
    module is in host memory. The module is left as it was.

    Raises:
        BlendingError: The keys differ by more than rounding explains.
    """
    device = module.cos_sin_cache.device
    dtypes = {signature.dtype} | ({RowDtype.FLOAT32} if device.type == "cpu" else set())
    moves = positions_to_compare(len(module.cos_sin_cache))
    for dtype in sorted(dtypes):
        _check(module, signature, dtype, moves)


def positions_to_compare(num_positions: int) -> list[tuple[int, int]]:
    """Old and new positions of the compared moves, for a module that knows ``num_positions``.

    Raises:
        BlendingError: The module knows too few positions to move a key.
    """
    last = num_positions - 1
    if last < 1:
        raise BlendingError(
            f"positions of the rotary module: expected at least 2, found {num_positions}. Serve "
            "this model without segments."
        )
    # Most positions are small, because the errors of float32 angles grow with the position.
    candidates = [
        (0, 1),
        (1, 0),
        (3, 7),
        (40, 11),
        (5, 1000),
        (1024, 17),
        (2000, 2300),
        (last // 3, last // 2),
        (0, last),
        (last, last // 7),
    ]
    within = ((min(old, last), min(new, last)) for old, new in candidates)
    return list(dict.fromkeys(move for move in within if move[0] != move[1]))


def _check(
    module: Any, signature: RotarySignature, dtype: RowDtype, moves: list[tuple[int, int]]
) -> None:
    import torch

    half_unit = max(
        HALF_UNITS[dtype],
        *(HALF_UNITS[row] for row in RowDtype if torch_dtype(row) == module.cos_sin_cache.dtype),
    )
    random = torch.Generator().manual_seed(1)
    # shape: [moves, rows, heads, head_elements]
    shape = len(moves), _ROWS, _HEADS, signature.head_elements
    rows = torch.randn(shape, generator=random).to(torch_dtype(dtype))
    before, wanted = (
        _rotated_by(module, signature, rows, [move[side] for move in moves]) for side in (0, 1)
    )
    found = _moved(before, signature, dtype, [new - old for old, new in moves])
    keys, exact, got = (
        [part.double().numpy()[..., of_pair] for of_pair in signature.pairs]
        for part in (before, wanted, found)
    )
    frequencies = np.array(signature.frequencies)
    lengths = np.hypot(*keys)
    differences = np.hypot(exact[0] - got[0], exact[1] - got[1])
    for index, (old, new) in enumerate(moves):
        # The module multiplies position and frequency in float32.
        angle_error = (old + new) * frequencies * 2.0**-23
        limits = lengths[index] * (_ROUNDINGS * half_unit + angle_error)
        excess = differences[index] - limits
        if not np.all(excess <= 0):
            worst = np.unravel_index(np.argmax(excess), excess.shape)
            raise BlendingError(
                f"{type(module).__qualname__}, keys of {dtype.name.lower()} moved from position "
                f"{old} to {new}, pair {worst[-1]}: expected the module's own within "
                f"{limits[worst]:.3g}, found them {differences[index][worst]:.3g} away. Serve this "
                "model without segments, and report it."
            )
    if not torch.equal(_without(found, signature.rotated), _without(rows, signature.rotated)):
        raise BlendingError(
            f"{type(module).__qualname__}: expected elements outside the rotated part of a key to "
            "stay as they are, found others. Serve this model without segments, and report it."
        )


def _rotated_by(
    module: Any, signature: RotarySignature, rows: torch.Tensor, positions: list[int]
) -> torch.Tensor:
    """Rows that the module has rotated, shaped as in ``_check``. There is one position per move."""
    import torch

    given = slice(signature.offset_elements, signature.offset_elements + module.head_size)
    device = module.cos_sin_cache.device
    # The module gets each head by itself. vLLM's op for CPUs takes heads side by side, but
    # DeepSeek's op does not.
    keys = rows[..., given].reshape(-1, 1, module.head_size).to(device, copy=True)
    repeated = torch.tensor(positions, device=device).repeat_interleave(_ROWS * _HEADS)
    # vLLM-Ascend's kernels run only within a forward. Plain torch computes the same angles.
    rotate = module.forward_native if is_of_ascend(module) else module
    with torch.no_grad(), _buffers_kept(module):
        _, rotated = rotate(repeated, torch.zeros_like(keys), keys)
    result = rows.clone()
    result[..., given] = rotated.reshape(*rows.shape[:-1], -1).to("cpu")
    return result


@contextmanager
def _buffers_kept(module: Any) -> Iterator[None]:
    """Restore the module's buffers: a call converts its table to the keys' type, and rounds it."""
    buffers = dict(module.named_buffers(recurse=False))
    try:
        yield
    finally:
        for name, buffer in buffers.items():
            setattr(module, name, buffer)


def _moved(
    rows: torch.Tensor, signature: RotarySignature, dtype: RowDtype, shifts: list[int]
) -> torch.Tensor:
    """Move rows with the op. Each shift has a transfer group and a page of its own."""
    import torch

    row_bytes = _HEADS * signature.head_elements * dtype.element_bytes
    page_bytes = _ROWS * row_bytes
    extent_bytes = -(-page_bytes // HOST_ALIGNMENT_BYTES) * HOST_ALIGNMENT_BYTES
    num_pages = 1 + len(shifts)
    host = torch.zeros(extent_bytes * len(shifts), dtype=torch.uint8)
    pool = torch.zeros(num_pages * page_bytes, dtype=torch.uint8)
    in_host = host.view(len(shifts), extent_bytes)[:, :page_bytes]
    in_host.copy_(rows.reshape(len(shifts), -1).view(torch.uint8))
    of_page = 0, 0, page_bytes, 0, row_bytes, _ROWS, num_pages
    groups = range(len(shifts))
    rotated_page_transfer(
        Pools([pool]),
        host,
        np.array([(group, *of_page, group * extent_bytes) for group in groups], DTYPE),
        np.array([(group, 1 + group, 0, _ROWS, 0) for group in groups], DTYPE),
        Direction.HOST_TO_PAGES,
        key_rotation(
            [KeyPlane(plane, replace(signature, dtype=dtype), _HEADS) for plane in groups],
            dict(enumerate(shifts)),
        ),
    )
    return pool[page_bytes:].view(rows.dtype).reshape(rows.shape)


def _without(rows: torch.Tensor, rotated: slice) -> torch.Tensor:
    import torch

    return torch.cat((rows[..., : rotated.start], rows[..., rotated.stop :]), -1)
