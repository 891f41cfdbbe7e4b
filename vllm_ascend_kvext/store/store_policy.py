# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Decides which prefixes are stored at all.

Most prompts are never sent again, and storing them evicts prefixes that are asked for. A prefix
that was seen twice is likely to be seen a third time. The end of a turn is stored at once, because
the next turn resumes there. The module knows keys and request ids, but nothing of room.
"""

from __future__ import annotations

import enum

from vllm_ascend_kvext.store.remembered_keys import RememberedKeys

_SEVERAL = ""
"""Stands for several requests in place of a request id."""


class StorePolicy(enum.Enum):
    """The values of the option ``store_policy``."""

    SECOND_TOUCH = "second_touch"
    """Prefixes that a second request computes or hits, and ends of turns, are stored."""

    ALL = "all"
    """Everything that is computed is stored."""

    NEVER = "never"
    """Nothing is stored. Entries that are in the tier can be loaded."""


class StoreChooser:
    """Applies a policy. Every call takes constant time."""

    def __init__(
        self, policy: StorePolicy = StorePolicy.SECOND_TOUCH, remembered_keys: int = 1 << 18
    ) -> None:
        self.policy = policy
        self._seen: RememberedKeys[str] = RememberedKeys(remembered_keys)

    def is_wanted(self, key: bytes, request_id: str) -> bool:
        """Whether to store the piece that ends at this key, which the request has just computed.

        A request that comes back after a preemption counts as the same request, so it is no second
        touch.
        """
        if self.policy is not StorePolicy.SECOND_TOUCH:
            return self.policy is StorePolicy.ALL
        seen_by = self._seen.get(key)
        is_second = seen_by is not None and seen_by != request_id
        self._seen.put(key, _SEVERAL if is_second else request_id)
        return is_second

    def clear(self) -> None:
        """Forget what was seen."""
        self._seen.clear()
