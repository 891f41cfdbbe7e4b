# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Operators on weights and their products, and numbers that become 8-bit integers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_npu.kernels import operator, require

NZ_FORMAT = 29
ND_FORMAT = 2


@operator("npu_format_cast")
def npu_format_cast(tensor: Tensor, acl_format: int) -> Tensor:
    """Returns ``tensor`` itself, because a format changes only the order of numbers in memory.

    The emulated device keeps every tensor in the order of its dimensions (ND).
    """
    is_known = acl_format in (ND_FORMAT, NZ_FORMAT)
    require("npu_format_cast", is_known, f"format {acl_format} is not emulated")
    return tensor


@operator("_npu_matmul_add_fp32")
def _npu_matmul_add_fp32(x: Tensor, weight: Tensor, c: Tensor) -> None:
    """Adds ``x.T @ weight`` to ``c``, in float32, in place."""
    c.add_(x.float().t() @ weight.float())


@operator("npu_transpose_batchmatmul")
def npu_transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: Sequence[int] = (0, 1, 2),
    perm_x2: Sequence[int] = (0, 1, 2),
    perm_y: Sequence[int] = (1, 0, 2),
    batch_split_factor: int = 1,
) -> Tensor:
    """Batched matrix product with reordered dimensions.

    Args:
        input: ``[batch, m, k]`` after ``perm_x1``. ``weight`` is ``[batch, k, n]``.

    Returns:
        ``[batch, m, n]`` reordered by ``perm_y``: ``[m, batch, n]``.
    """
    given = (bias, scale, tuple(perm_x2), tuple(perm_y), batch_split_factor)
    is_emulated = given == (None, None, (0, 1, 2), (1, 0, 2), 1)
    require("npu_transpose_batchmatmul", is_emulated, f"{given} is not emulated")
    return torch.bmm(input.permute(*perm_x1), weight).permute(*perm_y).contiguous()


@operator("npu_dynamic_quant")
def npu_dynamic_quant(x: Tensor, *, dst_type: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Returns ``x`` as int8, and for each token the scale that restores it.

    The largest value of a token becomes 127.
    """
    require("npu_dynamic_quant", dst_type == torch.int8, f"{dst_type} is not emulated")
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    quantized = torch.where(scale == 0, 0, (x.float() / scale).round())
    return quantized.to(torch.int8), scale.squeeze(-1)


@operator("npu_quantize")
def npu_quantize(
    input: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: torch.dtype,
    axis: int = 1,
    div_mode: bool = True,
) -> Tensor:
    """Returns ``input * scales + zero_points``, rounded to int8.

    Args:
        scales: ``[n]`` for the ``n`` numbers of the last dimension, or ``[1]``. ``zero_points``
            has the same shape and type.
        axis: the last dimension is the only one that the device takes here.
        div_mode: whether ``scales`` divide; this is not emulated.
    """
    name = "npu_quantize"
    is_emulated = dtype == torch.qint8 and not div_mode and axis in (-1, input.dim() - 1)
    require(name, is_emulated, f"{dtype}, axis {axis} and div_mode {div_mode} are not emulated")
    require(name, scales.shape in ((1,), input.shape[-1:]), f"scales of {tuple(scales.shape)}")
    scaled = input.float() * scales.float()
    if zero_points is not None:
        same = (zero_points.shape, zero_points.dtype) == (scales.shape, scales.dtype)
        require(name, same, "zero_points need the shape and type of scales")
        scaled = scaled + zero_points.float()
    return scaled.round().clamp(-128, 127).to(torch.int8)


@operator("npu_quant_matmul")
def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """The product of matrices of int8, restored by scales.

    Args:
        x1: ``[rows, k]``.
        x2: ``[k, n]``.
        scale: ``[n]``. With ``pertoken_scale``, ``[rows]``, the product has both.
        bias: ``[n]``; int32 is added before the scales, another type behind them.

    Returns:
        ``[rows, n]``, in ``output_dtype``; the product itself for int32. int8, the default, is not
        emulated.
    """
    name = "npu_quant_matmul"
    require(name, x1.dtype == x2.dtype == torch.int8, f"{x1.dtype} and {x2.dtype}")
    is_emulated = offset is None and output_dtype not in (None, torch.int8)
    require(name, is_emulated, f"offset {offset} and {output_dtype} are not emulated")
    # float32 has every sum of products of two int8 for up to 1,000 rows.
    product = x1.float() @ x2.float()
    if output_dtype == torch.int32:
        return product.to(torch.int32)
    is_early = bias is not None and bias.dtype == torch.int32
    if bias is not None and is_early:
        product = product + bias.float()
    product = product * scale.float()
    if pertoken_scale is not None:
        product = product * pertoken_scale.float().unsqueeze(-1)
    if bias is not None and not is_early:
        product = product + bias.float()
    return product.to(output_dtype)
