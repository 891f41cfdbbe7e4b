# SPDX-License-Identifier: Apache-2.0
"""Modules of vLLM-Ascend that need the device's toolkit to be built or imported."""

from __future__ import annotations

from typing import Any

WHOLE_MODULES: dict[str, dict[str, Any]] = {
    # `custom_operators` has the operators that it defines. Memory for sleeping is not emulated.
    "vllm_ascend.vllm_ascend_C": {
        "init_module": None,
        "python_create_and_map": None,
        "python_unmap_and_release": None,
    },
    # Its kernels without data serve graphs only, and want every operator to be defined.
    "vllm_ascend.meta_registration": {},
}
