# SPDX-License-Identifier: Apache-2.0
"""The CPU backend: one call of the compiled module."""

from __future__ import annotations

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.transfer.backend import Transfer
from vllm_ascend_kvext.transfer.placement import default_placement

_STREAMING_WHERE_IT_PAYS = -1


class CpuBackend:
    """Copies between pools and host buffer that are both in host memory."""

    name = "cpu"

    def run(self, transfer: Transfer) -> None:
        placement = transfer.placement or default_placement()
        native().page_transfer(
            *transfer.descriptors,
            placement.num_threads,
            _STREAMING_WHERE_IT_PAYS,
            placement.cpus,
            placement.niceness,
        )
