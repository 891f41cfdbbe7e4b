# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with segments, and with moving keys to other positions."""

from __future__ import annotations

from vllm_ascend_kvext.errors import KvextError


class RotationError(KvextError, ValueError):
    """A model's keys cannot be moved by a rotation, or the rotation is not the model's."""


class SegmentError(KvextError, ValueError):
    """What a request says of its segments is wrong, or a segment cannot be stored or placed."""


class BlendingError(KvextError, ValueError):
    """Segments cannot be stored or placed with this model, or in pages as these are."""
