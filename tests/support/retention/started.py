# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The object that decides which blocks of a coordinator are cached."""

from __future__ import annotations

from typing import Any

from vllm_ascend_kvext.upstream_state import CoordinatorState


def retention_of(coordinator: Any) -> Any:
    """Retention of a coordinator. None if upstream decides."""
    return CoordinatorState.of(coordinator).retention
