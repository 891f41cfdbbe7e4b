# SPDX-License-Identifier: Apache-2.0
"""A scheduler side and the little of vLLM that it sees: block tables, a pool, requests.

Tokens are characters. Two groups: full attention and a sliding window. Windows move on before a
step, as in vLLM's ``allocate_slots``; hits on the device do not happen unless a test says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from support.layout.byte_memory import make_group, make_layout
from vllm_ascend_kvext.connector.engine import Engine
from vllm_ascend_kvext.connector.messages import JobResults, StepJobs, StoreJob, WorkerLayout
from vllm_ascend_kvext.connector.options import ConnectorOptions
from vllm_ascend_kvext.connector.scheduler_side import SchedulerSide
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import KVLayout, StatePolicy
from vllm_ascend_kvext.store.counters import Removal
from vllm_ascend_kvext.store.entries import Entry

PAGE_TOKENS = 4
WINDOW_TOKENS = 10
CHUNK_TOKENS = 16
NUM_BLOCKS = 200


class Status(Enum):
    RUNNING = 0
    FINISHED_STOPPED = 1
    FINISHED_ABORTED = 2


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    is_null: bool = False


class Pool:
    """Blocks with reference counts; block 0 is null."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.null = self.blocks[0]
        self.null.is_null = True
        self.free = self.blocks[1:]

    def allocate(self) -> Block:
        block = self.free.pop(0)
        block.ref_cnt = 1
        return block

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            assert not block.is_null
            if not block.ref_cnt:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        for block in ordered_blocks:
            if block.is_null:
                continue
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if not block.ref_cnt:
                self.free.append(block)

    def get_num_free_blocks(self) -> int:
        return len(self.free)


@dataclass(eq=False)
class Request:
    """A request whose tokens are characters."""

    request_id: str
    text: str
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    lora_request: Any = None
    sampling_params: Any = None
    pooling_params: Any = None
    prompt_embeds: Any = None
    mm_features: Any = ()
    skip_reading_prefix_cache: bool = False
    status: Status = Status.RUNNING

    @property
    def num_tokens(self) -> int:
        return len(self.text)

    @property
    def all_token_ids(self) -> list[int]:
        return [ord(character) for character in self.text]

    @property
    def block_hashes(self) -> list[bytes]:
        ends = range(PAGE_TOKENS, len(self.text) + 1, PAGE_TOKENS)
        return [hashlib.sha256(self.text[:end].encode()).digest() for end in ends]

    def is_finished(self) -> bool:
        return self.status is not Status.RUNNING


@dataclass
class Manager:
    req_to_blocks: dict[str, list[Block]] = field(default_factory=dict)


@dataclass
class Events:
    """Records what it is told."""

    log: list[tuple[str, Entry]] = field(default_factory=list)

    def stored(self, entry: Entry, prefix: Any, request: Any) -> None:
        self.log.append(("stored", entry))

    def removed(self, entry: Entry, removal: Removal) -> None:
        self.log.append(("removed", entry))

    def take(self) -> list[Any]:
        taken, self.log = self.log, []
        return taken


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def full_and_window(num_pages: int = NUM_BLOCKS) -> KVLayout:
    full = make_group(0, GroupKind.FULL, PAGE_TOKENS, PAGE_TOKENS, [64])
    window = make_group(
        1, GroupKind.WINDOW, PAGE_TOKENS, PAGE_TOKENS, [64], WINDOW_TOKENS, first_storage=1
    )
    return make_layout([full, window], num_pages)


def full_only(num_pages: int = NUM_BLOCKS) -> KVLayout:
    return make_layout([make_group(0, GroupKind.FULL, PAGE_TOKENS, PAGE_TOKENS, [64])], num_pages)


