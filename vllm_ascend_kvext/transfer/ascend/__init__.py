# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The backends for pools on an Ascend NPU: the DMA engines, and an experimental kernel.

The backends do not know vLLM. They use torch_npu as ``torch.npu`` when a transfer runs.
"""
