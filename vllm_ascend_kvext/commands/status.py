# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Activate the package in this process, as vLLM would, and show the state of each feature.

Exit status: 0 (ok) if everything fits. 1 (degraded) if a feature that was not asked for does not
fit, or if upstream is missing or unsupported. 2 (failed) if a requested feature is impossible.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from vllm_ascend_kvext import __version__, activation, compat
from vllm_ascend_kvext.activation import Activation
from vllm_ascend_kvext.commands import render_rows
from vllm_ascend_kvext.compat import Upstream
from vllm_ascend_kvext.errors import KvextError
from vllm_ascend_kvext.features import FAST_PREFIX_CACHE, FEATURES, with_requirements
from vllm_ascend_kvext.patching.plan import Finding, State, digest
from vllm_ascend_kvext.settings import (
    DISABLE_VARIABLE,
    FAST_PREFIX_CACHE_VARIABLE,
    HOW_TO_ASK,
    MODE_VARIABLE,
    Mode,
    Settings,
    Switch,
)

_ENTRY_POINT_GROUP = "vllm.general_plugins"
_ENTRY_POINT = "ascend_kvext"

OK = "ok"
DEGRADED = "degraded"
FAILED = "failed"
_VERDICTS = (OK, DEGRADED, FAILED)
"""All verdicts. The index of a verdict is the exit status."""


@dataclass(slots=True)
class StatusReport:
    """The answer of the command. Its fields are the keys of ``--json``.

    The ``state`` of a feature is ``on``, ``off``, ``not needed`` (it is wanted, but none of its
    patches is for this vLLM and vLLM-Ascend) or ``refused`` (it is wanted, but not all of its
    patches are in effect). The ``state`` of a patch is a value of `State`.
    """

    version: str = __version__
    verdict: str = OK
    mode: str = ""
    requested: dict[str, str] = field(default_factory=dict)
    upstream: dict[str, Any] = field(default_factory=dict)
    supported: bool = False
    plan: str = ""
    notes: list[str] = field(default_factory=list)
    error: str = ""
    features: list[dict[str, str]] = field(default_factory=list)
    patches: list[dict[str, str]] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--patches", action="store_true", help="list every patch, too")
    parser.add_argument("--shared-tier", metavar="URL", help="show this tier; exits 0 if it works")


def run(arguments: argparse.Namespace) -> int:
    if arguments.shared_tier is not None:
        from vllm_ascend_kvext.commands import shared_tier

        is_well, lines = shared_tier.describe(arguments.shared_tier)
        print("\n".join(lines))
        return 0 if is_well else _VERDICTS.index(FAILED)
    # vLLM logs to standard output. That stream is for the report, so the log goes to stderr.
    with contextlib.redirect_stdout(sys.stderr):
        report = diagnose()
    if arguments.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        print("\n".join(render(report, lists_patches=arguments.patches)))
    return _VERDICTS.index(report.verdict)


def diagnose() -> StatusReport:
    """Activate the package, and describe the result."""
    report = StatusReport()
    try:
        upstream = compat.detect(os.environ)
        report.upstream = asdict(upstream)
        report.supported = not compat.why_unsupported(upstream)
        settings = activation.read_settings(os.environ)
        report.mode = settings.mode.value
        report.requested = {name: os.environ[name] for name in settings.requests.values()}
        surveyed = activation.survey(settings, plan_everything=True)
    except Exception as error:
        _note_failure(report, error)
        return report
    try:
        activation.install(surveyed)
    except Exception as error:
        _note_failure(report, error)
    report.plan = digest(surveyed.plans)
    findings = activation.current_findings(surveyed)
    report.patches = [
        {
            "id": finding.patch.id,
            "feature": finding.patch.feature,
            "kind": finding.patch.kind.value,
            "target": finding.patch.target,
            "state": finding.state.value,
            "reason": finding.reason,
        }
        for finding in findings
    ]
    for feature in FEATURES:
        own = [finding for finding in findings if finding.patch.feature == feature.name]
        state, reason = _describe_feature(feature.name, surveyed, own)
        report.features.append({"name": feature.name, "state": state, "reason": reason})
    if not report.error:
        report.notes = _complaints(surveyed, findings)
        is_asked = bool(settings.requests) and settings.mode is not Mode.OFF
        report.verdict = DEGRADED if report.notes else OK
        if is_asked and _obstacles():
            report.verdict = FAILED
    return report


def _note_failure(report: StatusReport, error: Exception) -> None:
    is_expected = isinstance(error, KvextError)
    report.error = str(error) if is_expected else f"{type(error).__name__}: {error}"
    report.verdict = FAILED
    if not is_expected or error.__cause__ is not None:
        traceback.print_exception(error, file=sys.stderr)