class SmallEngine:
    """Drives a `SchedulerSide` as vLLM does.

    Attributes:
        side: The scheduler side.
        jobs: Of the latest step.
    """

    def __init__(
        self,
        layout: Callable[[], KVLayout] = full_and_window,
        *,
        host_bytes: int = 1 << 20,
        num_workers: int = 1,
        caches_prefixes: bool = False,
        looks_ahead: bool = False,
        most_request_tokens: int = 1 << 60,
        **options: Any,
    ) -> None:
        self.clock = Clock()
        self.events = Events()
        self.pool = Pool()
        self.requests: dict[str, Request] = {}
        options.setdefault("chunk_tokens", CHUNK_TOKENS)
        options.setdefault("load_if_slower", True)
        self.options = ConnectorOptions(state_policy=StatePolicy.EXACT, **options)
        self.side = SchedulerSide(self.options, True, self.events, self.clock)
        self._layout = layout()
        self.managers = [Manager() for _ in range(self._layout.num_scheduler_groups)]
        self.side.bind(
            Engine(
                self.requests,
                self.managers,
                self.pool,
                len(self.pool.blocks),
                PAGE_TOKENS,
                caches_prefixes,
                looks_ahead=looks_ahead,
                most_request_tokens=most_request_tokens,
            )
        )
        worker = WorkerLayout(self._layout, "f", host_bytes)
        self.num_workers = num_workers
        self.side.set_workers([worker] * num_workers)
        self.jobs = StepJobs()
        self._preempted: set[str] = set()

    def add(self, request_id: str, text: str) -> Request:
        request = self.requests[request_id] = Request(request_id, text, len(text))
        return request

    def admit(self, request: Request, local_tokens: int = 0) -> int | None:
        """Match, allocate, and tell the side; returns what is loaded, None to wait."""
        num_tokens = self.side.match(request, local_tokens)
        if num_tokens is None:
            return None
        request.num_computed_tokens = local_tokens + num_tokens
        self._allocate(request, request.num_computed_tokens)
        block_ids = tuple(
            [block.block_id for block in manager.req_to_blocks[request.request_id]]
            for manager in self.managers
        )
        self.side.allocated(request, block_ids, num_tokens)
        return num_tokens

    def step(self, *computed: Request, num_tokens: int | None = None) -> StepJobs:
        """Compute what is left of some requests, or so many tokens of each; plan it only."""
        scheduled = {}
        for request in computed:
            left = request.num_tokens - request.num_computed_tokens
            scheduled[request.request_id] = left if num_tokens is None else min(num_tokens, left)
            self._skip(request)
            self._allocate(request, request.num_computed_tokens + scheduled[request.request_id])
        self.jobs = self.side.plan_step(scheduled, self._preempted)
        self._preempted = set()
        for request in computed:
            request.num_computed_tokens += scheduled[request.request_id]
        return self.jobs

    def output(
        self,
        jobs: StepJobs | None = None,
        *,
        failed_stores: Iterable[int] = (),
        failed_loads: Iterable[str] = (),
        num_readable: int = 0,
        num_workers: int | None = None,
    ) -> None:
        """The workers have made the jobs of a step: of the latest, unless one is given.

        Args:
            num_readable: Of the parts of each load that has failed, the first so many can be read.
        """
        jobs = self.jobs if jobs is None else jobs
        stores: tuple[StoreJob, ...] = (*jobs.stores_before, *jobs.stores)
        results = JobResults(
            stores_ended={
                job.number: self.num_workers if num_workers is None else num_workers
                for job in stores
            },
            failed_stores=set(failed_stores),
            failed_loads=set(failed_loads),
            unreadable={
                load.request_id: set(sorted(load.places)[num_readable:])
                for load in self.jobs.loads
                if load.request_id in failed_loads
            },
            has_forward=jobs.has_forward,
        )
        self.side.note_output(results, [load.request_id for load in jobs.loads])

    def grow(self, request: Request, text: str) -> None:
        """Generate tokens one by one, each in a step that is reported."""
        for character in text:
            request.text += character
            self.step(request, num_tokens=1)
            self.output()

    def finish(self, request: Request, status: Status = Status.FINISHED_STOPPED) -> None:
        request.status = status
        self._skip(request)
        self.side.finish(request, status is Status.FINISHED_STOPPED)
        self._free(request)
        del self.requests[request.request_id]

    def preempt(self, request: Request) -> None:
        self.side.preempt(request)
        self._free(request)
        request.num_computed_tokens = 0
        self._preempted.add(request.request_id)

    def serve(self, request_id: str, text: str, answer: str = "") -> Request:
        """One request from its admission to its end, all stores made."""
        request = self.add(request_id, text)
        assert self.admit(request) is not None
        self.step()
        self.output()
        self.step(request)
        self.output()
        self.grow(request, answer)
        self.finish(request)
        self.step()
        self.output()
        return request

    @property
    def num_free_blocks(self) -> int:
        return len(self.pool.free)

    def assert_idle(self) -> None:
        """Nothing is held, pinned or under way."""
        assert not self.side.has_transfers
        assert not self.side.num_references
        assert not self.side.num_pinned
        assert self.num_free_blocks == len(self.pool.blocks) - 1

    def _allocate(self, request: Request, num_tokens: int) -> None:
        for index, manager in enumerate(self.managers):
            blocks = manager.req_to_blocks.setdefault(request.request_id, [])
            first_live = self._first_live_page(index, request.num_computed_tokens)
            while len(blocks) * PAGE_TOKENS < num_tokens:
                blocks.append(self.pool.null if len(blocks) < first_live else self.pool.allocate())

    def _skip(self, request: Request) -> None:
        for index, manager in enumerate(self.managers):
            blocks = manager.req_to_blocks[request.request_id]
            for page in range(self._first_live_page(index, request.num_computed_tokens)):
                if not blocks[page].is_null:
                    self.pool.free_blocks([blocks[page]])
                    blocks[page] = self.pool.null

    def _first_live_page(self, group: int, computed_tokens: int) -> int:
        if group == 0:
            return 0
        return max(0, computed_tokens - WINDOW_TOKENS + 1) // PAGE_TOKENS

    def _free(self, request: Request) -> None:
        for manager in self.managers:
            self.pool.free_blocks(manager.req_to_blocks.pop(request.request_id))
