# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Prompts on the emulated NPU. The AscendC kernel or batched DMA moves their pages.

Options of a plan:

- ``libraries`` is the folder of the launcher, if the engine is to have one.
- ``turns_of`` decides how transfers move: ``store`` and ``load`` each have a list of ``kernel`` and
  ``dma``. The transfers take its items in turns. Without it, the size of the runs decides.
- ``without`` names a protection that is taken away (`late_protections.PROTECTIONS`).
- With ``skips_loads``, kernels that load copy nothing.

Here, scenarios set the seeds of late streams, because the same engine must be on time in others.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from support.scenarios import connector, scenario
from support.scenarios.engine import random_tokens

turns = connector.turns

SEEDS = range(6)
LATE_LENGTHS = (140, 300, 413, 700)
"""Lengths of prompts. With small windows, the kernel moves one chunk, and DMA moves several."""
LATE_REPLY_TOKENS = 6
SKIPPED_TOKENS = 150
"""A prompt with one chunk."""

EVERY_WAY = {"kernel": 1 << 62, "dma": 0}
"""Runs from these sizes on go by DMA. These two values force one way for all sizes."""


class Ways:
    """Counts the ways of transfers, and chooses a way if asked.

    Args:
        turns_of: See above. Empty if the size of the runs decides.
    """

    def __init__(self, turns_of: dict[str, list[str]]) -> None:
        from vllm_ascend_kvext.transfer import page_transfer
        from vllm_ascend_kvext.transfer.ascend import npu_transfers
        from vllm_ascend_kvext.transfer.ascend.dma import AscendDmaBackend
        from vllm_ascend_kvext.transfer.ascend.kernel import AscendKernelBackend

        self.counted: Counter[str] = Counter()
        self.run_bytes: dict[str, list[float]] = {}
        self.launches: Any = None  # See `kernel_launcher.KernelLaunches`.
        self._turns = {name: itertools.cycle(ways) for name, ways in turns_of.items()}
        self._forced = ""
        choose = page_transfer.choose_backend
        min_bytes = npu_transfers.MIN_MEAN_RUN_BYTES_FOR_DMA

        def choose_in_turns(transfer: Any, device_types: Any, **how: Any) -> Any:
            way = self._forced or next(self._turns.get(_name(transfer), iter(())), "")
            npu_transfers.MIN_MEAN_RUN_BYTES_FOR_DMA = EVERY_WAY.get(way, min_bytes)
            try:
                return choose(transfer, device_types, **how)
            finally:
                npu_transfers.MIN_MEAN_RUN_BYTES_FOR_DMA = min_bytes

        page_transfer.choose_backend = choose_in_turns
        for backend in (AscendDmaBackend, AscendKernelBackend):
            backend.run = self._counting(backend.run)

    def _counting(self, run: Any) -> Any:
        from vllm_ascend_kvext.transfer.ascend.npu_transfers import mean_run_bytes

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
        """Let all transfers go one way. With an empty name, the way is not forced any more."""
        self._forced = way

    def report(self) -> dict[str, Any]:
        sizes = {name: [min(sizes), max(sizes)] for name, sizes in self.run_bytes.items()}
        return {"counted": dict(self.counted), "mean run bytes": sizes}


def _name(transfer: Any) -> str:
    return "store" if transfer.direction.name == "PAGES_TO_HOST" else "load"


class Moving:
    """A mixin for engines. Kernels and DMA move pages as the plan says."""

    def __init__(self, plan: dict[str, Any]) -> None:
        import torch_npu  # noqa: F401 (kernels are linked with it)

        sys.path.append(str(Path(__file__).parents[2] / "emulated_npu"))
        self.ways = Ways(plan.get("turns_of", {}))
        if "libraries" in plan:
            from kernel_launcher import KernelLaunches

            self.ways.launches = KernelLaunches(Path(plan["libraries"]))
            self.ways.launches.skip_loads(plan.get("skips_loads", False))
        if "without" in plan:
            import late_protections

            late_protections.take_away(plan["without"])
        super().__init__(plan)  # type: ignore[call-arg]

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = super().report()  # type: ignore[misc]
        self.shutdown()  # type: ignore[attr-defined]
        launches = self.ways.launches
        kernels = {} if launches is None else {"kernels": launches.counts()}
        return report | {"ways": self.ways.report(), **kernels}


class Engine(Moving, connector.Engine):
    """An engine with plain requests."""


@scenario
def late(engine: Engine) -> None:
    """Prompts that are stored, and then loaded over wrong bytes, once for each seed."""
    from torch_npu import emulation

    for seed in SEEDS:
        rng = random.Random(f"late {seed}")
        prompts = [random_tokens(rng, length) for length in LATE_LENGTHS]
        emulation.set_seed(seed if engine.has_connector else None)
        for label in ("cold", "warm"):
            if label == "warm":
                engine.spoil_pages()
            engine.ask(f"seed {seed}, {label}", prompts, reply_tokens=LATE_REPLY_TOKENS)
            engine.finish()
        emulation.set_seed(None)
        engine.reset(is_host_too=True)


@scenario
def skipped(engine: Engine) -> None:
    """A prompt that kernels load with copies, and then without any copy."""
    prompt = random_tokens(random.Random("skipped"), SKIPPED_TOKENS)
    ways = engine.ways
    ways.force("kernel")
    engine.ask("before it is loaded", [prompt], reply_tokens=2)
    engine.finish()
    for label in ("loaded by kernels", "kernels copy nothing"):
        engine.spoil_pages()
        if ways.launches is not None:
            ways.launches.skip_loads(label == "kernels copy nothing")
        engine.ask(label, [prompt], reply_tokens=8)
        engine.finish()
    if ways.launches is not None:
        ways.launches.skip_loads(False)
    ways.force("")
    engine.reset(is_host_too=True)
