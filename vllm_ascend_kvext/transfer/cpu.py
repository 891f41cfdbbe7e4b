# SPDX-License-Identifier: Apache-2.0
"""The CPU backend: one call of the compiled module."""

from __future__ import annotations

from vllm_ascend_kvext.transfer.backend import Transfer
from vllm_ascend_kvext.transfer.native import native


class CpuBackend:
    """Copies between pools and host buffer that are both in host memory."""

    name = "cpu"

    def run(self, transfer: Transfer) -> None:
        native().page_transfer(*transfer.descriptors, transfer.num_threads)
