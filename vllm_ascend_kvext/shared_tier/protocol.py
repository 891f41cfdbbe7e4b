# SPDX-License-Identifier: Apache-2.0
"""What a shared tier is asked, and what it answers.

An object is the bytes of one entry of host memory. Nobody changes one: who puts a name that is
there has nothing to do. *Notes* are further names that lead to an object: one for each boundary
within its rows, so that a prompt which parts from another in the middle of a chunk finds it::

    object   R0-1024-<key at 1024>     put by an engine
    notes    N<key at 16> ... N<key at 1024>     each leads to it

Every call is one batch, takes as long as it takes, and raises nothing: threads that nobody waits
for make them. Threads may share a tier.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from vllm_ascend_kvext.errors import SettingsError

FORMAT_VERSION = 1
"""Of objects and their names: those of another version are not looked at."""


class Answer(enum.Enum):
    """What has become of one object."""

    WHOLE = "whole"
    """Every byte is where it belongs: got and verified, or put."""

    ABSENT = "absent"
    """There is no such object, or it has just gone."""

    BROKEN = "broken"
    """It is not what was put: bytes, length or name differ. It is forgotten."""

    UNREACHABLE = "unreachable"
    """The tier does not work, or has no room."""


class SharedObject(NamedTuple):
    """One object, and where in the registered memory its bytes are, or are to be.

    Attributes:
        name: As `object_name` makes it.
        notes: Other names that lead to it; for puts only.
    """

    name: str
    offset_bytes: int
    num_bytes: int
    notes: tuple[str, ...] = ()


OnBytes = Callable[[int], None]
"""Told of bytes as they come."""


class SharedTier(Protocol):
    """The objects of one engine's name space, as one of its ranks has them."""

    def register(self, memory: memoryview) -> None:
        """Objects are read from, and written to, this memory; dtype: uint8. Called once."""

    def exist(self, names: Sequence[str]) -> list[str]:
        """For each name, or note, the name of the object that it leads to; empty if it is absent.

        No proof: the object may be gone, or broken, when it is wanted.
        """

    def put(self, objects: Sequence[SharedObject]) -> list[Answer]:
        """Store objects. After anything but WHOLE, none of their bytes can be got by others."""

    def get_into(self, objects: Sequence[SharedObject], on_bytes: OnBytes) -> list[Answer]:
        """Bring objects. After anything but WHOLE, their places hold anything."""

    def forget(self, names: Sequence[str]) -> None:
        """Remove objects, as far as they are there."""

    def close(self) -> None:
        """Nothing is called any more."""


def tier_of(url: str, capacity_bytes: int | None, namespace: str, rank: int) -> SharedTier:
    """The tier of one rank of an engine; see ``shared_tier`` in `ConnectorOptions`.

    Args:
        capacity_bytes: What it may hold; None leaves it to the backend.
        namespace: See ``names``.

    Raises:
        SettingsError: If it cannot be used as it is.
    """
    from vllm_ascend_kvext.shared_tier.files import FilesTier

    return FilesTier(folder_of(url), capacity_bytes, namespace, rank)


def folder_of(url: str) -> str:
    """The folder of a tier of files.

    Raises:
        SettingsError: If the URL is none of a folder.
    """
    scheme, _, path = url.partition("://")
    if scheme != "file" or not path.startswith("/"):
        raise SettingsError(
            f"shared_tier: expected file:///path of a folder, found {url!r}. Give the whole path."
        )
    return path
