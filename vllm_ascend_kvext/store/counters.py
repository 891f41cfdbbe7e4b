# SPDX-License-Identifier: Apache-2.0
"""What the host tier counts."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from vllm_ascend_kvext.store.entries import Kind
from vllm_ascend_kvext.store.lookup import Shortfall

Key = TypeVar("Key", bound=enum.Enum)


class Refusal(enum.Enum):
    """Why a store is not made."""

    ALREADY_STORED = "already_stored"
    """The tier has it."""

    BEING_STORED = "being_stored"
    """Another store of it is under way."""

    WORTH_LESS = "worth_less"
    """Room could be made only by evicting what is worth more."""

    NO_ROOM = "no_room"
    """Everything that is worth less is in use, or the tier is too small."""

    BUSY = "busy"
    """Stores that have not ended hold so many pages that others lack them."""

    PAGES_GONE = "pages_gone"
    """Some of its pages were not kept on the device up to now."""


class Removal(enum.Enum):
    """Why something that was stored is not there any more."""

    EVICTED = "evicted"
    """It gave way to something else."""

    REPLACED = "replaced"
    """A longer piece has all its rows."""

    LOAD_FAILED = "load_failed"
    """What fails once is not trusted again."""

    CLEARED = "cleared"
    """The prefix cache was reset."""


def _zeros(keys: Iterable[Key]) -> dict[Key, int]:
    return dict.fromkeys(keys, 0)


@dataclass(slots=True)
class TierCounters:
    """Counts of one tier.

    Attributes:
        entries_held: Places taken at this moment, those included whose transfers have not ended.
            Goes down, too.
        bytes_held: What these places take.
        stored_entries: By kind: stores that ended well.
        stored_bytes: By kind.
        removed_entries: By reason.
        removed_bytes: By reason.
        refused_stores: By reason.
        failed_stores: Stores that ended badly.
        failed_loads: Loads that ended badly.
        hit_entries: By kind: loads of an entry that ended well.
        hit_bytes: By kind.
        shortfalls: By reason: requests that found less than they might have.
    """

    entries_held: int = 0
    bytes_held: int = 0
    stored_entries: dict[Kind, int] = field(default_factory=lambda: _zeros(Kind))
    stored_bytes: dict[Kind, int] = field(default_factory=lambda: _zeros(Kind))
    removed_entries: dict[Removal, int] = field(default_factory=lambda: _zeros(Removal))
    removed_bytes: dict[Removal, int] = field(default_factory=lambda: _zeros(Removal))
    refused_stores: dict[Refusal, int] = field(default_factory=lambda: _zeros(Refusal))
    failed_stores: int = 0
    failed_loads: int = 0
    hit_entries: dict[Kind, int] = field(default_factory=lambda: _zeros(Kind))
    hit_bytes: dict[Kind, int] = field(default_factory=lambda: _zeros(Kind))
    shortfalls: dict[Shortfall, int] = field(default_factory=lambda: _zeros(Shortfall))
