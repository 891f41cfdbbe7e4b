# SPDX-License-Identifier: Apache-2.0
"""The backends for pools on an Ascend NPU: the DMA engines, and an experimental kernel.

Neither knows vLLM; torch_npu is found as ``torch.npu`` when a transfer runs.
"""
