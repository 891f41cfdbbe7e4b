# SPDX-License-Identifier: Apache-2.0
"""A bounded memory: the key that was put in longest ago is forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from vllm_ascend_kvext.store.errors import TierError

Value = TypeVar("Value")


class RememberedKeys(Generic[Value]):
    """Keys and what is known of them. Every call takes constant time.

    Args:
        most: How many keys are remembered.

    Raises:
        TierError: If it is negative.
    """

    __slots__ = ("_most", "_values")

    def __init__(self, most: int) -> None:
        if most < 0:
            raise TierError(f"remembered keys: expected 0 or more, found {most}; 0 remembers none")
        self._most = most
        self._values: OrderedDict[bytes, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: bytes) -> Value | None:
        return self._values.get(key)

    def put(self, key: bytes, value: Value) -> None:
        """Remember a key, as the latest."""
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            self._values.popitem(last=False)

    def clear(self) -> None:
        self._values.clear()
