# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Start all lines of a release, and keep their outcomes as data.

    python -m support.official_lines.record RELEASE FOLDER [TEXT OF A LINE'S NAME]

It runs in the environment of the emulated NPU of the release, in ``tests``. ``FOLDER`` gets models
and logs. With a text, only lines whose names have it are started, and nothing is kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

from support.official_lines import keep_outcomes, official_lines
from support.official_lines.outcomes import Starts


def main() -> None:
    release, folder, *text = sys.argv[1:]
    lines = official_lines(release)
    chosen = [line for line in lines if not text or text[0] in line.name]
    Path(folder).mkdir(parents=True, exist_ok=True)
    starts = Starts(chosen, Path(folder), "configuration")
    found = {}
    for line in chosen:
        found[line.name] = starts.outcomes(line)
        print(line.name, found[line.name], flush=True)
    if not text:
        keep_outcomes(release, found)


if __name__ == "__main__":
    main()
