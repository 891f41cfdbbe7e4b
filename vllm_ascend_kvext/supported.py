# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The releases of vLLM and vLLM-Ascend that are supported. Imports nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Release:
    """Closed version ranges (PEP 440) of a supported vLLM and of the vLLM-Ascend made for it."""

    vllm: str
    vllm_ascend: str


SUPPORTED = (
    # 0.23.0 and 0.23.0.post1.
    Release(vllm="==0.23.0.*", vllm_ascend="==0.23.0.*"),
    # 0.30.0rc2 so far.
    Release(vllm="==0.30.0.*", vllm_ascend="==0.30.0.*"),
)
