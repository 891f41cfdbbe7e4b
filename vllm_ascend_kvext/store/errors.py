# SPDX-License-Identifier: Apache-2.0
"""What callers of the host tier can do wrong."""

from __future__ import annotations

from vllm_ascend_kvext.errors import KvextError


class TierError(KvextError, ValueError):
    """A call that does not fit what the tier holds; nothing has changed."""
