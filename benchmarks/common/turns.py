# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Features that are installed and taken back at every turn of a comparison in one process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from vllm_ascend_kvext.patching.plan import FeaturePlan


def whose_methods_stay(plans: Iterable[FeaturePlan]) -> tuple[FeaturePlan, ...]:
    """Plans whose undoing restores classes, but leaves single objects the methods that they have.

    Each variant has engines of its own, made at its first turn. What a feature has bound to their
    objects concerns no other variant.
    """
    return tuple(
        replace(
            plan,
            findings=tuple(
                replace(finding, patch=replace(finding.patch, undo=None))
                for finding in plan.findings
            ),
        )
        for plan in plans
    )
