# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The scripts of the reports about vLLM print what the reports say, without this package.

A script fails here as soon as upstream has mended its defect, or has moved what the script uses.
"""

from __future__ import annotations

import pytest
from support.upstream_reports import WRONG, Report, reports, reports_of, run
from support.upstream_version import VLLM

RELEASE = f"vLLM {VLLM}"
CHOSEN = reports_of(RELEASE)


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """All scripts run in one go, because an import of vLLM takes ten seconds."""
    return run(CHOSEN)


@pytest.mark.parametrize("report", CHOSEN, ids=lambda report: report.name)
def test_the_script_of_a_report_prints_what_the_report_says(
    report: Report, printed: dict[str, str]
) -> None:
    assert printed[report.name] == report.outputs[RELEASE]


def test_there_are_reports_about_this_release() -> None:
    assert len(CHOSEN) >= 8


@pytest.mark.main_version
@pytest.mark.parametrize("report", reports(), ids=lambda report: report.name)
def test_a_report_names_the_releases_whose_output_is_wrong(report: Report) -> None:
    wrong = {release for release, output in report.outputs.items() if WRONG in output}
    assert wrong == report.releases
