# SPDX-License-Identifier: Apache-2.0
"""What backends share: seals, which prove that bytes are those that were put, and warnings."""

from __future__ import annotations

import hashlib
import logging
import math
import struct
import time
from typing import TypeVar

from blake3 import blake3

from vllm_ascend_kvext.shared_tier.protocol import FORMAT_VERSION, Answer

logger = logging.getLogger("vllm.ascend_kvext.shared_tier")

_HEAD, _MAGIC = struct.Struct("<8sIQ16s"), b"KVEXTOBJ"
SEAL_BYTES = _HEAD.size + 32
_Bytes = TypeVar("_Bytes", bytes, memoryview)
_QUIET_S = 10.0  # After an error was logged, others are not for so long.


def head_of(name: str, num_bytes: int) -> bytes:
    """Magic, version, length, and the hash of a name: a seal without its checksum."""
    hashed = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return _HEAD.pack(_MAGIC, FORMAT_VERSION, num_bytes, hashed)


def seal_of(name: str, content: memoryview | bytes) -> bytes:
    """A head, and BLAKE3 of the content and the head."""
    head = head_of(name, len(content))
    return bytes(head + blake3(content).update(head).digest())


def unsealed(name: str, value: _Bytes) -> _Bytes:
    """The content before a seal; nothing if the seal is not right."""
    content = value[:-SEAL_BYTES]
    return content if value[len(content) :] == seal_of(name, content) else value[:0]


class Warnings:
    """What has failed in one tier: of what comes often, not all is logged."""

    def __init__(self, tier: str) -> None:
        self._tier, self._logged_s = tier, -math.inf

    def unreachable(self, error: object) -> Answer:
        if time.monotonic() - self._logged_s > _QUIET_S:
            self._logged_s = time.monotonic()
            logger.warning("Shared tier %s: %s. What is lacking is computed.", self._tier, error)
        return Answer.UNREACHABLE

    def broken(self, name: str) -> Answer:
        logger.warning("Shared tier %s: %s is broken, and is removed.", self._tier, name)
        return Answer.BROKEN
