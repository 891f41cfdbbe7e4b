# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with segments, and with models whose segments are to be reused."""

from __future__ import annotations

from vllm_ascend_kvext.errors import KvextError


class SegmentError(KvextError, ValueError):
    """What a request says of its segments is wrong, or a segment cannot be stored or placed."""


class BlendingError(KvextError, ValueError):
    """Segments of this model, or in pages as these are, cannot be reused."""
