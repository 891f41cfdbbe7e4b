# SPDX-License-Identifier: Apache-2.0
"""Every layout fixture through the Ascend backends: stored, loaded elsewhere, compared."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from support.layout.round_trip import Mover, round_trip
from support.transfer.ascend_backends import simulated_backends
from test_layout_round_trip import FIXTURES, RANGES

from vllm_ascend_kvext.transfer.page_transfer import page_transfer


@pytest.fixture(scope="module")
def movers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Mover]]:
    with simulated_backends(tmp_path_factory.mktemp("shim")) as backends:
        yield {
            f"{name}, {'bundled' if is_bundled else 'exploded'}": partial(
                page_transfer, backend=backend, is_bundled=is_bundled
            )
            for name, backend in backends.items()
            for is_bundled in (True, False)
        }


@pytest.mark.parametrize("name", FIXTURES)
def test_round_trip(name: str, movers: dict[str, Mover]) -> None:
    # There is no state within a page.
    tokens = RANGES["whole pages" if "Mamba" in name else "cut pages"]
    assert round_trip(FIXTURES[name], tokens, movers, seed=len(name)) > 0
