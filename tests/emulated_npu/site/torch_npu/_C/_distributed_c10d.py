# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The options of HCCL's process groups. The emulation needs none of them."""

from __future__ import annotations

from datetime import timedelta


class ProcessGroupHCCL:
    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.hccl_config: dict[str, object] = {}
            self.op_timeout = timedelta(minutes=30)
            self._timeout = self.op_timeout
            self.global_ranks_in_group: list[int] = []
            self.group_name = ""
