# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Lists the cells of the benchmark. The module imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

INFINITE = "inf"


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell to run.

    Attributes:
        pool: The size of the pool as a share of the dense footprint, or ``inf``.
        seed: The seed of the trace.
    """

    layout: str
    trace: str
    pool: str
    variant: str
    scale: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """A cell with its result.

    Attributes:
        result: The result of `retention.cells.run_cell`, or ``error`` with a traceback.
    """

    cell: Cell
    result: dict


@dataclass(frozen=True, slots=True)
class Batch:
    """All cells of one trace on one layout. The footprint of dense caching sizes the pools.

    Attributes:
        base: The cell of stock vLLM with dense caching in an infinite pool.
        num_repeats: How often each other cell runs. The least CPU time counts.
    """

    base: Cell
    others: tuple[Cell, ...]
    num_repeats: int = 1

    @property
    def cells(self) -> tuple[Cell, ...]:
        return (self.base, *self.others)


def batches(
    layouts: Sequence[str],
    traces: Sequence[str],
    pools: Sequence[str],
    variants: Sequence[str],
    scale: float = 1.0,
    num_seeds: int = 1,
    num_repeats: int = 1,
) -> list[Batch]:
    """All useful combinations. Each trace occurs once per seed.

    In an infinite pool, only dense caching (the ceiling) and adaptive retention run, unless no
    other pool is asked for.
    """
    result = []
    for layout, trace, seed in product(layouts, traces, range(num_seeds)):
        base = Cell(layout, trace, INFINITE, "dense", scale, seed)
        cells = [
            replace(base, pool=pool, variant=variant)
            for pool in pools
            for variant in variants
            if pool != INFINITE or variant.startswith("adaptive") or list(pools) == [INFINITE]
        ]
        others = tuple(cell for cell in cells if cell != base)
        result.append(Batch(base, others, num_repeats))
    return result
