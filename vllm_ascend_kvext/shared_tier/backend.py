# SPDX-License-Identifier: Apache-2.0
"""What backends share: seals, which prove that bytes are those that were put, and warnings."""

from __future__ import annotations

import hashlib
import logging
import math
import struct
import time
from collections.abc import Callable

from blake3 import blake3

from vllm_ascend_kvext.shared_tier.protocol import FORMAT_VERSION, Answer, SharedObject, SharedTier

logger = logging.getLogger("vllm.ascend_kvext.shared_tier")

_HEAD, _MAGIC = struct.Struct("<8sIQ16s"), b"KVEXTOBJ"
SEAL_BYTES = _HEAD.size + 32
_QUIET_S = 10.0  # After an error was logged, others are not for so long.


def head_of(name: str, num_bytes: int) -> bytes:
    """Magic, version, length, and the hash of a name: a seal without its checksum."""
    hashed = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return _HEAD.pack(_MAGIC, FORMAT_VERSION, num_bytes, hashed)


def seal_of(name: str, content: memoryview | bytes) -> bytes:
    """A head, and BLAKE3 of the content and the head."""
    head = head_of(name, len(content))
    return bytes(head + blake3(content).update(head).digest())


def is_sealed(name: str, value: memoryview | bytes) -> bool:
    """Whether bytes end with the seal of those before it."""
    return value[-SEAL_BYTES:] == seal_of(name, value[:-SEAL_BYTES])


class Answers:
    """What calls for one object after the other come to. Of what comes often, not all is logged."""

    def __init__(self, tier: SharedTier, url: str) -> None:
        self._tier, self._url, self._logged_s = tier, url, -math.inf

    def of(self, call: Callable[..., Answer], each: SharedObject, *more: object) -> Answer:
        """That of a call for an object, which may raise OSError; what is broken is removed."""
        try:
            answer = call(each, *more)
        except OSError as error:
            return self.unreachable(error)
        if answer is Answer.BROKEN:
            self._tier.forget([each.name])
            logger.warning("Shared tier %s: %s is broken, and is removed.", self._url, each.name)
        return answer

    def unreachable(self, error: object) -> Answer:
        if time.monotonic() - self._logged_s > _QUIET_S:
            self._logged_s = time.monotonic()
            logger.warning("Shared tier %s: %s. What is lacking is computed.", self._url, error)
        return Answer.UNREACHABLE
