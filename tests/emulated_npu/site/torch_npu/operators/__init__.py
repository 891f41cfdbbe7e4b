# SPDX-License-Identifier: Apache-2.0
"""Operators of torch_npu and of vllm-ascend, in torch.

The modules need torch alone, and take CPU tensors: ``registry.py`` gives the operators to the device.
"""
