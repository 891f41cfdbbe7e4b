# SPDX-License-Identifier: Apache-2.0
"""Which vLLM the tests run on; nothing of it is imported."""

from __future__ import annotations

from vllm_ascend_kvext.compat import detect, version_in

VLLM = detect({}).vllm or ""
"""Empty where there is none."""

IS_SINCE_0_30 = version_in(VLLM, ">=0.30")
