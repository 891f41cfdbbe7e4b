# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Installs features of this package in this process, for the time of a block."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from vllm_ascend_kvext.activation import introduce_interval, survey
from vllm_ascend_kvext.features import FEATURES, REPAIRS, with_requirements
from vllm_ascend_kvext.patching.install import BOOK
from vllm_ascend_kvext.patching.plan import FeaturePlan
from vllm_ascend_kvext.settings import Mode, Settings


@functools.cache
def _plans() -> tuple[FeaturePlan, ...]:
    """The plans of all features. They are made only once, because checking fingerprints is slow."""
    return survey(Settings(mode=Mode.STRICT)).plans


def apply_feature(feature: str) -> tuple[str, ...]:
    """Install a feature and its requirements. Return the patches that were not in effect before."""
    needed = with_requirements([feature], FEATURES)
    plans = [plan for plan in _plans() if plan.feature in needed]
    assert {plan.feature for plan in plans} == needed, "this upstream is not supported"
    return tuple(id for plan in plans if plan.fits or plan.misfits for id in BOOK.apply(plan))


def revert_feature(feature: str) -> None:
    """Take back a feature and its requirements. The last patch goes first."""
    needed = with_requirements([feature], FEATURES)
    for name in reversed([each.name for each in FEATURES if each.name in needed]):
        BOOK.revert(name)


@contextmanager
def installed(*features: str) -> Iterator[None]:
    """Install these features and their requirements, inside the block.

    The order is that in which a user's process installs them.
    """
    ordered = [each.name for each in FEATURES if each.name in features]
    assert len(ordered) == len(features)
    for feature in ordered:
        apply_feature(feature)
    try:
        yield
    finally:
        for feature in reversed(ordered):
            revert_feature(feature)


@contextmanager
def repairs_installed() -> Iterator[None]:
    """Install the features of a process without settings, inside the block."""
    with installed(*(repair.name for repair in REPAIRS)):
        yield


@contextmanager
def retention_installed() -> Iterator[None]:
    """Install retention and the repairs, like an engine that asks for retention.

    Whether anything is retained depends on the interval at the time when a block manager is built.
    Upstream also finds the interval's variable, because vLLM-Ascend's coordinators read it.
    """
    from vllm import envs

    with (
        mock.patch.dict(envs.environment_variables),
        installed(*(repair.name for repair in REPAIRS), "retention"),
    ):
        introduce_interval()
        yield
