# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A bounded map of keys. It forgets the key that was put in longest ago."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

Value = TypeVar("Value")


class RememberedKeys(OrderedDict[bytes, Value]):
    """Keys and their values, at most ``max_keys``. Every call takes constant time."""

    def __init__(self, max_keys: int) -> None:
        super().__init__()
        self._max_keys = max_keys

    def put(self, key: bytes, value: Value) -> None:
        """Remember a key as the latest one."""
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._max_keys:
            self.popitem(last=False)
