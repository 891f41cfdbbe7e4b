# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The version of vLLM that is tested. It is found without importing vLLM."""

from __future__ import annotations

from vllm_ascend_kvext.compat import detect, version_in

VLLM = detect({}).vllm or ""
"""The version. Empty if there is no vLLM."""

IS_SINCE_0_30 = version_in(VLLM, ">=0.30")
