# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Makes ``support`` importable in every test, and leaves out tests that run only elsewhere.

If vLLM-Ascend's managers are tested, it activates vLLM-Ascend before a test module imports vLLM.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import settings
from support import family
from support.sample import IS_SAMPLE
from support.upstream_version import VLLM

from vllm_ascend_kvext.compat import version_in

# A busy machine must not make a test fail: no test asserts a time.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "main_version: says little about other versions of vLLM")
    config.addinivalue_line(
        "markers",
        "own_managers: about what vLLM-Ascend's managers do not have, or have elsewhere",
    )
    config.addinivalue_line(
        "markers", "vllm(versions): a claim about these versions of vLLM, which others refute"
    )
    if family.IS_ASCEND:
        try:
            family.activate()
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error


@pytest.fixture(autouse=family.IS_ASCEND)
def no_free_list_diagnostics() -> Iterator[None]:
    with family.no_free_list_diagnostics():
        yield


def pytest_collection_finish() -> None:
    """Imported modules are no garbage. Engines and machines collect garbage often."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leaving_out = ["main_version"] * IS_SAMPLE + ["own_managers"] * family.IS_ASCEND
    chosen: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        is_left_out = any(item.get_closest_marker(name) for name in leaving_out) or not all(
            version_in(VLLM, *mark.args) for mark in item.iter_markers("vllm")
        )
        (left_out if is_left_out else chosen).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen
