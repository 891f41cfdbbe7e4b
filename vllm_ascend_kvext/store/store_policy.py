# SPDX-License-Identifier: Apache-2.0
"""What is stored at all.

Most prompts are never sent again, and storing them pushes out what is asked for. Seen twice, a
prefix is likely to be seen a third time. Where a turn ends, the next one resumes: that cannot wait
for a second request. Knows keys and request ids; knows nothing of room.
"""

from __future__ import annotations

import enum

from vllm_ascend_kvext.store.remembered_keys import RememberedKeys

_SEVERAL = ""
"""In place of a request id."""


class StorePolicy(enum.Enum):
    """The values of the option ``store_policy``."""

    SECOND_TOUCH = "second_touch"
    """What a second request computes or hits, and ends of turns."""

    ALL = "all"
    """Everything that is computed."""

    NEVER = "never"
    """Nothing: what is in the tier can be loaded, and nothing is added."""


class StoreChooser:
    """Applies a policy. Every call takes constant time."""

    def __init__(
        self, policy: StorePolicy = StorePolicy.SECOND_TOUCH, remembered_keys: int = 1 << 18
    ) -> None:
        self.policy = policy
        self._seen: RememberedKeys[str] = RememberedKeys(remembered_keys)

    def is_wanted(self, key: bytes, request_id: str) -> bool:
        """Whether to store what a prefix ends with, which a request computes.

        A request that comes back after a preemption is the same one, and no second touch.
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
