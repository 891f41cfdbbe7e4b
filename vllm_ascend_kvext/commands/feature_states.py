# SPDX-License-Identifier: Apache-2.0
"""One line per feature for `status`: on or off, and why.

Describes an activation that has already happened; changes nothing. Knows no single feature.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ascend_kvext.activation import Activation
from vllm_ascend_kvext.features import FAST_PREFIX_CACHE, FEATURES, with_requirements
from vllm_ascend_kvext.patching.plan import Finding, State
from vllm_ascend_kvext.settings import (
    DISABLE_VARIABLE,
    FAST_PREFIX_CACHE_VARIABLE,
    HOW_TO_ASK,
    MODE_VARIABLE,
    Mode,
    Switch,
)


class FeatureState(enum.Enum):
    """Where a feature stands in this process."""

    ON = "on"
    OFF = "off"
    NOT_NEEDED = "not needed"
    """It is wanted, and no patch of it is for this vLLM and vLLM-Ascend."""
    REFUSED = "refused"
    """It is wanted, and not all of its patches are in effect."""


@dataclass(frozen=True, slots=True)
class FeatureRow:
    """One feature of the report; `state` is a value of `FeatureState`."""

    name: str
    state: str
    reason: str


def describe_features(surveyed: Activation, findings: Sequence[Finding]) -> list[FeatureRow]:
    """Every feature, in the order of installation.

    Args:
        findings: Every planned patch as it stands, see `activation.current_findings`.
    """
    rows = []
    for feature in FEATURES:
        own = [finding for finding in findings if finding.patch.feature == feature.name]
        state, reason = _describe(feature.name, surveyed, own)
        rows.append(FeatureRow(feature.name, state.value, reason))
    return rows


def _describe(
    name: str, surveyed: Activation, findings: Sequence[Finding]
) -> tuple[FeatureState, str]:
    if surveyed.settings.mode is Mode.OFF:
        return FeatureState.OFF, f"{MODE_VARIABLE}={Mode.OFF.value}"
    if not surveyed.support.ok:
        return FeatureState.OFF, "this upstream is not supported"
    needed = [finding for finding in findings if finding.state is not State.SKIPPED_VERSION]
    misfits = [finding for finding in needed if finding.state not in (State.INERT, State.APPLIED)]
    named = ", ".join(f"{finding.patch.id} {finding.state.value}" for finding in misfits)
    if not surveyed.wants(name):
        reason = _why_off(name, surveyed)
        return FeatureState.OFF, f"{reason}; it would not fit: {named}" if named else reason
    if not needed:
        return FeatureState.NOT_NEEDED, f"no patch of it is for {surveyed.upstream}"
    if misfits:
        return FeatureState.REFUSED, f"{named}; `status --patches` says why"
    if any(finding.state is State.INERT for finding in needed):
        return FeatureState.REFUSED, "not installed because of the error below"
    return FeatureState.ON, _why_on(name, surveyed)


def _why_off(name: str, surveyed: Activation) -> str:
    settings = surveyed.settings
    if name in settings.disabled:
        return f"{DISABLE_VARIABLE} names it"
    if name == FAST_PREFIX_CACHE.name and settings.fast_prefix_cache is Switch.OFF:
        return f"{FAST_PREFIX_CACHE_VARIABLE}={Switch.OFF.value}"
    return f"not asked for; {HOW_TO_ASK[name]} does" if name in HOW_TO_ASK else "not asked for"


def _why_on(name: str, surveyed: Activation) -> str:
    settings = surveyed.settings
    if variable := settings.requests.get(name):
        return f"asked for with {variable}"
    if name in settings.implied_features:
        return "comes with what is asked for"
    if any(feature.name == name and feature.default_on for feature in FEATURES):
        return "on by default"
    needing = [
        asked for asked in sorted(settings.requests) if name in with_requirements([asked], FEATURES)
    ]
    return f"needed by {', '.join(needing)}"
