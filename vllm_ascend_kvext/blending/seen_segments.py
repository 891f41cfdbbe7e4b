# SPDX-License-Identifier: Apache-2.0
"""Which segments requests have had that are not stored: a second request with one makes it popular.

Knows segments by their keys, and no more of them than a given number: those seen last.
"""

from __future__ import annotations

from vllm_ascend_kvext.blending.errors import SegmentError


class SeenSegments:
    """Keys of segments that one request has had.

    Args:
        most_segments: Are remembered; of more, the one that was seen longest ago is forgotten.

    Raises:
        SegmentError: If that is less than one.
    """

    def __init__(self, most_segments: int) -> None:
        if most_segments < 1:
            raise SegmentError(
                f"seen segments: expected room for at least one key, found {most_segments}; make "
                "none where segments are not learned"
            )
        self._most_segments = most_segments
        self._keys: dict[bytes, None] = {}  # in the order in which they were seen

    def __len__(self) -> int:
        return len(self._keys)

    def note(self, key: bytes) -> bool:
        """A request has a segment.

        Returns:
            Whether another request had it before. It then counts as never seen.
        """
        if key in self._keys:
            del self._keys[key]
            return True
        if len(self._keys) == self._most_segments:
            del self._keys[next(iter(self._keys))]
        self._keys[key] = None
        return False

    def forget(self, key: bytes) -> None:
        """A segment is stored: should that end, it counts as never seen."""
        self._keys.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        self._keys.clear()
