# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What the scheduler side knows of one request, from its arrival to its end.

There is one object per request. It is dropped when the request has ended and no load of it is under
way. `Stores` writes ``planned`` and ``progress``. The secondary tier writes ``secondary``. `Loads`
writes most of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_ascend_kvext.connector.common.request_options import RequestOptions, read_options
from vllm_ascend_kvext.connector.common.scheduler_view import Request
from vllm_ascend_kvext.connector.scheduler.request_report import Decision, RequestReport
from vllm_ascend_kvext.connector.scheduler.worker_jobs import Pages
from vllm_ascend_kvext.holes.eligibility import HoleRefusal
from vllm_ascend_kvext.holes.load_plan import LoadPlan
from vllm_ascend_kvext.store.answers import NOTHING_SEEN, Seen
from vllm_ascend_kvext.store.entries import EntryState, Load
from vllm_ascend_kvext.store.lookup import Shortfall

if TYPE_CHECKING:
    from vllm_ascend_kvext.retention.reasons import Reason


@dataclass(slots=True)
class RequestLoad:
    """A load of a request, with its pins. It is planned until the request is admitted.

    Attributes:
        began_s: When it was handed to the workers.
        has_failed: Whether some worker could not make it.
        unreadable: The offsets in host memory, in bytes, of what some worker could not read.
    """

    plan: LoadPlan
    load: Load
    began_s: float = 0.0
    has_failed: bool = False
    unreadable: set[int] = field(default_factory=set)

    def is_good_for(self, num_computed_tokens: int) -> bool:
        """Whether its plan is still valid if the device has this many tokens."""
        return self.plan.after_tokens == num_computed_tokens and all(
            entry.state is EntryState.STORED for entry in self.load.entries
        )


class Awaited(NamedTuple):
    """Another request's load. After it, the device has the tokens that end with ``key``."""

    key: bytes
    boundary_tokens: int
    since_s: float


class Later(NamedTuple):
    """Why a request had to wait for room, when the device had ``num_computed_tokens`` tokens of it.

    Attributes:
        room_version: The version of `PoolRoom` when its load had no room; None if it has nothing to
            load.
        free_blocks: The free blocks that its load needs, if it waits for these; else 0.
    """

    num_computed_tokens: int
    room_version: int | None
    free_blocks: int = 0


@dataclass(slots=True)
class Admission:
    """What is known of a request while it waits to be admitted.

    Attributes:
        pinned: What can be loaded; None if nothing was found, or nothing was looked for.
        awaited: The load that it waits for, or has waited for.
        later: Why it waits for room.
        shortfall: Why the lookup found no more.
        hole_refusal: Why its load stops at the first hole.
        decision: Why it loads what it loads.
        is_slower: Whether its load was counted as slower than computing.
        lacks_blocks_since_s: The time since which the windows of its holes have lacked blocks.
    """

    pinned: RequestLoad | None = None
    awaited: Awaited | None = None
    later: Later | None = None
    shortfall: Shortfall | None = None
    hole_refusal: HoleRefusal | None = None
    decision: Decision = Decision.NOT_LOOKED_UP
    is_slower: bool = False
    lacks_blocks_since_s: float | None = None


@dataclass(slots=True, eq=False)
class StoreProgress:
    """What is stored of a request that has computed something.

    Attributes:
        use: The moment of its admission, see ``HostTier.next_use``.
        boundaries: Boundaries at which its tails are stored, and why.
        done_tokens: Boundaries up to here have been looked at.
        next_event_tokens: A step that ends below this number of tokens changes nothing.
        rows_tokens: Rows up to here are in the tier, or on their way there.
        tails_tokens: The last boundary within a state's page whose tails were stored; 0 if none.
        held: Pages of the tails at ``held_tokens`` that leave their windows.
        answers: The earlier answers of its conversation.
    """

    use: int
    boundaries: dict[int, Reason]
    done_tokens: int
    next_event_tokens: int = 0
    rows_tokens: int = 0
    tails_tokens: int = 0
    held: Pages = field(default_factory=dict)
    held_tokens: int = 0
    answers: Seen = NOTHING_SEEN


@dataclass(slots=True)
class RequestOffloadState:
    """One request.

    Attributes:
        options: What it asks for; None before its options were read.
        device_tokens: The tokens of it that the device had when it was last looked at.
        report: The report of its latest admission; None before the first one.
        admission: What is known while it waits. A new one begins when the request has got blocks.
        promised_key: The key of the tokens that its load leaves on the device; None if other
            requests cannot wait for them.
        planned: Before its admission: the token at which it is to begin, and the boundaries at
            which tails will be stored then, with reasons. None if nothing is planned.
        progress: What is stored of it; None before it computes.
        secondary: What the secondary tier notes of it. Only the tier reads and writes it.
        has_ended: Whether the request has ended. Only its load is then still under way.
    """

    options: RequestOptions | None = None
    device_tokens: int = 0
    report: RequestReport | None = None
    admission: Admission = field(default_factory=Admission)
    under_way: RequestLoad | None = None
    promised_key: bytes | None = None
    num_failed_loads: int = 0
    planned: tuple[int, dict[int, Reason]] | None = None
    progress: StoreProgress | None = None
    secondary: Any = None
    has_ended: bool = False


class RequestOffloadStates(dict[str, RequestOffloadState]):
    """The requests of one engine, by id, in the order in which they arrived."""

    def __missing__(self, request_id: str) -> RequestOffloadState:
        state = self[request_id] = RequestOffloadState()
        return state

    def options_of(self, request: Request) -> RequestOptions:
        """What a request asks for, which is read once."""
        state = self[request.request_id]
        if state.options is None:
            state.options = read_options(request)
        return state.options

    def renew_options(self, request: Request) -> None:
        """A session goes on with other parameters.

        If its KV was kept out once, it is never stored.
        """
        state = self.get(request.request_id)
        if state is not None and state.options is not None:
            may_store = state.options.may_store
            state.options = read_options(request)
            state.options = state.options._replace(may_store=may_store and state.options.may_store)

    def end(self, request_id: str) -> None:
        """A request has ended; a load of it may still be under way."""
        self[request_id].has_ended = True
        self.drop_ended(request_id)

    def drop_ended(self, request_id: str) -> None:
        """Forget a request that has ended, and has no load any more."""
        state = self.get(request_id)
        if state is not None and state.has_ended and state.under_way is None:
            del self[request_id]
