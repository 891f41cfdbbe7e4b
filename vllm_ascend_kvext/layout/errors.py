# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a layout, and with what is asked of it."""

from __future__ import annotations

from vllm_ascend_kvext.errors import KvextError
from vllm_ascend_kvext.groups.errors import GroupError


class LayoutError(GroupError):
    """The KV cache config and the registered tensors contradict each other, or are not understood.

    The message names the layer or group, both numbers and the remedy.
    """


class TokenRangeError(KvextError, ValueError):
    """A token range, or the block ids that come with it, does not fit the layout."""