def _describe_feature(
    name: str, surveyed: Activation, findings: Sequence[Finding]
) -> tuple[str, str]:
    """The state and the reason of a feature, from the current states of its patches."""
    if surveyed.settings.mode is Mode.OFF:
        return "off", f"{MODE_VARIABLE}={Mode.OFF.value}"
    if surveyed.why_unsupported:
        return "off", "this upstream is not supported"
    needed = [finding for finding in findings if finding.state is not State.SKIPPED_VERSION]
    fitting = (State.INERT, State.WAITING, State.APPLIED)
    misfits = [finding for finding in needed if finding.state not in fitting]
    named = ", ".join(f"{finding.patch.id} {finding.state.value}" for finding in misfits)
    if name not in activation.wanted_features(surveyed.settings):
        reason = _why_off(name, surveyed.settings)
        return "off", f"{reason}; it would not fit: {named}" if named else reason
    if not needed:
        return "not needed", f"no patch of it is for {surveyed.upstream}"
    if misfits:
        return "refused", f"{named}; `status --patches` says why"
    if any(finding.state is State.INERT for finding in needed):
        return "refused", "not installed because of the error below"
    return "on", _why_on(name, surveyed.settings)


def _why_off(name: str, settings: Settings) -> str:
    if name in settings.disabled:
        return f"{DISABLE_VARIABLE} names it"
    if name == FAST_PREFIX_CACHE.name and settings.fast_prefix_cache is Switch.OFF:
        return f"{FAST_PREFIX_CACHE_VARIABLE}={Switch.OFF.value}"
    return f"not asked for; {HOW_TO_ASK[name]} does" if name in HOW_TO_ASK else "not asked for"


def _why_on(name: str, settings: Settings) -> str:
    if variable := settings.requests.get(name):
        return f"asked for with {variable}"
    if name in settings.implied_features:
        return "comes with what is asked for"
    if any(feature.name == name and feature.default_on for feature in FEATURES):
        return "on by default"
    asked_for = sorted(settings.requests)
    needing = [each for each in asked_for if name in with_requirements([each], FEATURES)]
    return f"needed by {', '.join(needing)}"


def _complaints(surveyed: Activation, findings: Sequence[Finding]) -> list[str]:
    """Problems that do not concern a requested feature."""
    if surveyed.settings.mode is Mode.OFF:
        return []
    if surveyed.why_unsupported:
        return [surveyed.why_unsupported]
    complaints = [f"the feature {plan.feature!r} does not fit" for plan in surveyed.misfits]
    complaints += [
        f"{finding.patch.id} is shadowed: another patch has replaced {finding.patch.target}"
        for finding in findings
        if finding.state is State.SHADOWED
    ]
    return complaints + _obstacles()


def _obstacles() -> list[str]:
    """Reasons why vLLM would not load the package, although this process has loaded it."""
    obstacles = []
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and _ENTRY_POINT not in plugins.split(","):
        named = ",".join(filter(None, [plugins, _ENTRY_POINT]))
        obstacles.append(
            f"VLLM_PLUGINS={plugins!r} keeps vLLM from loading {_ENTRY_POINT!r}: it does nothing "
            f"there. Set VLLM_PLUGINS={named}"
        )
    if not metadata.entry_points(group=_ENTRY_POINT_GROUP, name=_ENTRY_POINT):
        obstacles.append("the package is importable and not installed: vLLM does not find it")
    return obstacles


def render(report: StatusReport, *, lists_patches: bool) -> list[str]:
    """The lines of the report for a person."""
    upstream = Upstream(**report.upstream) if report.upstream else "an unknown upstream"
    lines = [f"vllm-ascend-kvext {report.version} on {upstream}: {report.verdict}"]
    requested = [f"{name}={value}" for name, value in report.requested.items()]
    rows = [("mode", report.mode or "?", f"asked for: {', '.join(requested) or 'nothing'}")]
    if not report.upstream or report.upstream["vllm"] is not None:
        rows += [(row["name"], row["state"], row["reason"]) for row in report.features]
    lines += [f"  {line}" for line in render_rows(rows)]
    lines += [f"note: {note}" for note in report.notes]
    if report.error:
        lines += ["", report.error]
    if report.patches and lists_patches:
        header = ("id", "feature", "state", "target", "reason")
        table = [header, *([row[key] for key in header] for row in report.patches)]
        lines += ["", f"patches (plan digest {report.plan}):", *render_rows(table)]
    elif report.patches:
        states = Counter(row["state"] for row in report.patches)
        counts = ", ".join(f"{number} {state}" for state, number in states.most_common())
        lines.append(f"patches: {counts}; `status --patches` lists them")
    return lines
