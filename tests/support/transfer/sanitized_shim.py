# SPDX-License-Identifier: Apache-2.0
"""Random transfers through a shim that was compiled with sanitizers: a process of its own.

``python -m support.transfer.sanitized_shim <library>``, with the sanitizer's runtime preloaded.
Prints how many transfers went through; a finding ends the process.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from support.transfer.ascend_shim import Shim
from support.transfer.cases import (
    TransferCase,
    TransferMemory,
    assert_same,
    cases,
    uniform_case,
)

NUM_TRANSFERS = 150
# So many runs that units take as many as they can.
FULL_UNITS = uniform_case(row_bytes=2, rows_per_page=1, pages=range(1, 200))


def main(library: Path) -> None:
    shim = Shim.load(library)
    num_moved = 0

    @given(case=cases(row_bytes=(1, 31, 32, 33, 512, 40_000)), num_cores=st.integers(1, 48))
    @example(case=FULL_UNITS, num_cores=1)
    @settings(
        deadline=None,
        max_examples=NUM_TRANSFERS,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def move(case: TransferCase, num_cores: int) -> None:
        nonlocal num_moved
        memory = TransferMemory.random(case)
        expected = memory.after(case)
        transfer = memory.transfer(case, (), None)
        shim.num_cores = num_cores
        shim.prepare(transfer, is_mapped=False)
        shim.move(transfer)
        assert_same(memory.snapshot(), expected)
        num_moved += 1

    move()
    print(num_moved)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
