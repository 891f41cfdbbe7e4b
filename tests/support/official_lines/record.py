# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Start all lines of a release, and keep what comes of them as data.

    python -m support.official_lines.record RELEASE FOLDER [--stage engine] [--only TEXT]

It runs in the environment of the emulated NPU of the release, in ``tests``. ``FOLDER`` gets models
and logs. With a text, only lines whose names have it are started, and nothing is kept.

In the stage ``engine``, lines with KV connectors of their own are left out, because these connect
nodes. Each line is started without this package, and with all of it. The lines of which a
comparison could be made are kept, and why others could not is printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from support.official_lines import BOTH, OfficialLine, keep_outcomes, official_lines
from support.official_lines.answers import Compared, compared, keep_answers
from support.official_lines.outcomes import Starts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("release")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stage", choices=("configuration", "engine"), default="configuration")
    parser.add_argument("--only", default="", metavar="TEXT")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    lines = [line for line in official_lines(options.release) if options.only in line.name]
    if options.stage == "engine":
        answers = record_answers(lines, options.folder)
        if not options.only:
            keep_answers(options.release, answers)
        return
    starts = Starts(lines, options.folder, options.stage)
    found = {}
    for line in lines:
        found[line.name] = starts.outcomes(line)
        print(line.name, found[line.name], flush=True)
    if not options.only:
        keep_outcomes(options.release, found)


def record_answers(lines: Sequence[OfficialLine], folder: Path) -> dict[str, Compared]:
    """Compare the answers of lines, by name."""
    chosen = [line for line in lines if line.family and not line.transfer_config]
    starts = Starts(chosen, folder, "engine", ("without", BOTH))
    found = {}
    for line in chosen:
        try:
            found[line.name] = compared(starts.reports(line))
        except AssertionError as error:
            print(f"{line.name}: not compared: {' '.join(str(error).split())[:300]}", flush=True)
        else:
            print(line.name, found[line.name], flush=True)
    return found


if __name__ == "__main__":
    main()
