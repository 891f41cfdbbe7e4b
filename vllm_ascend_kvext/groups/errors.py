# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a KV cache spec."""

from __future__ import annotations

from vllm_ascend_kvext.errors import KvextError


class GroupError(KvextError, ValueError):
    """A KV cache group contradicts itself, or is not understood.

    The message names the layer or group, both numbers and the remedy.
    """
