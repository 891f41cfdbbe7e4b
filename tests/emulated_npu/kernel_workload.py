# SPDX-License-Identifier: Apache-2.0
"""Serve prompts whose pages move by the AscendC kernel and by batched DMA.

    python kernel_workload.py REPORT PLANS

Plans are those of ``feature_workload.py``, and besides

- ``libraries`` is the folder of the launcher, if there is to be one;
- ``turns_of`` says which transfers go by what: ``store`` and ``load`` each have a list of
  ``kernel`` and ``dma``, of which one transfer after the other takes the next. Without it the size
  of their runs decides;
- ``without`` names a protection that is taken away (`late_protections.PROTECTIONS`);
- with ``blending`` it is one of ``blended_workload.py``;
- with ``skips_loads`` kernels that load copy nothing.

Seeds of late streams are set by scenarios here: the same engine is on time for the others.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import blending_workload
import connector_workload
from connector_workload import Engine, random_tokens
from feature_workload import BLOCK_TOKENS

SEEDS = range(6)
LATE_LENGTHS = (140, 300, 413, 700)
"""One chunk goes by the kernel where windows are small, several by DMA."""
LATE_REPLY_TOKENS = 6
SKIPPED_TOKENS = 150
"""A prompt with one chunk."""

EVERY_WAY = {"kernel": 1 << 62, "dma": 0}
"""Sizes of runs from which on DMA is chosen, so that one way is taken whatever their size."""


class Ways:
    """Counts by which way transfers went, and turns them there if asked.

    Args:
        turns_of: See above; empty where the size of the runs decides.
    """

    def __init__(self, turns_of: dict[str, list[str]]) -> None:
        from vllm_ascend_kvext.transfer import choice, page_transfer
        from vllm_ascend_kvext.transfer.ascend.dma import AscendDmaBackend
        from vllm_ascend_kvext.transfer.ascend.kernel import AscendKernelBackend

        self.counted: Counter[str] = Counter()
        self.run_bytes: dict[str, list[float]] = {}
        self.launches: Any = None
        self._turns = {name: itertools.cycle(ways) for name, ways in turns_of.items()}
        self._forced = ""
        choose, least_bytes = choice.choose_backend, choice.LEAST_MEAN_RUN_BYTES_FOR_DMA
        self._undo = [(page_transfer, "choose_backend", choose)]
        self._undo += [(each, "run", each.run) for each in (AscendDmaBackend, AscendKernelBackend)]

        def choose_in_turns(transfer: Any, device_types: Any) -> Any:
            way = self._forced or next(self._turns.get(_name(transfer), iter(())), "")
            choice.LEAST_MEAN_RUN_BYTES_FOR_DMA = EVERY_WAY.get(way, least_bytes)
            try:
                return choose(transfer, device_types)
            finally:
                choice.LEAST_MEAN_RUN_BYTES_FOR_DMA = least_bytes

        page_transfer.choose_backend = choose_in_turns
        for backend in (AscendDmaBackend, AscendKernelBackend):
            backend.run = self._counting(backend.run)

    def _counting(self, run: Any) -> Any:
        from vllm_ascend_kvext.transfer.choice import mean_run_bytes

        def run_and_count(backend: Any, transfer: Any) -> None:
            run(backend, transfer)
            label = f"{backend.name.removeprefix('ascend-')} {_name(transfer)}"
            self.counted[label] += 1
            self.run_bytes.setdefault(label, []).append(mean_run_bytes(transfer))
            if self.launches is not None and "kernel" in label:
                counts = self.launches.counts()
                self.counted["kernels that were late"] += counts["ended"] < counts["launches"]

        return run_and_count

    def force(self, way: str) -> None:
        """Let all transfers go one way, or, with an empty name, as before."""
        self._forced = way

    def report(self) -> dict[str, Any]:
        sizes = {name: [min(sizes), max(sizes)] for name, sizes in self.run_bytes.items()}
        return {"counted": dict(self.counted), "mean run bytes": sizes}

    def end(self) -> None:
        for owner, name, value in self._undo:
            setattr(owner, name, value)


def _name(transfer: Any) -> str:
    return "store" if transfer.direction.name == "PAGES_TO_HOST" else "load"


def finish(engine: Engine) -> None:
    """Nothing is under way behind this."""
    while engine.has_connector and engine.scheduler_side.has_transfers:
        engine._llm.llm_engine.step()


def late(engine: Engine) -> None:
    """Prompts that are stored, and then loaded into pages that hold wrong bytes, by seeds."""
    from torch_npu import emulation

    for seed in SEEDS:
        rng = random.Random(f"late {seed}")
        prompts = [random_tokens(rng, length) for length in LATE_LENGTHS]
        emulation.set_seed(seed if engine.has_connector else None)
        for label in ("cold", "warm"):
            if label == "warm":
                engine.spoil_pages()
            engine.ask(f"seed {seed}, {label}", prompts, reply_tokens=LATE_REPLY_TOKENS)
            finish(engine)
        emulation.set_seed(None)
        engine.reset(is_host_too=True)


def skipped(engine: Engine) -> None:
    """A prompt that is loaded by kernels which copy, and then by kernels which copy nothing."""
    prompt = random_tokens(random.Random("skipped"), SKIPPED_TOKENS)
    ways = WAYS
    assert ways is not None
    ways.force("kernel")
    engine.ask("before it is loaded", [prompt], reply_tokens=2)
    finish(engine)
    for label in ("loaded by kernels", "kernels copy nothing"):
        engine.spoil_pages()
        if ways.launches is not None:
            ways.launches.skip_loads(label == "kernels copy nothing")
        engine.ask(label, [prompt], reply_tokens=8)
        finish(engine)
    if ways.launches is not None:
        ways.launches.skip_loads(False)
    ways.force("")
    engine.reset(is_host_too=True)


WAYS: Ways | None = None
"""Of the plan that is being served."""


def serve(plan: dict[str, Any]) -> dict[str, Any]:
    """Serve one plan; the report has what was copied by what."""
    global WAYS
    import late_protections
    from torch_npu.custom_operators import block_copies

    block_copies.counts.clear()
    WAYS = ways = Ways(plan.get("turns_of", {}))
    if plan.get("libraries"):
        from kernel_launcher import KernelLaunches

        ways.launches = KernelLaunches(Path(plan["libraries"]))
        ways.launches.skip_loads(plan.get("skips_loads", False))
    if plan.get("without"):
        late_protections.take_away(plan["without"])
    if "blending" in plan:
        report = blending_workload.serve("kernel", plan)
    else:
        report = connector_workload.serve(plan)
    ways.end()
    report["ways"] = ways.report()
    report["batched copies"] = dict(block_copies.counts)
    if ways.launches is not None:
        report["kernels"] = ways.launches.counts()
    return report


def main() -> None:
    connector_workload.BLOCK_TOKENS = blending_workload.BLOCK_TOKENS = BLOCK_TOKENS
    connector_workload.SCENARIOS |= {"late": late, "skipped": skipped}
    report, plans = map(Path, sys.argv[1:])
    reports = {name: serve(plan) for name, plan in json.loads(plans.read_text()).items()}
    report.write_text(json.dumps(reports, default=bytes.hex))


if __name__ == "__main__":
    main()
