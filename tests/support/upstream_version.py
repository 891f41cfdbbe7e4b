# SPDX-License-Identifier: Apache-2.0
"""The version of vLLM of the tests, found without importing it."""

from __future__ import annotations

from vllm_ascend_kvext.compat import detect, version_in

VLLM = detect({}).vllm or ""
"""The version; empty if there is no vLLM."""

IS_SINCE_0_30 = version_in(VLLM, ">=0.30")
