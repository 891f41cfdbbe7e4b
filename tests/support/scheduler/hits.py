# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Counts the tokens that requests hit, by KV cache layout, KV connector, role and drafts.

Each `Cell` is an engine. All engines serve the same traces: prompts that come again, next turns,
siblings that share a beginning, edited ends, and prompts longer than a step, alone and side by
side.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from support import family
from support.installed import installed
from support.upstream_version import IS_SINCE_0_30

from .engine import SchedulerEngine
from .layouts import (
    DEEPSEEK_V4,
    FULL,
    FULL_WINDOW,
    MAMBA,
    MAMBA_WINDOW,
    MIXED_BLOCKS,
    TWO_FULL,
    Attention,
    Group,
    Layout,
)
from .model_runner import ModelRunner, ReadCheck, WrongKVError
from .options import Drafter, EngineOptions, ExternalLoad
from .releases import CONFIGURES_RETENTION
from .token_stream import VOCAB_SIZE
from .transcript import Step, describe_schedule
from .workload import RequestPlan

Waves = tuple[tuple[tuple[int, ...], ...], ...]
"""Waves of prompts. The prompts of one wave arrive together."""


@dataclass(slots=True)
class Hits:
    """The tokens that each request hit in the device's prefix cache at its first admission.

    Attributes:
        tokens: The hit tokens, by request.
        wrong: Requests that have read KV of other tokens.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)

    @property
    def total(self) -> int:
        return sum(self.tokens.values())

    @property
    def right(self) -> dict[str, int]:
        """The hits of requests that have read no wrong KV."""
        return {id: 0 if id in self.wrong else hit for id, hit in self.tokens.items()}


NUM_BLOCKS = 4000
"""The size of a pool with room for all requests."""

DRAFT_TOKENS = 2
STEP_UNITS = 4
PROMPT_UNITS = (0.6, 1, 2.7, 3, 4, 5.5, 9.3)
"""Lengths in units: below a unit, whole units, between them, a step, and more than a step."""

STATES_OF_16 = Layout("mamba-16", (Group(Attention.FULL, 16), Group(Attention.MAMBA, 16)))

LAYOUTS = (
    FULL,
    TWO_FULL,
    FULL_WINDOW,
    MIXED_BLOCKS,
    MAMBA,
    STATES_OF_16,
    MAMBA_WINDOW,
)
if family.IS_ASCEND:
    from .layouts import COMPRESSED as OF_DEEPSEEK_V4
else:
    OF_DEEPSEEK_V4 = DEEPSEEK_V4


@dataclass(frozen=True, slots=True)
class Beside:
    """The KV connector of an engine. It never has anything for a request."""

    name: str
    kv_role: str = ""
    is_ours: bool = False

    @property
    def may_load(self) -> bool:
        return self.kv_role in ("kv_both", "kv_consumer")


NO_CONNECTOR = Beside("no connector")
FOREIGN = tuple(Beside(f"foreign, {r}", r) for r in ("kv_both", "kv_producer", "kv_consumer"))
OURS = Beside("ours, never", "kv_both", is_ours=True)
CONNECTORS = (NO_CONNECTOR, *FOREIGN, OURS)


@dataclass(frozen=True, slots=True)
class Cell:
    """One engine.

    Attributes:
        step_offset_tokens: The number of tokens by which a step is shorter than whole units.
        interval_tokens: The value of ``prefix_cache_retention_interval``. vLLM 0.30's default is 0.
    """

    layout: Layout
    beside: Beside
    has_drafts: bool
    step_offset_tokens: int = 0
    is_async: bool = False
    interval_tokens: int = 0

    @property
    def is_checked(self) -> bool:
        """Whether reads are checked. The harness does not know states of drafts."""
        return not (self.has_drafts and self.layout.has_mamba)

    @property
    def name(self) -> str:
        drafts = ", drafts" if self.has_drafts else ""
        return f"{self.layout.name}{drafts} | {self.beside.name}"


def cells() -> Iterator[Cell]:
    """All cells, with two sizes of steps. Steps of one size end inside blocks."""
    for layout in (*LAYOUTS, OF_DEEPSEEK_V4):
        for beside in CONNECTORS:
            if beside.is_ours and not _has_pages(layout):
                continue
            for has_drafts in (False, True):
                for number, offset_tokens in enumerate((0, 3)):
                    yield Cell(layout, beside, has_drafts, offset_tokens, is_async=number == 1)


def _has_pages(layout: Layout) -> bool:
    """Whether the harness can make pages for the layout. Our connector needs them."""
    return not family.IS_ASCEND or (IS_SINCE_0_30 and layout is not OF_DEEPSEEK_V4)


def hits_of(cell: Cell, num_blocks: int = NUM_BLOCKS) -> Hits:
    """Serve each trace on its own engine, with the features that are installed in this process."""
    found = Hits()
    for trace, waves in traces(cell.layout.unit_tokens).items():
        engine = _engine(cell, num_blocks)
        try:
            for number, wave in enumerate(waves):
                found.tokens |= _serve(engine, f"{trace}-{number}", wave)
            found.wrong |= getattr(engine.runner, "wrong", set())
        finally:
            engine.shutdown()
    return found


def traces(unit_tokens: int) -> Mapping[str, Waves]:
    """Prompts of every length in ``PROMPT_UNITS``, by their trace."""
    rng = random.Random(unit_tokens)

    def tokens(num_units: float) -> tuple[int, ...]:
        return tuple(rng.choices(range(VOCAB_SIZE), k=max(1, round(num_units * unit_tokens))))

    prompts = [tokens(num_units) for num_units in PROMPT_UNITS]
    turns = []
    for prompt in prompts[::2]:
        turns.append(prompt)
        for num_units in (0.7, 2):
            turns.append(turns[-1] + tokens(num_units))
    shared = [tokens(num_units) for num_units in (1, 2.5, 6)]
    siblings = [[each + tokens(num_units) for num_units in (1.3, 0.4, 5)] for each in shared]
    edited = [prompt[: -max(1, len(prompt) // 4)] + tokens(0.8) for prompt in prompts]
    return {
        "again": tuple((prompt,) for prompt in (*prompts, *prompts, *prompts)),
        "turns": tuple((prompt,) for prompt in turns),
        "siblings": tuple((prompt,) for wave in siblings for prompt in wave),
        "edited": tuple((prompt,) for pair in zip(prompts, edited, strict=True) for prompt in pair),
        "together": (tuple(prompts), *map(tuple, siblings), tuple(edited), tuple(prompts)),
    }


def _engine(cell: Cell, num_blocks: int) -> SchedulerEngine:
    layout = _with_drafts(cell.layout) if cell.has_drafts else cell.layout
    unit_tokens = layout.unit_tokens
    options = EngineOptions(
        num_blocks=num_blocks,
        max_num_batched_tokens=STEP_UNITS * unit_tokens - cell.step_offset_tokens,
        max_model_len=64 * unit_tokens,
        max_num_seqs=8,
        is_async=cell.is_async,
        drafter=Drafter.EAGLE if cell.has_drafts else None,
        num_draft_tokens=DRAFT_TOKENS,
        events=False,
        interval_tokens=cell.interval_tokens if CONFIGURES_RETENTION else None,
        external_load=ExternalLoad.NEVER if cell.beside.kv_role else None,
        kv_role=cell.beside.kv_role or "kv_both",
    )
    if not cell.beside.is_ours:
        return _Engine(layout, options)
    never = {"host_memory_gib": 1 / 1024, "chunk_tokens": unit_tokens, "store_policy": "never"}
    return _beside_ours(layout, replace(options, offloading=never), cell.is_checked)


def _beside_ours(layout: Layout, options: EngineOptions, is_checked: bool) -> SchedulerEngine:
    # vLLM-Ascend 0.23.0's managers cannot make layouts with pages.
    from support.connector.paged_layouts import paged
    from support.connector.simulated_engine import SimulatedEngine

    class EngineBesideOurs(_SchedulesOnly, SimulatedEngine):
        pass

    engine = EngineBesideOurs(paged(layout), options)
    if not is_checked:
        for worker in engine.workers:
            worker.contents = mock.Mock()
    return engine


class _SchedulesOnly:
    """Describe only what a step has scheduled. To describe all blocks would be slow."""

    def _record(self, scheduler_output: Any, results: Any) -> Step:
        scheduled = describe_schedule(scheduler_output)
        return Step(**scheduled, free_queue=(), blocks=(), events=(), outputs=())


class _NotingRunner(ModelRunner):
    """A runner that continues even if a request reads KV of other tokens."""

    def __init__(self, groups: Sequence[Group], num_draft_tokens: int) -> None:
        super().__init__(groups, num_draft_tokens, ReadCheck.ALL)
        self.wrong: set[str] = set()

    def _check_read(self, row: Any, group_id: int, first: int, end: int) -> None:
        try:
            super()._check_read(row, group_id, first, end)
        except WrongKVError:
            self.wrong.add(row.request_id)


class _Engine(_SchedulesOnly, SchedulerEngine):
    def _new_runner(self, num_draft_tokens: int, read_check: ReadCheck) -> ModelRunner:
        if num_draft_tokens and self.layout.has_mamba:
            return ModelRunner(self.layout.groups, num_draft_tokens, ReadCheck.NONE)
        return _NotingRunner(self.layout.groups, num_draft_tokens)


def _with_drafts(layout: Layout) -> Layout:
    """Put the drafter's layer into the first group, as vLLM does."""
    groups = tuple(
        replace(
            group,
            is_eagle=index == 0,
            draft_blocks=DRAFT_TOKENS if group.attention is Attention.MAMBA else 0,
        )
        for index, group in enumerate(layout.groups)
    )
    return Layout(f"{layout.name}-drafts", groups)


def _serve(engine: SchedulerEngine, name: str, wave: tuple[tuple[int, ...], ...]) -> dict[str, int]:
    """Serve prompts that arrive together to their end. Return their hit tokens."""
    found: dict[str, int] = {}
    for number, prompt in enumerate(wave):
        plan = RequestPlan(
            request_id=f"{name}-{number}", arrival_step=0, prompt=prompt, max_tokens=4
        )
        engine.add_request(plan)
    for step in engine.finish(2000):
        for request in step.scheduled:
            if request.is_new_or_resumed:
                found.setdefault(request.request_id, request.num_computed_tokens)
    return found


@contextmanager
def default_install() -> Iterator[None]:
    """Install the features of a process without settings, inside the block."""
    from vllm_ascend_kvext.features import REPAIRS

    with installed(*(repair.name for repair in REPAIRS), "connector"):
        yield
