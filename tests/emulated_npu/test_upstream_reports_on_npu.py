# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The scripts of reports that need an NPU print what the reports say, without this package."""

from __future__ import annotations

from importlib import metadata

from support.upstream_reports import reports_of, run

RELEASE = f"vLLM-Ascend {metadata.version('vllm-ascend')}"


def test_the_scripts_of_reports_print_what_the_reports_say() -> None:
    chosen = reports_of(RELEASE, needs_npu=True)
    assert chosen
    assert run(chosen) == {report.name: report.outputs[RELEASE] for report in chosen}
