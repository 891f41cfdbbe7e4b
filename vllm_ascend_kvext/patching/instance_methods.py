# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Replaces methods of single objects of upstream, and gives them back in any order.

A patch for one scheduler or block manager, and not for all, puts its own function into the
``__dict__`` of that object. Several patches may replace the same method, and each can be reverted
while others stay::

    scheduler.schedule()  ->  replaced last  ->  replaced first  ->  the object's own method

Only the objects themselves keep the replacements of their methods alive.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

_MISSING = object()
"""Stands for an attribute that the object itself does not have."""


class InstanceMethods:
    """The methods that one patch has replaced, on any number of objects."""

    def __init__(self) -> None:
        self._layers: WeakSet[_Layer] = WeakSet()

    def replace(self, owner: Any, replacement: Callable[..., Any]) -> Callable[[], None]:
        """Replace one method of an object by a function of the same name.

        A call of the method calls the function. The function gets the bound method that it replaces
        as its first argument, followed by the arguments of the call.

        Returns:
            A function that gives the object this one method back.
        """
        layer = _Layer(owner, replacement)
        self._layers.add(layer)
        return partial(self._take_back, layer)

    def has_any_of(self, owner: object) -> bool:
        """Whether a method of this object is replaced."""
        return any(layer.owner is owner for layer in self._layers)

    def take_back(self) -> None:
        """Give all objects their methods back. Replacements of other patches stay in effect."""
        for layer in list(self._layers):
            self._take_back(layer)

    def _take_back(self, layer: _Layer) -> None:
        layer.take_back()
        self._layers.discard(layer)


class _Layer:
    """One replacement, and the method below it.

    The replacement is a `functools.partial`, whose call costs about as much as a bound method's.
    """

    def __init__(self, owner: Any, replacement: Callable[..., Any]) -> None:
        self.owner = owner
        self._name = replacement.__name__
        self._below = getattr(owner, self._name)
        self._found = _MISSING
        if not _is_of_class(owner, self._name):
            self._found = vars(owner).get(self._name, _MISSING)
        self._replacement = replacement  # Otherwise only a call in progress might keep it alive.
        self._call: Any = partial(replacement, self._below)
        vars(self._call)["kvext_layer"] = self
        self._is_on = True
        setattr(owner, self._name, self._call)

    def take_back(self) -> None:
        """Restore the object's attribute, or switch the layer off if another layer lies over it.

        If a function over this layer still calls the layer, the call goes to the method below.
        """
        self._is_on = False
        self._call.__setstate__((self._below, (), {}, vars(self._call)))
        while (top := _top_layer(self.owner, self._name)) is not None and not top._is_on:
            if top._found is _MISSING:
                delattr(self.owner, self._name)
            else:
                setattr(self.owner, self._name, top._found)


def _is_of_class(owner: Any, name: str) -> bool:
    """Whether an object has a method from its class. False if that cannot be told.

    ``vars(owner)`` would tell it. But from then on CPython keeps the attributes of the object in a
    dict, and every access to one of them takes longer.
    """
    found, of_class = getattr(owner, name), getattr(type(owner), name, None)
    function = getattr(found, "__func__", _MISSING)
    is_owners = getattr(found, "__self__", None) is owner
    # A method that wrapt wraps in the class has the wrapped function.
    return is_owners and function in (of_class, getattr(of_class, "__wrapped__", None))


def _top_layer(owner: Any, name: str) -> _Layer | None:
    """The layer that a call reaches first; None if it reaches a function of other code first."""
    found = vars(owner).get(name)
    layer = getattr(found, "kvext_layer", None)
    return layer if isinstance(layer, _Layer) and layer._call is found else None
