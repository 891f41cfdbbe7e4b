# SPDX-License-Identifier: Apache-2.0
"""Methods of single objects of upstream that are replaced, and given back in any order.

A patch that is for one scheduler, and not for all, puts a function of its own into the ``__dict__``
of the object. Several patches do that to one method, and each can be reverted while others stay::

    scheduler.schedule()  ->  replaced last  ->  replaced first  ->  what the object had

Nothing but the objects themselves holds what replaces their methods.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

from vllm_ascend_kvext.patching.target import MISSING


class InstanceMethods:
    """The methods that one patch has replaced, of whatever objects."""

    def __init__(self) -> None:
        self._layers: WeakSet[_Layer] = WeakSet()

    def replace(self, owner: Any, replacement: Callable[..., Any]) -> Callable[[], None]:
        """Have calls of one method of an object go to a function of the same name.

        It is called with what lay there before, bound, in front of the arguments of the call.

        Returns:
            Gives the object this one method back.
        """
        layer = _Layer(owner, replacement)
        self._layers.add(layer)
        return partial(self._take_back, layer)

    def has_any_of(self, owner: object) -> bool:
        """Whether a method of this object is replaced."""
        return any(layer.owner is owner for layer in self._layers)

    def take_back(self) -> None:
        """Give all objects their methods back, below and above what others have replaced."""
        for layer in list(self._layers):
            self._take_back(layer)

    def _take_back(self, layer: _Layer) -> None:
        layer.take_back()
        self._layers.discard(layer)


class _Layer:
    """A replacement, and what lies under it.

    It takes effect as a `functools.partial`, which costs a call about as much as a bound method.
    """

    def __init__(self, owner: Any, replacement: Callable[..., Any]) -> None:
        self.owner = owner
        self._name = replacement.__name__
        self._found = vars(owner).get(self._name, MISSING)
        self._below = getattr(owner, self._name)
        self._replacement = replacement  # A call that is under way may be all else that has it.
        self._call: Any = partial(replacement, self._below)
        vars(self._call)["kvext_layer"] = self
        self._is_on = True
        setattr(owner, self._name, self._call)

    def take_back(self) -> None:
        """Leave the object's attribute as it was; only have no effect if it is not ours.

        What lies over it, of us or of somebody else, goes on calling it, and gets straight through.
        """
        self._is_on = False
        self._call.__setstate__((self._below, (), {}, vars(self._call)))
        while (top := _top_layer(self.owner, self._name)) is not None and not top._is_on:
            if top._found is MISSING:
                delattr(self.owner, self._name)
            else:
                setattr(self.owner, self._name, top._found)


def _top_layer(owner: Any, name: str) -> _Layer | None:
    """What is called first, if it is a layer of ours, and not somebody else's around one."""
    found = vars(owner).get(name)
    layer = getattr(found, "kvext_layer", None)
    return layer if isinstance(layer, _Layer) and layer._call is found else None
