# SPDX-License-Identifier: Apache-2.0
"""Features of ours, installed in this process for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_ascend_kvext.activation import apply_feature, revert_feature
from vllm_ascend_kvext.features import REPAIRS


@contextmanager
def installed(*features: str) -> Iterator[None]:
    """These features, and those that they require, are in effect; nothing is afterwards."""
    for feature in features:
        apply_feature(feature)
    try:
        yield
    finally:
        for feature in reversed(features):
            revert_feature(feature)


@contextmanager
def repairs_installed() -> Iterator[None]:
    """As in a process in which nothing is configured."""
    with installed(*(repair.name for repair in REPAIRS)):
        yield


@contextmanager
def retention_installed() -> Iterator[None]:
    """Whether anything is retained depends on the interval when a block manager is built.

    The repairs are in effect as well, as they are wherever retention is asked for.
    """
    with installed(*(repair.name for repair in REPAIRS), "retention"):
        yield
