# SPDX-License-Identifier: Apache-2.0
"""What the connector refuses."""

from __future__ import annotations

from vllm_ascend_kvext.errors import KvextError


class ConnectorError(KvextError):
    """The connector cannot work with this configuration, or was used out of order."""
