# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Lists the features that a user can request or switch off, and the order of their installation.

The module knows no patch and no variable. `vllm_ascend_kvext.patches` declares the patches of a
feature, and `vllm_ascend_kvext.settings` the variable that requests it.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_ascend_kvext.patching.declaration import Feature

ALIGNED_STEPS = Feature("aligned-steps", default_on=True)
"""Installed before retention, which shortens the steps that this repair has aligned."""

REPAIRS = (
    Feature("trim-full-groups", default_on=True),
    Feature("two-phase-allocation", default_on=True),
    Feature("context-parallel-windows", default_on=True),
    Feature("drafts-in-flight", default_on=True),
    Feature("discarded-frames", default_on=True),
    Feature("preempted-in-step", default_on=True),
    Feature("failed-loads", default_on=True),
    Feature("state-copies", default_on=True),
    Feature("expert-groups", default_on=True),
    Feature("configured-interval", default_on=True),
    Feature("state-hits", default_on=True),
    Feature("block-copies", default_on=True),
    Feature("accepted-drafts", default_on=True),
    Feature("state-columns", default_on=True),
    Feature("multi-connector-handshakes", default_on=True),
    Feature("c8-beside-connectors", default_on=True),
    ALIGNED_STEPS,
)
"""Repairs of upstream defects. They are on by default, and independent of each other."""

FAST_PREFIX_CACHE = Feature("fast-prefix-cache")
"""The fast path changes no decision. It comes first, so that later features wrap its functions."""

CONNECTOR = Feature("connector", default_on=True)
"""The feature changes nothing in an engine that is started without KvextConnector."""

LMCACHE = Feature("lmcache", default_on=True)
"""The feature changes nothing in an engine that is started without LMCacheMPConnector."""

DEFAULTS = (*REPAIRS, CONNECTOR, LMCACHE)
"""The features that are on by default, and that a user can leave out by name."""

FEATURES = (
    FAST_PREFIX_CACHE,
    ALIGNED_STEPS,
    Feature("retention", requires=("trim-full-groups", "preempted-in-step")),
    *(each for each in DEFAULTS if each is not ALIGNED_STEPS),
)
"""All features, in the order of installation. The wrappers of a later feature lie outside."""


def with_requirements(names: Iterable[str], features: Iterable[Feature]) -> frozenset[str]:
    """Some features and the features that they require. A required feature requires no other."""
    asked = frozenset(names)
    return asked.union(*(feature.requires for feature in features if feature.name in asked))
