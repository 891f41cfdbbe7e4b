# SPDX-License-Identifier: Apache-2.0
"""A bounded memory: the key that was put in longest ago is forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

Value = TypeVar("Value")


class RememberedKeys(Generic[Value]):
    """Keys and what is known of them, so many at most. Every call takes constant time."""

    __slots__ = ("_max_keys", "_values")

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._values: OrderedDict[bytes, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: bytes) -> Value | None:
        return self._values.get(key)

    def put(self, key: bytes, value: Value) -> None:
        """Remember a key, as the latest."""
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._max_keys:
            self._values.popitem(last=False)

    def clear(self) -> None:
        self._values.clear()
