# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with holes."""

from __future__ import annotations

from vllm_ascend_kvext.errors import KvextError


class HoleError(KvextError, ValueError):
    """A prompt whose spans cannot be planned."""
