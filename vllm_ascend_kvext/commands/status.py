# SPDX-License-Identifier: Apache-2.0
"""Activate the package in this process, as vLLM would, and show what came of each feature.

Exit status: 0 (ok) if everything fits; 1 (degraded) if something that was not asked for does not,
or upstream is missing or unsupported; 2 (failed) if something that was asked for is impossible.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, astuple, dataclass, field
from importlib import metadata
from typing import Any

from vllm_ascend_kvext import __version__, activation, compat
from vllm_ascend_kvext.activation import Activation
from vllm_ascend_kvext.blending.gate_records import GateRecord, all_records
from vllm_ascend_kvext.commands.feature_states import FeatureRow, describe_features
from vllm_ascend_kvext.commands.hole_reasons import HOLES_HEADER, HoleRow, describe_holes
from vllm_ascend_kvext.commands.table import render_rows
from vllm_ascend_kvext.compat import Upstream
from vllm_ascend_kvext.errors import KvextError
from vllm_ascend_kvext.patching.plan import Finding, State, digest
from vllm_ascend_kvext.settings import Mode, Settings

_ENTRY_POINT_GROUP = "vllm.general_plugins"
_ENTRY_POINT = "ascend_kvext"


class Part(enum.Enum):
    """Of the report, for people: shown if asked for. The value is the name of the argument."""

    PATCHES = "patches"
    HOLES = "holes"
    BLENDING = "blending"


_MODELS_HEADER = ("model", "segments are", "because", "asked at")


_SHORTEST_HIT = (
    "shortest prompt that hits: it depends on the model and --block-size; an engine's log says it "
    'in "Prefix-cache hits on the device: ...", and for host memory in "KvextConnector: ... hits: '
    '..."'
)


class Verdict(enum.Enum):
    """The value is the exit status."""

    OK = 0
    DEGRADED = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class PatchRow:
    """One patch of the report; `state` is a value of `State`."""

    id: str
    feature: str
    kind: str
    target: str
    state: str
    reason: str


@dataclass(slots=True)
class StatusReport:
    """The answer of the command; its fields are the keys of ``--json``."""

    version: str = __version__
    verdict: str = Verdict.OK.name.lower()
    mode: str = ""
    requested: dict[str, str] = field(default_factory=dict)
    upstream: dict[str, Any] = field(default_factory=dict)
    supported: bool = False
    plan: str = ""
    notes: list[str] = field(default_factory=list)
    error: str = ""
    features: list[FeatureRow] = field(default_factory=list)
    holes: list[HoleRow] = field(default_factory=list)
    models: list[GateRecord] = field(default_factory=list)
    patches: list[PatchRow] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--patches", action="store_true", help="list every patch, too")
    parser.add_argument(
        "--holes", action="store_true", help="list where holes are computed, and where not, too"
    )
    parser.add_argument(
        "--blending", action="store_true", help="list models that were asked, and why not, too"
    )


def run(arguments: argparse.Namespace) -> int:
    # vLLM logs to standard output, which is for the report.
    with contextlib.redirect_stdout(sys.stderr):
        report = diagnose()
    if arguments.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        parts = {part for part in Part if getattr(arguments, part.value)}
        print("\n".join(render(report, parts)))
    return Verdict[report.verdict.upper()].value


def diagnose() -> StatusReport:
    """Activate, and describe what came of it."""
    report = StatusReport()
    try:
        upstream = compat.detect(os.environ)
        report.upstream = asdict(upstream)
        report.supported = compat.check_support(upstream).ok
        settings = Settings.from_environ(os.environ)
        report.mode = settings.mode.value
        report.requested = {name: os.environ[name] for name in settings.requests.values()}
        if report.supported:
            report.holes = describe_holes(settings, upstream)
            report.models = _models()
        surveyed = activation.survey(settings, plan_everything=True)
    except Exception as error:
        return _failed(report, error)
    try:
        activation.install(surveyed)
    except Exception as error:
        _failed(report, error)
    report.plan = digest(surveyed.plans)
    findings = activation.current_findings(surveyed)
    report.patches = [_row(finding) for finding in findings]
    report.features = describe_features(surveyed, findings)
    if not report.error:
        report.notes = _complaints(surveyed, findings)
        report.verdict = _verdict(surveyed, report.notes).name.lower()
    return report


def _models() -> list[GateRecord]:
    """What engines of this user have found out about models."""
    from vllm import envs

    return all_records(envs.VLLM_CACHE_ROOT)


def _verdict(surveyed: Activation, notes: Sequence[str]) -> Verdict:
    if surveyed.settings.requests and surveyed.settings.mode is not Mode.OFF and _obstacles():
        return Verdict.FAILED
    return Verdict.DEGRADED if notes else Verdict.OK


def _failed(report: StatusReport, error: Exception) -> StatusReport:
    is_expected = isinstance(error, KvextError)
    report.error = str(error) if is_expected else f"{type(error).__name__}: {error}"
    report.verdict = Verdict.FAILED.name.lower()
    if not is_expected or error.__cause__ is not None:
        traceback.print_exception(error, file=sys.stderr)
    return report


def _row(finding: Finding) -> PatchRow:
    patch = finding.patch
    return PatchRow(
        id=patch.id,
        feature=patch.feature,
        kind=patch.kind.value,
        target=patch.target,
        state=finding.state.value,
        reason=finding.reason,
    )


def _complaints(surveyed: Activation, findings: Sequence[Finding]) -> list[str]:
    """What is wrong although nothing that was asked for is."""
    if surveyed.settings.mode is Mode.OFF:
        return []
    if not surveyed.support.ok:
        return [surveyed.support.reason]
    complaints = [f"the feature {plan.feature!r} does not fit" for plan in surveyed.misfits]
    complaints += [
        f"{finding.patch.id} is shadowed: another patch has replaced {finding.patch.target}"
        for finding in findings
        if finding.state is State.SHADOWED
    ]
    return complaints + _obstacles()


def _obstacles() -> list[str]:
    """Why vLLM would not load the package, although it loads here."""
    obstacles = []
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and _ENTRY_POINT not in plugins.split(","):
        obstacles.append(f"VLLM_PLUGINS={plugins!r} keeps vLLM from loading {_ENTRY_POINT!r}")
    if not metadata.entry_points(group=_ENTRY_POINT_GROUP, name=_ENTRY_POINT):
        obstacles.append("the package is importable and not installed: vLLM does not find it")
    return obstacles


def render(report: StatusReport, parts: Collection[Part] = ()) -> list[str]:
    """The report for a person: lines."""
    upstream = Upstream(**report.upstream) if report.upstream else "an unknown upstream"
    lines = [f"vllm-ascend-kvext {report.version} on {upstream}: {report.verdict}"]
    requested = [f"{name}={value}" for name, value in report.requested.items()]
    rows = [("mode", report.mode or "?", f"asked for: {', '.join(requested) or 'nothing'}")]
    rows += [(row.name, row.state, row.reason) for row in report.features]
    lines += [f"  {line}" for line in render_rows(rows)]
    lines += [f"note: {note}" for note in report.notes]
    if report.error:
        lines += ["", report.error]
    if report.patches and Part.PATCHES in parts:
        rows_of_patches = [
            (row.id, row.feature, row.state, row.target, row.reason) for row in report.patches
        ]
        header = ("id", "feature", "state", "target", "reason")
        lines += ["", f"patches (plan digest {report.plan}):"]
        lines += render_rows([header, *rows_of_patches])
    elif report.patches:
        states = Counter(row.state for row in report.patches)
        counts = ", ".join(f"{number} {state}" for state, number in states.most_common())
        lines.append(f"patches: {counts}; `status --patches` lists them")
    if report.holes and Part.HOLES in parts:
        lines += ["", *render_rows([HOLES_HEADER, *map(astuple, report.holes)])]
    elif report.holes:
        lines.append(f"holes: {report.holes[0].holes}; `status --holes` says where not, and why")
    if report.holes:
        lines.append(_SHORTEST_HIT)
    if report.models and Part.BLENDING in parts:
        rows_of_models = [
            (row.model, "reused" if row.passed else "computed", row.message, row.checked_at)
            for row in report.models
        ]
        lines += ["", *render_rows([_MODELS_HEADER, *rows_of_models])]
    elif report.models:
        num_passed = sum(row.passed for row in report.models)
        lines.append(
            f"blending: {len(report.models)} checks of models, {num_passed} passed; "
            "`status --blending` lists them"
        )
    return lines
