# SPDX-License-Identifier: Apache-2.0
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


@dataclass(slots=True)
class TierCounters:
    """Counts of one tier."""

    entries_held: Annotated[
        int,
        Counted(
            "Entries in host memory, those on their way there included.",
            name="host_entries",
            is_gauge=True,
        ),
    ] = 0
    bytes_held: Annotated[
        int,
        Counted("Host memory that they take on each worker.", name="host_bytes", is_gauge=True),
    ] = 0
    stored_entries: Annotated[
        dict[Kind, int], Counted("Entries stored in host memory, by what they hold.", "kind")
    ] = field(default_factory=partial(zeros, Kind))
    stored_bytes: Annotated[
        dict[Kind, int], Counted("Host memory that they took on each worker.", "kind")
    ] = field(default_factory=partial(zeros, Kind))
    removed_entries: Annotated[
        dict[Removal, int],
        Counted("Entries that are not in host memory any more, by reason.", "reason"),
    ] = field(default_factory=partial(zeros, Removal))
    removed_bytes: Annotated[
        dict[Removal, int], Counted("Host memory that they took on each worker.", "reason")
    ] = field(default_factory=partial(zeros, Removal))
    refused_stores: Annotated[
        dict[Refusal, int], Counted("Stores that were not made, by reason.", "reason")
    ] = field(default_factory=partial(zeros, Refusal))
    failed_stores: Annotated[
        int,
        Counted(
            "Stores and loads that failed, in whole or in part; what loads lack is computed.",
            *("direction", "store", "transfer_failures"),
        ),
    ] = 0
    failed_loads: Annotated[int, Counted("", "direction", "load", "transfer_failures")] = 0
    shortfalls: Annotated[
        dict[Shortfall, int],
        Counted(
            "Requests that found less in host memory than they might have, by reason.", "reason"
        ),
    ] = field(default_factory=partial(zeros, Shortfall))
