"""8-bit integers with a scale per token."""

import torch


def dynamic_quant(x):
    """Returns ``x`` as int8 and the scales, one per token, that turn it back: the largest value becomes 127."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    quantized = torch.where(scale == 0, 0, (x.float() / scale).round())
    return quantized.to(torch.int8), scale.squeeze(-1)


def rms_norm_dynamic_quant(x, gamma, smooth_scale=None, beta=None, epsilon=1e-6):
    if smooth_scale is not None:
        raise RuntimeError("npu_rms_norm_dynamic_quant: smooth_scale is not emulated")
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * gamma.float()
    return dynamic_quant(wide if beta is None else wide + beta.float())


def quant_matmul(x1, x2, scale, pertoken_scale=None, bias=None, output_dtype=None):
    """``x1`` [tokens, in] times ``x2`` [in, out], both int8, with a scale per output and one per token."""
    wide = torch.matmul(x1.to(torch.float64), x2.to(torch.float64))  # exact, as 32-bit integers are
    if bias is not None and bias.dtype == torch.int32:
        wide, bias = wide + bias, None
    wide = wide * scale.double()
    if pertoken_scale is not None:
        wide = wide * pertoken_scale.double().unsqueeze(-1)
    if bias is not None:
        wide = wide + bias.double()
    return wide.to(output_dtype or torch.float16)
