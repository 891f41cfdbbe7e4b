# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Finds the attribute that the name of a patch's target stands for.

The module imports the target's module, and changes nothing.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import wrapt

from vllm_ascend_kvext.errors import PatchError

MISSING = object()
"""Stands for an attribute that does not exist."""


class MissingTargetError(PatchError):
    """Upstream has no attribute of this name."""


@dataclass(frozen=True, slots=True)
class Target:
    """An attribute of an upstream module or class, the parent.

    Attributes:
        found: The attribute as it lies in ``vars()`` of the parent, or of the base class that has
            it: for example a classmethod object, and not the method bound to the class.
        was_local: Whether it lies in the parent itself, and not in a base class.
    """

    parent: Any
    attribute: str
    found: Any
    was_local: bool

    @property
    def current(self) -> Any:
        """The attribute in the parent's own ``vars()`` at this moment, or `MISSING`."""
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
    owners = parent.__mro__ if isinstance(parent, type) else (parent,)
    for owner in owners:
        if attribute in vars(owner):
            return vars(owner)[attribute], owner is parent
    raise MissingTargetError(f"{parent.__name__} has no attribute {attribute!r} ({name}).")


def wrapper_chain(found: Any) -> list[Any]:
    """An attribute, and the functions under each wrapt wrapper or cache around it.

    A wrapt wrapper and ``functools.cache`` call the function that they hold. A plain function that
    uses ``functools.wraps`` may do anything, so the chain ends there.
    """
    chain = [found]
    while issubclass(type(chain[-1]), (wrapt.FunctionWrapper, functools._lru_cache_wrapper)):
        chain.append(chain[-1].__wrapped__)
    return chain


def describe(found: Any) -> str:
    """The name of a function and its place in the source, for messages."""
    function = getattr(found, "__func__", found)
    code = getattr(function, "__code__", None)
    if code is None:
        return repr(found)
    return f"{function.__qualname__} at {code.co_filename}:{code.co_firstlineno}"
