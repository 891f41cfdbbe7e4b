# SPDX-License-Identifier: Apache-2.0
"""What blending gains and costs with a real language model, on the real engine.

    python benchmarks/blending/run.py [--quick] [--mode M] [--questions N] [--out FOLDER]

SmolLM2-135M-Instruct, in float32, answers generated questions about eight documents of 100 to 200
tokens; see `questions.py`. Every prompt has its own order of documents and is asked once. In modes
that blend, most documents were stored before; of a prompt none, one or two are missing. In modes
with *text* in their names, they were stored behind a text, see `sink_text.py`. Every mode has a
process of its own, with the same prompts. Full recompute comes first: of its answers, the
other modes say how probable they find each token.

Exact match and F1 are of what a mode says by itself; KL and top-1 are against full recompute, over
its answer. Intervals are a bootstrap over questions, paired. *Computed* are prompt tokens that the
engine computes until the first token; *of segments* is the share of stored documents that is
recomputed. A table and all numbers as JSON are written to --out; what is there of the same prompts
is not measured again with --resume.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Instead of this folder, whose modules are not to be found by their short names.
sys.path[0] = str(ROOT / "benchmarks")

from blending import report, smollm2  # noqa: E402
from blending.answers import Answers  # noqa: E402
from blending.modes import FULL, HEADS_16, MODES, PLAIN, PREFIX_CACHING  # noqa: E402
from blending.prompts import MISSING, FolderTokenizer, Workload, make_workload  # noqa: E402

QUESTIONS = 12
QUICK_QUESTIONS = 1
SEEDS = (0, 1)
QUICK_MODES = (FULL.name, PREFIX_CACHING.name, PLAIN.name, HEADS_16.name)
MODE_VARIABLE = "VLLM_ASCEND_KVEXT_MODE"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument(
        "--questions", type=int, help=f"of each kind and number of missing documents: {QUESTIONS}"
    )
    parser.add_argument("--missing", action="append", type=int, choices=MISSING)
    parser.add_argument(
        "--seed", action="append", type=int, help=f"of documents and questions: {SEEDS}"
    )
    parser.add_argument("--quick", action="store_true", help="few questions, four modes")
    parser.add_argument("--resume", action="store_true", help="keep modes that are measured")
    parser.add_argument("--model", type=Path, default=smollm2.DEFAULT_FOLDER, help="folder")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench-blending")
    found = parser.parse_args(arguments)
    found.mode = found.mode or list(QUICK_MODES if found.quick else MODES)
    if FULL.name not in found.mode:
        found.mode.insert(0, FULL.name)
    found.questions = found.questions or (QUICK_QUESTIONS if found.quick else QUESTIONS)
    found.seed = found.seed or list(SEEDS[:1] if found.quick else SEEDS)
    found.missing = found.missing or list(MISSING[:1] if found.quick else MISSING)
    return found


def measure(name: str, workload: Path, model: Path, out: Path) -> Answers:
    """A mode, in a process of its own.

    Raises:
        SystemExit: It failed.
    """
    path = answers_path(out, name)
    command = [sys.executable, str(Path(__file__).with_name("engine.py")), "--mode", name]
    command += ["--model", str(model), "--workload", str(workload), "--out", str(path)]
    if name != FULL.name:
        command += ["--reference", str(answers_path(out, FULL.name))]
    environ = dict(os.environ)
    if not MODES[name].blends:
        environ[MODE_VARIABLE] = "off"
    finished = subprocess.run(command, check=False, env=environ)
    if finished.returncode:
        raise SystemExit(
            f"{name}: the engine ended with exit code {finished.returncode}; see above"
        )
    return Answers.read(path)


def answers_path(out: Path, name: str) -> Path:
    return out / f"{name.replace(',', '').replace(' ', '-').replace('%', 'percent')}.json"


def main() -> None:
    arguments = parse_arguments()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    model = arguments.model
    if model == smollm2.DEFAULT_FOLDER:
        smollm2.build(model)
    tokenizer = FolderTokenizer(model)
    workload = Workload.join(
        make_workload(tokenizer, arguments.questions, arguments.missing, seed)
        for seed in arguments.seed
    )
    path = out / "workload.json"
    is_known = path.is_file() and Workload.read(path) == workload
    workload.write(path)
    found = {}
    for name in sorted(arguments.mode, key=list(MODES).index):
        if arguments.resume and is_known and answers_path(out, name).is_file():
            found[name] = Answers.read(answers_path(out, name))
        else:
            found[name] = measure(name, path, model, out)
    rows = list(report.rows(workload, found, tokenizer.decode))
    lines = [report.HEAD, *map(report.line, rows)]
    blending = {MODES[name].has_text_sink: found[name] for name in found if MODES[name].blends}
    lines += [report.storing(workload, answers) for answers in blending.values()]
    lines += report.verdicts(rows)
    print(*lines, sep="\n")
    (out / "table.txt").write_text("\n".join([*lines, ""]))
    (out / "results.json").write_text(json.dumps([row.to_json() for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
