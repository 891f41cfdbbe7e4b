# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""An attention backend that is never called, for layers that only have a shape."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import AttentionBackend


class UnusedImplementation:
    """Takes whatever a layer gives its implementation."""

    def __init__(self, *arguments: object, **named: object) -> None: ...

    def __getattr__(self, name: str) -> bool:
        """No feature of any kernel is there."""
        if name.startswith("__"):
            raise AttributeError(name)
        return False


class UnusedBackend(AttentionBackend):  # type: ignore[misc]  # mypy does not follow vLLM's imports
    """Stands in for a kernel that this platform does not have."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # A layer looks for the name among those that vLLM knows.

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return UnusedImplementation

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return UnusedImplementation

    @staticmethod
    def get_kv_cache_shape(*_arguments: object, **_named: object) -> tuple[int, ...]:
        return ()
