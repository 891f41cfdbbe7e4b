# SPDX-License-Identifier: Apache-2.0
"""What is said to the user when a feature does not fit."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_ascend_kvext.compat import Upstream, supported_versions
from vllm_ascend_kvext.patching.plan import FeaturePlan
from vllm_ascend_kvext.settings import MODE_VARIABLE, Mode, Settings

REMEDY = (
    "`python -m vllm_ascend_kvext status` shows every patch; "
    f"{MODE_VARIABLE}={Mode.OFF.value} turns the package off."
)


def explain_misfits(plans: Iterable[FeaturePlan], upstream: Upstream, settings: Settings) -> str:
    """Every misfit of some features, with expected, found and the remedy."""
    paragraphs = [_explain(plan, upstream, settings) for plan in plans]
    paragraphs.append(f"Remedy: install {supported_versions()} as published. {REMEDY}")
    return "\n".join(paragraphs)


def _explain(plan: FeaturePlan, upstream: Upstream, settings: Settings) -> str:
    request = settings.requests.get(plan.feature)
    asked = f" It was requested with {request}." if request else ""
    lines = [
        f"vllm-ascend-kvext does not install the feature {plan.feature!r}: it does not fit "
        f"{upstream}.{asked}"
    ]
    for finding in plan.misfits or plan.findings:
        patch = finding.patch
        lines.append(f"  {patch.id} {finding.state.name} {patch.target}: {finding.reason}")
    return "\n".join(lines)
