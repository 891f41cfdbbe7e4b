# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""An executor whose worker is in this process, with its own copy of the configuration."""

from __future__ import annotations

import copy

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class OwnConfigExecutor(UniProcExecutor):
    """Gives the worker a copy of the configuration, like workers in other processes have.

    Before the KV cache is made, vLLM 0.30 sets the block size of its configuration to the smallest
    of all groups (``v1/engine/core.py``, line 345). After this, vLLM-Ascend 0.30.0rc2 asks
    DeepSeek-V4's layers for their groups again, with the same block size
    (``models/deepseek_v4/indexer.py``, line 143). With vLLM's own executor for one process, this
    ends with ``KeyError: 8``.
    """

    def _init_executor(self) -> None:
        self.vllm_config = copy.deepcopy(self.vllm_config)
        super()._init_executor()
