# SPDX-License-Identifier: Apache-2.0
"""The retention patches, installed in this process for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_ascend_kvext.activation import apply_feature, revert_feature


@contextmanager
def retention_installed() -> Iterator[None]:
    """Whether anything is retained depends on the interval when a block manager is built."""
    apply_feature("retention")
    try:
        yield
    finally:
        revert_feature("retention")
