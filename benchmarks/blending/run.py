# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Measures what blending gains and costs with a real language model, on the real engine.

    python benchmarks/blending/run.py [--quick] [--mode M] [--questions N] [--out FOLDER]

SmolLM2-135M-Instruct, in float32, answers generated questions about eight documents of 100 to 200
tokens; see `questions.py`. Every prompt has its own order of documents and is sent once. In modes
that blend, most documents were stored before; zero, one or two documents of a prompt are missing.
In modes with *text* in their names, the documents were stored behind a text; see `sink_text.py`.
Every mode has its own process and gets the same prompts. Full recompute comes first, and its
answers are the references: the other modes report how probable they find each token of these
answers.

Exact match (EM) is measured on the answer that a mode generates. KL and top-1 are measured against
full recompute, over its answer. Intervals are a paired bootstrap over questions. *Computed* is the
number of prompt tokens that the engine computes until the first token. *Of segments* is the share
of stored documents that is recomputed. A table and all numbers as JSON are written to --out. With
--resume, modes whose results for the same prompts are in --out are not measured again.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from pathlib import Path

# Modules are found by their full names below benchmarks/, not by short names in this folder.
sys.path[0] = str(Path(__file__).parents[1])

from common.cpu_engine import ENVIRON  # noqa: E402
from common.processes import processes  # noqa: E402
from common.report import parser, write  # noqa: E402

from blending import report, smollm2  # noqa: E402
from blending.engine import Answers, serve  # noqa: E402
from blending.modes import DEFAULT, FULL, HEADS_16, MODES, PLAIN, PREFIX_CACHING  # noqa: E402
from blending.prompts import MISSING, FolderTokenizer, Workload, make_workload  # noqa: E402

QUESTIONS = 12
SEEDS = (0, 1)
QUICK_MODES = (FULL.name, PREFIX_CACHING.name, PLAIN.name, HEADS_16.name, DEFAULT.name)
MODE_VARIABLE = "VLLM_ASCEND_KVEXT_MODE"


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__, "bench-blending")
    options.add_argument("--mode", action="append", choices=MODES)
    options.add_argument(
        "--questions", type=int, help=f"of each kind and number of missing documents: {QUESTIONS}"
    )
    options.add_argument("--seed", action="append", type=int, help="of documents and questions")
    options.add_argument("--resume", action="store_true", help="keep modes that are measured")
    found = options.parse_args()
    wanted = found.mode or list(QUICK_MODES if found.quick else MODES)
    found.mode = [name for name in MODES if name in {FULL.name, *wanted}]
    found.questions = found.questions or (1 if found.quick else QUESTIONS)
    found.seed = found.seed or list(SEEDS[:1] if found.quick else SEEDS)
    found.missing = MISSING[:1] if found.quick else MISSING
    return found


def measure(
    name: str, workload: Workload, reference: Answers | None, out: Path, resumes: bool
) -> Answers:
    """Measure one mode in its own process, or read its answers from ``out``."""
    path = out / f"{name.replace(' ', '-')}.pickle"
    if resumes and path.is_file():
        asked, found = pickle.loads(path.read_bytes())
        if asked == workload:
            return found
    environ = ENVIRON if MODES[name].blends else {**ENVIRON, MODE_VARIABLE: "off"}
    model = str(smollm2.DEFAULT_FOLDER)
    with processes(1, environ) as process:
        found = process.submit(serve, MODES[name], model, workload, reference).result()
    path.write_bytes(pickle.dumps((workload, found)))
    return found


def main() -> None:
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = FolderTokenizer(smollm2.build())
    workload = make_workload(tokenizer, arguments.questions, arguments.missing, arguments.seed)
    found: dict[str, Answers] = {}
    for name in arguments.mode:
        found[name] = measure(name, workload, found.get(FULL.name), arguments.out, arguments.resume)
    rows = list(report.rows(workload, found, tokenizer.decode))
    lines = [report.TABLE.head, *map(report.line, rows)]
    blending = {MODES[name].has_text_sink: found[name] for name in found if MODES[name].blends}
    lines += [report.storing(workload, answers) for answers in blending.values()]
    print(*lines, sep="\n")
    write(arguments.out, lines, rows)


if __name__ == "__main__":
    main()
