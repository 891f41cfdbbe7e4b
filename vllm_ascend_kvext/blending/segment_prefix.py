# SPDX-License-Identifier: Apache-2.0
"""By which keys the host tier knows a segment.

A key is a hash of everything that the stored rows depend on: the tokens up to a boundary, what they
were computed behind, the model and its layout, the adapter and the salt. So segments and prompts
share a tier without meeting: keys of prompts are vLLM's own, chained from block to block.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from functools import cached_property

from vllm_ascend_kvext.store.errors import TierError


class SegmentPrefix:
    """The tokens of a segment; a ``store.prefix.Prefix``, whose length is rounded up to a unit.

    Args:
        space: Of `key_space`.
        token_ids: Of the segment.
        unit_tokens: Of the tier.
    """

    def __init__(self, space: bytes, token_ids: Sequence[int], unit_tokens: int) -> None:
        self._space = space
        self._unit_tokens = unit_tokens
        self._keys: dict[int, bytes] = {}
        self._digest = hashlib.sha256(space)
        self._digested_tokens = 0
        self.packed_ids = pack_ids(token_ids)
        self.num_segment_tokens = len(token_ids)

    @property
    def token_ids(self) -> list[int]:
        """Of the segment: a copy."""
        return array(_ID_TYPE, self.packed_ids).tolist()

    @cached_property
    def num_tokens(self) -> int:
        return -(-self.num_segment_tokens // self._unit_tokens) * self._unit_tokens

    def key_at(self, boundary_tokens: int) -> bytes:
        key = self._keys.get(boundary_tokens)
        if key is None:
            if boundary_tokens % self._unit_tokens or not 0 < boundary_tokens <= self.num_tokens:
                raise TierError(
                    f"segment: expected a multiple of {self._unit_tokens} from {self._unit_tokens} "
                    f"to {self.num_tokens} tokens, found {boundary_tokens}; ask at boundaries"
                )
            digest = self._digest_up_to(boundary_tokens).copy()
            digest.update(boundary_tokens.to_bytes(8, "little"))
            key = self._keys[boundary_tokens] = digest.digest()
        return key

    def _digest_up_to(self, boundary_tokens: int) -> hashlib._Hash:
        """Of the tokens before a boundary. Boundaries that ascend read each token once."""
        if boundary_tokens < self._digested_tokens:
            self._digest, self._digested_tokens = hashlib.sha256(self._space), 0
        self._digest.update(self.ids_of(self._digested_tokens, boundary_tokens))
        self._digested_tokens = boundary_tokens
        return self._digest

    def keys_at(self, boundaries: range) -> Sequence[bytes]:
        return [self.key_at(boundary) for boundary in boundaries]

    def ids_of(self, first_tokens: int, end_tokens: int) -> bytes:
        """Token ids of a range, packed, as far as the segment has them."""
        width = array(_ID_TYPE).itemsize
        return self.packed_ids[first_tokens * width : end_tokens * width]


def key_space(fingerprint: str, sink_ids: Sequence[int], cache_salt: str | None) -> bytes:
    """What all segments have in common whose rows may stand for each other.

    Args:
        fingerprint: Of the workers' segment layouts.
        sink_ids: What segments are computed behind.
        cache_salt: Of the request; None and empty are the same, as to vLLM.
    """
    facts = ["segment", fingerprint, list(sink_ids), cache_salt or ""]
    return hashlib.sha256(json.dumps(facts).encode()).digest()


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids in the form in which they are compared."""
    return array(_ID_TYPE, token_ids).tobytes()


_ID_TYPE = "q"
