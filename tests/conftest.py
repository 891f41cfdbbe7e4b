# SPDX-License-Identifier: Apache-2.0
"""Makes ``support`` importable in every test, by being here; leaves out what runs only once."""

from __future__ import annotations

import pytest
from support.sample import IS_SAMPLE


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "main_version: says nothing about other versions of Python or vLLM"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not IS_SAMPLE:
        return
    chosen: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        (left_out if item.get_closest_marker("main_version") else chosen).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen
