# SPDX-License-Identifier: Apache-2.0
"""What a shared tier is asked, and what it answers.

An object is the bytes of one entry of host memory. Nobody changes one: who puts a name that is
there has nothing to do. *Notes* are further names that lead to it, one for each boundary within its
rows: by them a prompt that parts from another in the middle of a chunk finds what they share.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

FORMAT_VERSION = 1
"""Of objects and names: those of another version are not looked at."""


class Answer(enum.Enum):
    """What has become of one object."""

    WHOLE = "whole"
    """Got and verified; or it is there."""

    ABSENT = "absent"
    BROKEN = "broken"
    """Bytes, length or name are not those that were put. It is forgotten."""

    UNREACHABLE = "unreachable"
    """The tier does not work, or has no room."""


class SharedObject(NamedTuple):
    """One object, and where in the registered memory its bytes are, or are to be.

    Attributes:
        number: Of the job, unique in the engine.
        name: That of the name space, a slash, and that of the piece: see ``names``.
        num_bytes: Behind them the backend's ``spare_bytes_of`` are its own, see ``open``.
        notes: Names without that of the name space; for puts.
    """

    number: int
    name: str
    offset_bytes: int
    num_bytes: int
    notes: tuple[str, ...] = ()


class SharedTier(Protocol):
    """A tier, as one rank of an engine uses it. Threads may share it.

    Every call is one batch, takes as long as it takes, and raises nothing: threads make them for
    which nobody waits.

    Attributes:
        num_get_threads: How many calls of ``get_into`` at once are faster than one.
    """

    num_get_threads: int

    def register(self, memory: memoryview) -> None:
        """Objects are read from, and written to, this memory; dtype: uint8. Called once."""

    def exist(self, names: Sequence[str]) -> list[str]:
        """For each object or note, the name of the object without that of the name space.

        Empty if there is none. No proof: it may be gone, or broken, when it is wanted.
        """

    def put(self, objects: Sequence[SharedObject]) -> list[Answer]:
        """Store objects. After anything but WHOLE, nobody can get any of their bytes."""

    def get_into(
        self, objects: Sequence[SharedObject], on_bytes: Callable[[int], None]
    ) -> list[Answer]:
        """Bring objects; ``on_bytes`` is told of bytes as they come.

        After anything but WHOLE, their places hold anything.
        """

    def forget(self, names: Sequence[str]) -> None:
        """Remove objects, as far as they are there."""

    def engines(self) -> dict[str, Mapping[str, Any]]:
        """The identities of engines that were introduced, as far as they are known; by name space.

        This one and the next may be called while an engine starts.
        """

    def introduce(self, namespace: str, identity: Mapping[str, Any]) -> None:
        """Say to others what a name space stands for: for people, nothing depends on it."""

    def describe(self) -> tuple[str, Mapping[str, str]]:
        """How full it is, and what is held of each name space, the largest first; for people."""

    def close(self) -> None:
        """Nothing is called any more."""
