# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The scripts of the reports about vLLM-Ascend print what the reports say, without this package."""

from __future__ import annotations

import ascend_sources
import pytest
from support.upstream_reports import Report, reports_of, run

from vllm_ascend_kvext.compat import detect

RELEASE = f"vLLM-Ascend {detect({}).vllm_ascend}"
CHOSEN = reports_of(RELEASE)


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """All scripts run in one go, because an import of vLLM takes ten seconds."""
    folder = ascend_sources.sources()
    assert folder is not None
    return run(CHOSEN, [folder, ascend_sources.STUB])


@pytest.mark.parametrize("report", CHOSEN, ids=lambda report: report.name)
def test_the_script_of_a_report_prints_what_the_report_says(
    report: Report, printed: dict[str, str]
) -> None:
    assert printed[report.name] == report.outputs[RELEASE]


def test_there_are_reports_about_this_release() -> None:
    assert len(CHOSEN) >= 6
