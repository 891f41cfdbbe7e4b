# SPDX-License-Identifier: Apache-2.0
"""What is refused before LMCache's connector starts."""

from __future__ import annotations

from vllm_ascend_kvext.errors import KvextError


class LMCacheError(KvextError):
    """LMCache's connector and its server cannot work together like this."""
