# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What transfers of every accelerator share: DMA in batches, and fences of events and streams.

The modules use torch's module of the device, such as ``torch.npu`` or ``torch.cuda``, when a
transfer runs. A device's own module names the operator that copies a batch. The modules do not know
vLLM.
"""
