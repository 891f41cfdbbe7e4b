# SPDX-License-Identifier: Apache-2.0
"""Rows that are written to places in a paged tensor."""

from __future__ import annotations

from torch import Tensor


def scatter_nd_update(var: Tensor, indices: Tensor, update: Tensor) -> None:
    """Writes ``update[i]`` to ``var[indices[i]]``, unless an index is negative.

    On the device both have one type. Here ``var`` may be another floating type: a model in float32
    keeps its cache in bfloat16.

    Args:
        var: shape ``[blocks, block_size, ...]``.
        indices: int32, shape ``[rows, 2]``.
        update: as many elements as the rows of ``var`` that are written.
    """
    if update.dtype != var.dtype and not (update.is_floating_point() and var.is_floating_point()):
        raise RuntimeError(f"npu_scatter_nd_update_v2: var {var.dtype}, update {update.dtype}")
    places = indices.long()
    is_given = (places >= 0).all(-1)
    rows = update.reshape(len(places), *var.shape[places.shape[-1] :])
    var[tuple(places[is_given].T)] = rows[is_given].to(var.dtype)


KERNELS = {"npu_scatter_nd_update_v2": (scatter_nd_update,)}
