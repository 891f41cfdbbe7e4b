# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What the host tier counts."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from vllm_ascend_kvext.counted import Counted, zeros
from vllm_ascend_kvext.store.entries import Kind
from vllm_ascend_kvext.store.lookup import Shortfall


class Refusal(enum.Enum):
    """Why a store is not made."""

    ALREADY_STORED = "already_stored"
    """The tier has the piece already."""

    BEING_STORED = "being_stored"
    """Another store of the piece is in progress."""

    WORTH_LESS = "worth_less"
    """Only the eviction of entries that are worth more could make room."""

    NO_ROOM = "no_room"
    """All entries that are worth less are in use, or the tier is too small."""

    BUSY = "busy"
    """Requests lack the pages that the store, or unfinished stores together, hold or would hold."""

    PAGES_GONE = "pages_gone"
    """The device has not kept some pages of the piece."""


class Removal(enum.Enum):
    """Why an entry that was stored was removed."""

    EVICTED = "evicted"
    """The entry was evicted to make room for another entry."""

    REPLACED = "replaced"
    """A longer entry has all its rows."""

    LOAD_FAILED = "load_failed"
    """A load of the entry failed. An entry that fails once is not used again."""

    CLEARED = "cleared"
    """The prefix cache was reset."""


@dataclass(slots=True)
class TierCounters:
    """Counts of one tier."""

    entries_held: Annotated[
        int,
        Counted(
            "Entries in host memory, including those that are being stored.",
            name="host_entries",
            is_gauge=True,
        ),
    ] = 0
    bytes_held: Annotated[
        int,
        Counted("Host memory that entries take on each worker.", name="host_bytes", is_gauge=True),
    ] = 0
    stored_entries: Annotated[
        dict[Kind, int], Counted("Entries stored in host memory, by what they hold.", "kind")
    ] = field(default_factory=partial(zeros, Kind))
    stored_bytes: Annotated[
        dict[Kind, int], Counted("Host memory that stored entries took on each worker.", "kind")
    ] = field(default_factory=partial(zeros, Kind))
    removed_entries: Annotated[
        dict[Removal, int],
        Counted("Entries that were removed from host memory, by reason.", "reason"),
    ] = field(default_factory=partial(zeros, Removal))
    removed_bytes: Annotated[
        dict[Removal, int],
        Counted("Host memory that removed entries took on each worker.", "reason"),
    ] = field(default_factory=partial(zeros, Removal))
    refused_stores: Annotated[
        dict[Refusal, int], Counted("Stores that were not made, by reason.", "reason")
    ] = field(default_factory=partial(zeros, Refusal))
    failed_stores: Annotated[
        int,
        Counted(
            "Stores and loads that failed, in whole or in part; what loads lack is computed.",
            label="direction",
            value="store",
            name="transfer_failures",
        ),
    ] = 0
    failed_loads: Annotated[
        int, Counted("", label="direction", value="load", name="transfer_failures")
    ] = 0
    shortfalls: Annotated[
        dict[Shortfall, int],
        Counted(
            "Requests that found less in host memory than they might have, by reason.", "reason"
        ),
    ] = field(default_factory=partial(zeros, Shortfall))
