# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Finds out to which CPUs vLLM-Ascend will bind a worker.

vLLM-Ascend binds the workers of ARM hosts after the warm-up. Host memory is pinned before that, and
cannot be moved afterwards. So vLLM-Ascend's own plan is made once more, and not carried out.
"""

from __future__ import annotations

import importlib
import inspect
import logging

logger = logging.getLogger("vllm.ascend_kvext.connector")


def planned_cpus(local_rank: int) -> frozenset[int]:
    """The CPUs on which the main thread of a worker will run.

    Args:
        local_rank: The worker's number on its host, which is also the index of its NPU.

    Returns:
        No CPU if vLLM-Ascend binds nothing here, or if its plan cannot be found out.
    """
    try:
        return _read_plan(local_rank)
    except Exception as error:  # The plan is made by functions of vLLM-Ascend that may change.
        logger.info(
            "It cannot be found out to which CPUs vLLM-Ascend will bind worker %d: %s: %s",
            local_rank,
            type(error).__name__,
            error,
        )
        return frozenset()


def _read_plan(local_rank: int) -> frozenset[int]:
    binding = importlib.import_module("vllm_ascend.cpu_binding")
    config = importlib.import_module("vllm_ascend.ascend_config").get_ascend_config()
    if not (binding.is_arm_cpu() and config.enable_cpu_binding):
        return frozenset()
    if "npu_id" in inspect.signature(binding.CpuAlloc).parameters:
        platform = importlib.import_module("vllm.platforms").current_platform
        npu = platform.device_id_to_physical_device_id(local_rank)
        plan = binding.CpuAlloc(local_rank, npu_id=npu)
    else:
        plan = binding.CpuAlloc(local_rank)
        npu = plan.device_info.running_npu_list[local_rank]
    # With the topology of an Ascend 950, making the plan binds threads of a driver.
    if any(
        getattr(plan, name, lambda: False)()
        for name in ("_uses_cluster_cpu_topology", "_is_ascend_950")
    ):
        return frozenset()
    plan.build_cpu_pools()
    plan.allocate()
    return frozenset(plan.assign_main[npu])
