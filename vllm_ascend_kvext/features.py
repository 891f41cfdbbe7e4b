# SPDX-License-Identifier: Apache-2.0
"""The features: what a user asks for or switches off, and what is built on what.

Knows no patch and no variable: `vllm_ascend_kvext.patches` says what a feature consists of,
`vllm_ascend_kvext.settings` how one asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_ascend_kvext.patching.declaration import Feature

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
    Feature("aligned-steps", default_on=True),
)
"""Defects of upstream that are repaired without being asked for, each on its own."""

FAST_PREFIX_CACHE = Feature("fast-prefix-cache")
"""Changes no decision. Innermost: what others do differently wraps what it does faster."""

CONNECTOR = Feature("connector", default_on=True)
"""Changes nothing in an engine that is started without KvextConnector."""

LMCACHE = Feature("lmcache", default_on=True)
"""Changes nothing in an engine that is started without LMCacheMPConnector."""

DEFAULTS = (*REPAIRS, CONNECTOR, LMCACHE)
"""What is on without being asked for, and can be left out by name."""

FEATURES = (
    FAST_PREFIX_CACHE,
    Feature("retention", requires=("trim-full-groups", "preempted-in-step")),
    *DEFAULTS,
)
"""All of them, in the order of installation: the wrappers of a later one lie outside."""


def with_requirements(names: Iterable[str], features: Iterable[Feature]) -> frozenset[str]:
    """These features and those that they require, which require nothing themselves."""
    asked = frozenset(names)
    return asked.union(*(feature.requires for feature in features if feature.name in asked))
