# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A small upstream that replaces vLLM in tests of the patching machinery alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_ascend_kvext.compat import Upstream
from vllm_ascend_kvext.patching.declaration import Kind, Patch
from vllm_ascend_kvext.patching.plan import FeaturePlan

AddPackage = Callable[..., Path]
PlanPatches = Callable[..., FeaturePlan]

PACKAGE = "fake_upstream"
MODULE = f"{PACKAGE}.pool"
UPSTREAM = Upstream("0.23.0")
FEATURE = "feature"

SOURCE = '''\
import functools
import sys

calls = []

if sys.version_info >= (3, 0):
    def conditional(number):
        return number


class Base:
    def inherited(self, number):
        calls.append("inherited")
        return number


class Pool(Base):
    def free(self, blocks, prepend=False):
        """Free some blocks."""
        calls.append("free")
        return blocks, prepend

    @classmethod
    def find(cls, number):
        return cls.__name__, number

    @staticmethod
    def count(blocks):
        return len(blocks)

    @functools.lru_cache
    def size(self):
        return 3


class SmallPool(Pool):
    pass


def touch(number, step=1):
    calls.append("touch")
    return number + step
'''


def record(calls: list[str], name: str = "ours") -> Callable[..., Any]:
    """A wrapper that records its call, and calls the wrapped function."""

    def wrapper(wrapped: Any, instance: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return wrapped(*args, **kwargs)

    return wrapper


def record_foreign(calls: list[str]) -> Callable[..., Any]:
    """Such a wrapper in wrapt's own form. Other packages put wrappers like it around functions."""

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        calls.append("foreign")
        return wrapped(*args, **kwargs)

    return wrapper


def declare(target: str, **fields: Any) -> Patch:
    """A patch of the small upstream. Fields that a test does not set have defaults."""
    defaults: dict[str, Any] = {
        "id": f"T-{target}",
        "kind": Kind.WRAP,
        "feature": FEATURE,
        "vllm": ("==0.23.0.*",),
        "why": "a test",
        "retire_when": "never",
    }
    name = target if ":" in target else f"{MODULE}:{target}"
    if "install" not in fields:
        defaults["wrapper"] = record([])
    return Patch(**{**defaults, "target": name, **fields})
