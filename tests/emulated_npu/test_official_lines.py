# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Every command line of vLLM-Ascend's tutorials starts with this package, or is refused in words.

Each line is started up to its configuration, with all its flags and sizes: without this package,
with retention, with KvextConnector, and with both. ``docs/official_lines.md`` shows the outcomes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from importlib import metadata

import pytest
from support.official_lines import OfficialLine, known_outcomes, official_lines
from support.official_lines.outcomes import Starts
from support.sample import IS_SAMPLE

RELEASE = metadata.version("vllm-ascend")
SEED = 53
SAMPLE = 8
"""The number of lines that `make test` starts. Each is started four times."""


def chosen_lines() -> list[OfficialLine]:
    """All lines, or a sample in which each kind of outcome occurs."""
    lines = official_lines(RELEASE)
    if not IS_SAMPLE:
        return lines
    random.Random(SEED).shuffle(lines)
    known = known_outcomes(RELEASE)
    of_kinds = {known[line.name]["both"].split(":")[0]: line for line in lines}
    others = [line for line in lines if line not in of_kinds.values()]
    return [*of_kinds.values(), *others][:SAMPLE]


LINES = chosen_lines()


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starts]:
    started = Starts(LINES, tmp_path_factory.mktemp("lines"), "configuration")
    yield started
    started.end()


@pytest.mark.timeout(1800)  # A line waits for the lines that are started before it.
@pytest.mark.parametrize("line", LINES, ids=[line.name for line in LINES])
def test_a_line_has_the_outcome_of_the_page(starts: Starts, line: OfficialLine) -> None:
    found = starts.outcomes(line)
    assert not [text for text in found.values() if text.startswith("broken")]
    assert found == known_outcomes(RELEASE)[line.name]


def test_every_line_has_an_outcome_and_every_refusal_says_what_to_change() -> None:
    known = known_outcomes(RELEASE)
    assert [line.name for line in official_lines(RELEASE)] == [*known]
    for name, of_arms in known.items():
        for arm, text in of_arms.items():
            assert re.match("(started|refused|not emulated|upstream): ", text), (name, arm, text)
            if text.startswith("refused"):
                assert re.search(r"; (use|set|leave|start) ", text), (name, arm, text)
