# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Compares the answers of a line with this package and without, and keeps the differences as data.

The answers are those of the stage ``engine``, see `support.official_lines.start.answers_of`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from support.official_lines import ARMS, DATA
from support.official_lines.start import IN_HOST_MEMORY, LABELS, ON_DEVICE, ZEROED
from support.scenarios.answers import NPU_TOLERANCE, WRONG, Answer, logprob_error


class Compared(NamedTuple):
    """How a line answers with this package.

    Attributes:
        largest: The largest difference of a top-5 log-probability from the answers without it.
        control: The least such difference where host memory was zeroed before it was loaded.
    """

    largest: float
    control: float


def compared(reports: Mapping[str, Mapping[str, Any]]) -> Compared:
    """Compare the reports of a line's arms. The first arm is the one without this package.

    Raises:
        AssertionError: An arm has not answered, or answers otherwise, or reuses less; or a wrong
            host memory does not show.
    """
    answers = {arm: _answers(report) for arm, report in reports.items()}
    without, *ours = answers
    reference = answers[without]
    errors, controls = [], []
    for arm in ours:
        found, has_connector = answers[arm], ARMS[arm][1]
        for label in LABELS:
            error = logprob_error(found[label], reference[label])
            if label == ZEROED and has_connector:
                controls.append(error)
                continue
            assert found[label].reply == reference[label].reply, (arm, label)
            errors.append(error)
        assert found[ON_DEVICE].hit_tokens >= reference[ON_DEVICE].hit_tokens, arm
        assert (found[IN_HOST_MEMORY].hit_tokens > 0) is has_connector, arm
    result = Compared(max(errors), min(controls))
    assert result.largest <= NPU_TOLERANCE, result
    assert result.control > WRONG, result
    return result


def _answers(report: Mapping[str, Any]) -> dict[str, Answer]:
    assert report["stage"] == "engine", report.get("error", report)
    return {label: Answer(0, **found) for label, found in report["answers"].items()}


def known_answers(release: str) -> dict[str, Compared]:
    """What was found when all lines that the emulation runs were started, by line."""
    kept = json.loads(_file(release).read_text())
    return {name: Compared(*values) for name, values in kept.items()}


def keep_answers(release: str, found: Mapping[str, Compared]) -> None:
    """Keep differences, with two digits."""
    rows = [
        f"{json.dumps(name)}: {json.dumps([float(f'{value:.1e}') for value in values])}"
        for name, values in found.items()
    ]
    text = ",\n".join(rows)
    _file(release).write_text(f"{{\n{text}\n}}\n")


def _file(release: str) -> Path:
    return DATA / f"answers-{release}.json"
