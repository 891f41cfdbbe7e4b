# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Check KvextConnector on a GPU, and measure it: bytes, engines, ratios. See README.md.

    python tests/gpu/run.py --device cuda [--quick] [--only NAME] [--out FOLDER]

Sections are in the order of their value, each with a time limit in processes of its own. The report
is written whenever a section ends. Exit code 1 says that something is wrong or was cut off.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

# ``tests`` replaces this folder on the path.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [*(path for path in sys.path if path != str(_HERE)), str(_HERE.parent)]

from gpu.sections import Report, Section, run_all  # noqa: E402

BUDGET_S = 480
ENVIRON = {
    # FlashInfer is not brought along; vLLM's sampler would import it.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Variables of all sections."""
ENGINE_CASES = (
    "full attention, bfloat16",
    "windows, bfloat16",
    "states, bfloat16",
    "latent attention, bfloat16",
    "full attention, float32",
    "windows, float32",
    "blending, float32",
)
"""The cases of `check_engines` in the order of their value."""
WITHOUT_GPU = {
    "cpu": tuple(case for case in ENGINE_CASES if not case.startswith(("states", "latent"))),
    "npu": ENGINE_CASES,
}
"""The cases that run elsewhere. vLLM has no states and no latent attention on a CPU."""
QUICK_CASES = ("full attention, float32",)


def sections(device: str, *, is_quick: bool) -> Iterator[Section]:
    """All sections for a device."""

    def command(script: str, *options: str) -> list[str]:
        quick = ["--quick"] if is_quick else []
        return [sys.executable, str(_HERE / script), "--device", device, *options, *quick]

    # Elsewhere than on a GPU, one thing at a time has the machine, and takes longer.
    is_gpu = device == "cuda"
    factor = 1 if is_gpu else 10

    def section(name: str, run: list[str], max_s: float, stage: int) -> Section:
        return Section(name, run, max_s * factor, stage, ENVIRON)

    yield section("bytes", command("check_bytes.py"), 60, 0)
    cases = ENGINE_CASES if is_gpu else WITHOUT_GPU[device]
    for number, case in enumerate(cases if not is_quick else QUICK_CASES):
        options = ["--case", case]
        # Compiling on a CPU takes minutes.
        options += ["--mode", "eager"] if not is_gpu and is_quick else []
        stage = 1 if is_gpu else 1 + number
        yield section(case, command("check_engines.py", *options), 180, stage)
    yield section("copies", command("measure.py", "--what", "copies"), 40, 20)
    if device != "npu":
        yield section(
            "engines of 1B parameters", command("measure.py", "--what", "engines"), 180, 21
        )


def commit_of(checkout: Path) -> str:
    found = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "npu", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a few small checks of each kind")
    parser.add_argument("--only", action="append", metavar="NAME", help="may be repeated")
    parser.add_argument("--out", type=Path, default=Path("out/gpu/report"))
    parser.add_argument("--budget-s", type=float, help="the longest time of all sections")
    parser.add_argument("--commit", help="of the package, where the checkout has no git")
    options = parser.parse_args()
    began_s = time.monotonic()
    chosen = list(sections(options.device, is_quick=options.quick))
    names = [each.name for each in chosen]
    unknown = set(options.only or ()) - set(names)
    if unknown:
        parser.error(f"--only: expected some of {', '.join(names)}, found {', '.join(unknown)}")
    if options.only:
        chosen = [each for each in chosen if each.name in options.only]
    options.out.mkdir(parents=True, exist_ok=True)
    asked = subprocess.run(
        [sys.executable, str(_HERE / "accelerator.py"), options.device],
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode:
        raise SystemExit(asked.stderr)
    facts = json.loads(asked.stdout.splitlines()[-1])
    facts["vllm-ascend-kvext"] = metadata.version("vllm-ascend-kvext")
    facts["commit"] = options.commit or commit_of(_HERE)
    facts["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    title = "Tested on a GPU" if options.device == "cuda" else f"A dry run on: {options.device}"
    report = Report(options.out, title, facts)
    report.write()
    budget_s = options.budget_s or BUDGET_S * (1 if options.device == "cuda" else 10)
    run_all(chosen, report, options.out, budget_s - (time.monotonic() - began_s))
    facts_of_time = f"{time.monotonic() - began_s:.0f} s"
    report.facts["all sections"] = facts_of_time
    report.write()
    print(*report.markdown(), sep="\n")
    sys.exit(any(not each.is_good for each in report.ended))


if __name__ == "__main__":
    main()
