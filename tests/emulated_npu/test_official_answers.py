# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A line of vLLM-Ascend's tutorials answers with this package as it does alone.

For each family whose model the emulation runs, one line starts an engine with its own drafts,
scheduler and further flags, and a small random model. It has one device, floats and no graphs, see
`support.official_lines.OF_A_NODE` and `SMALL`. A prompt is new, then on the device, then in host
memory. Pages hold wrong bytes before anything is loaded. ``docs/official_lines.md`` has all lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

import pytest
from support.official_lines import OfficialLine, official_lines
from support.official_lines.answers import compared, known_answers
from support.official_lines.outcomes import Starts

RELEASE = metadata.version("vllm-ascend")


def first_of_each_family() -> list[OfficialLine]:
    known = known_answers(RELEASE)
    of_families: dict[str, OfficialLine] = {}
    for line in official_lines(RELEASE):
        if line.name in known:
            of_families.setdefault(line.family, line)
    return [*of_families.values()]


LINES = first_of_each_family()


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starts]:
    started = Starts(LINES, tmp_path_factory.mktemp("lines"), "engine")
    yield started
    started.end()


@pytest.mark.timeout(3600)  # A line waits for the lines that are started before it.
@pytest.mark.parametrize("line", LINES, ids=[line.name for line in LINES])
def test_a_line_answers_as_without_this_package(starts: Starts, line: OfficialLine) -> None:
    print(f"\n{compared(starts.reports(line))}")
