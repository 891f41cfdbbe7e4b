# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Print the ids of patches that are free, by range. A new patch takes one of them.

The command reads declarations only: it imports neither vLLM nor vLLM-Ascend.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from vllm_ascend_kvext.patches import PATCHES
from vllm_ascend_kvext.patching.ids import RANGES, RETIRED_IDS, free_ids


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no arguments."""


def run(_arguments: argparse.Namespace) -> int:
    print("\n".join(render([patch.id for patch in PATCHES], RETIRED_IDS)))
    return 0


def render(ids: Iterable[str], retired: Iterable[str]) -> list[str]:
    """Two lines for each range: the features that share it, and its free ids."""
    used, gone = set(ids), set(retired)
    lines = []
    for first_digit, features in RANGES.items():
        beginning = f"KVX-{first_digit}"
        num_used = sum(each.startswith(beginning) for each in used)
        num_retired = sum(each.startswith(beginning) for each in gone)
        runs = [
            start if start == end else f"{start} to {end.removeprefix('KVX-')}"
            for start, end in free_ids(first_digit, used | gone)
        ]
        lines.append(f"{beginning}xx  {features}: {num_used} in use, {num_retired} retired")
        lines.append(f"  free: {', '.join(runs)}")
    return lines
