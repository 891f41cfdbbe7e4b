# SPDX-License-Identifier: Apache-2.0
"""Serve prompts to a tiny model in one mode after the other, in this process.

Started by `in_engine.py`. Each mode has an engine of its own, which gets every prompt once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# Instead of this folder, whose modules are not to be found by their short names.
sys.path[0] = str(Path(__file__).parents[2])

from blending.engine import ENVIRON, Engine  # noqa: E402
from blending.modes import Mode  # noqa: E402
from blending.prompts import Workload  # noqa: E402
from blending.tiny.model import SERVED_VARIANTS, write_folder  # noqa: E402
from blending.tiny.task import FIRST_NOISE, NUM_NOISE  # noqa: E402

HOST_GIB = 0.5
ENGINE_OPTIONS = {
    "max_model_len": 256,
    # Longer than a document behind its sink, so that what was stored is in no prefix cache, where
    # the first document of a prompt would find it.
    "block_size": 32,
    "num_gpu_blocks_override": 4096,
}

EQUAL_TOKENS = tuple(range(FIRST_NOISE, FIRST_NOISE + NUM_NOISE)) * 4
"""A segment for the check of keys: too few tokens occur twice in most documents, and nothing is
reused before a segment has passed it."""


def serve(mode: Mode, model: str, workload: Workload) -> dict[str, Any]:
    """One mode.

    Returns:
        ``replies``: of each prompt; ``computed_tokens``: for all of them.
    """
    engine = Engine(mode, model, HOST_GIB, **ENGINE_OPTIONS)
    if mode.blends:
        engine.store_all([EQUAL_TOKENS])
        engine.store_all(workload.stored)
    replies, computed_tokens = engine.ask_all(workload.prompts)
    engine.close()
    return {"replies": replies, "computed_tokens": computed_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--variant", choices=SERVED_VARIANTS, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--modes", type=Path, required=True, help="JSON: fields of each mode")
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    workload = Workload.read(arguments.workload)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_folder(arguments.variant, arguments.seed, Path(folder))
        for fields in json.loads(arguments.modes.read_text()):
            mode = Mode(**fields)
            found[mode.name] = serve(mode, folder, workload)
    arguments.out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRON.items()})
    main()
