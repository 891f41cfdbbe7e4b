# SPDX-License-Identifier: Apache-2.0
"""Where a patch goes: a target's name resolved to the attribute it stands for.

Imports the target's module, changes nothing.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import wrapt

from vllm_ascend_kvext.errors import PatchError

MISSING = object()
"""Stands for an attribute that is not there."""


class MissingTargetError(PatchError):
    """Upstream has no attribute of this name."""


@dataclass(frozen=True, slots=True)
class Target:
    """An attribute of an upstream module or class, the parent.

    `found` is the attribute as it lies in ``vars()`` of the parent (`was_local`) or of the base
    class that has it: a classmethod object, not the method bound to the class.
    """

    parent: Any
    attribute: str
    found: Any
    was_local: bool

    @property
    def current(self) -> Any:
        """What the parent's own ``vars()`` hold at this moment, or `MISSING`."""
        return vars(self.parent).get(self.attribute, MISSING)


def resolve(name: str) -> Target:
    """Find ``module:qualname``, importing the module.

    Raises:
        MissingTargetError: If the module or a part of the qualified name does not exist.
    """
    module_name, _, qualname = name.partition(":")
    try:
        parent = importlib.import_module(module_name)
    except ImportError as error:
        raise MissingTargetError(f"{module_name} cannot be imported: {error}.") from error
    *path, attribute = qualname.split(".")
    for part in path:
        parent, _ = _look_up(parent, part, name)
    found, was_local = _look_up(parent, attribute, name)
    return Target(parent, attribute, found, was_local)


def _look_up(parent: Any, attribute: str, name: str) -> tuple[Any, bool]:
    for owner in parent.__mro__ if isinstance(parent, type) else (parent,):
        if attribute in vars(owner):
            return vars(owner)[attribute], owner is parent
    raise MissingTargetError(f"{parent.__name__} has no attribute {attribute!r} ({name}).")


def wrapper_chain(found: Any) -> list[Any]:
    """An attribute, and what lies under each wrapt wrapper or cache around it.

    A wrapt wrapper or ``functools.cache`` leaves the function it holds what it is. Under
    ``functools.wraps`` anything may happen, so the chain ends at a plain function.
    """
    chain = [found]
    while issubclass(type(chain[-1]), (wrapt.FunctionWrapper, functools._lru_cache_wrapper)):
        chain.append(chain[-1].__wrapped__)
    return chain


def describe(found: Any) -> str:
    """A function's place in the source, for a person who asks whose it is."""
    function = getattr(found, "__func__", found)
    code = getattr(function, "__code__", None)
    if code is None:
        return repr(found)
    return f"{function.__qualname__} at {code.co_filename}:{code.co_firstlineno}"
