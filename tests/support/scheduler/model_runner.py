# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A model runner without a model. Like the real one, it knows only what the scheduler tells it.

Only from ``SchedulerOutput``, it keeps block tables and tokens. It writes the digest of every
computed position into the shadow of the KV cache. It checks that every position that attention
would read has the digest of the request's own tokens. The last digest determines the sampled token.

A load that fails leaves *garbage*: a negative number. It names the step whose output reports the
failure. Until this output is processed, the scheduler does not know of the failure, so requests may
read garbage. A request that has read garbage computes and samples garbage.
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

from .connector import Load
from .kv_memory import KVMemory
from .layouts import Attention, Group
from .options import FailingLoads
from .releases import block_copies
from .token_stream import VOCAB_SIZE, TokenStream, draft_tokens, mix, next_token

NULL_BLOCK_ID = 0
_NEVER_READ = -1
"""Garbage of a load between steps. No request may read it before the load is reported."""


class WrongKVError(AssertionError):
    """A request would attend to KV of other tokens."""


@dataclass(frozen=True, slots=True)
class FailedLoads(KVConnectorWorkerMetadata):
    """Worker metadata with the requests whose loads have failed, like our connector's."""

    failed_recving: frozenset[str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        raise NotImplementedError("there is one worker")


@dataclass(slots=True)
class _Receiving:
    """A load under way. Its failure is reported before its end, or with it."""

    load: Load
    failed_block_ids: set[int]
    steps_left: int
    report_when_left: int


class ReadCheck(enum.Enum):
    """Which of the positions that attention would read are checked."""

    NONE = "none"
    ALL = "all"


@dataclass(slots=True)
class _RequestState:
    stream: TokenStream
    num_computed_tokens: int = 0
    block_tables: list[list[int]] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    is_admitted: bool = True


@dataclass(slots=True)
class _Row:
    """One request in one step: the positions ``[start, end)``. The last of them are drafts."""

    request_id: str
    state: _RequestState
    start: int
    end: int
    drafts: list[int]
    digests: list[int]
    garbage: int | None = None

    @property
    def is_chunk(self) -> bool:
        """Whether the prompt continues in a later step."""
        return self.end < len(self.state.stream)


class ModelRunner:
    """Executes scheduler outputs on a ``KVMemory``."""

    def __init__(
        self,
        groups: Sequence[Group],
        num_draft_tokens: int = 0,
        read_check: ReadCheck = ReadCheck.ALL,
        failing_loads: FailingLoads | None = None,
    ) -> None:
        self.memory = KVMemory()
        self.counts: Counter[str] = Counter()
        self._groups = list(enumerate(groups))
        self._num_draft_tokens = num_draft_tokens
        self._check_reads = read_check is not ReadCheck.NONE
        self._streams: dict[str, TokenStream] = {}
        self._states: dict[str, _RequestState] = {}
        self._finished_sending: list[set[str]] = [set(), set()]
        self._failing_loads = failing_loads
        self._receiving: list[_Receiving] = []
        self._num_loads: Counter[str] = Counter()
        self._num_executed_steps = 0
        self._num_processed_steps = 0

    @property
    def is_transferring(self) -> bool:
        """Whether the connector needs more steps to end its work."""
        return bool(self._receiving) or any(self._finished_sending)

    def note_processed_step(self) -> None:
        """Note that the scheduler has processed the output of the next step."""
        self._num_processed_steps += 1

    def is_unreported(self, digest: int | None) -> bool:
        """Whether a digest is garbage of a failure that was not reported yet."""
        return digest is not None and digest < 0 and -digest - 2 >= self._num_processed_steps

    def expect(self, request_id: str, stream: TokenStream) -> None:
        """Announce a request. Its content depends on facts that no scheduler output has."""
        self._streams[request_id] = stream

    def execute(self, scheduler_output: Any) -> ModelRunnerOutput:
        """Run one step: write, check and sample, in the order of a forward pass."""
        for request_id in scheduler_output.finished_req_ids:
            self._states.pop(request_id, None)
        self._update_states(scheduler_output)
        for source, target in block_copies(scheduler_output):
            self.memory.copy(source, target)
        connector_output = self._run_connector(scheduler_output.kv_connector_metadata)
        rows = list(self._make_rows(scheduler_output))
        for row in rows:
            self._check_states(row)
        for row in rows:
            self._write_row(row)
        self._check_rows(rows)
        sampled = [self._sample(row) for row in rows]
        self._num_executed_steps += 1
        return ModelRunnerOutput(
            req_ids=[row.request_id for row in rows],
            req_id_to_index={row.request_id: i for i, row in enumerate(rows)},
            sampled_token_ids=sampled,
            kv_connector_output=connector_output,
        )

    def take_draft_token_ids(self) -> DraftTokenIds:
        """The drafts of all requests that have some. The scheduler must not be asynchronous."""
        drafts = {id: list(s.drafts) for id, s in self._states.items() if s.drafts}
        return DraftTokenIds(list(drafts), list(drafts.values()))

    def _update_states(self, scheduler_output: Any) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            state = _RequestState(self._stream_of(new), new.num_computed_tokens)
            if state.stream.tokens != list(new.prompt_token_ids):
                raise AssertionError(f"{new.req_id}: unexpected prompt {new.prompt_token_ids}")
            state.block_tables = [list(ids) for ids in new.block_ids]
            self._states[new.req_id] = state
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, block_ids, num_computed_tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            state = self._states[request_id]
            if request_id in cached.resumed_req_ids:
                state.block_tables = [list(ids) for ids in block_ids]
                state.num_computed_tokens = num_computed_tokens
                state.stream.replace(cached.all_token_ids[request_id])
                state.drafts = []
                state.is_admitted = True
            elif block_ids is not None:
                for table, ids in zip(state.block_tables, block_ids, strict=True):
                    table.extend(ids)

    def _stream_of(self, new: Any) -> TokenStream:
        """The stream of a request. The row of a hole has the beginning of its request's stream."""
        stream = self._streams.get(new.req_id)
        if stream is not None:
            return stream
        request_id = new.req_id.rpartition("-hole-")[0]
        return self._streams[request_id].beginning(len(new.prompt_token_ids))

    def _make_rows(self, scheduler_output: Any) -> Iterator[_Row]:
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            state = self._states[request_id]
            start = state.num_computed_tokens
            known = len(state.stream)
            drafts = list(scheduler_output.scheduled_spec_decode_tokens.get(request_id, ()))
            if -1 in drafts and not state.is_admitted:
                # With asynchronous scheduling, the runner knows the drafts, and how many of them
                # were accepted.
                drafts = state.drafts[: len(drafts)]
            # Since vLLM 0.30, a request that is admitted for one token has drafts of -1. They are
            # rejected.
            state.is_admitted = False
            end = start + num_tokens
            if end > known + len(drafts):
                raise AssertionError(
                    f"{request_id}: scheduled up to token {end}, but only {known} tokens and "
                    f"{len(drafts)} drafts exist"
                )
            digests = list(state.stream.digests)
            for token in drafts:
                digests.append(mix(digests[-1], token))
            yield _Row(request_id, state, start, end, drafts, digests)

    def _sample(self, row: _Row) -> list[int]:
        state = row.state
        state.drafts = []
        if row.is_chunk:
            state.num_computed_tokens = row.end
            return []
        sampled: list[int] = []
        for draft in (*row.drafts, None):
            token = next_token(state.stream.last_digest)
            if row.garbage is not None:
                token = (token + 1) % VOCAB_SIZE
            sampled.append(token)
            state.stream.extend((token,))
            if token != draft:
                break
        num_rejected = len(row.drafts) + 1 - len(sampled)
        self.counts["accepted drafts"] += len(sampled) - 1
        self.counts["rejected drafts"] += num_rejected
        state.num_computed_tokens = row.end - num_rejected
        state.drafts = draft_tokens(state.stream.last_digest, self._num_draft_tokens)
        return sampled

    def _write_row(self, row: _Row) -> None:
        digests = row.digests
        if row.garbage is not None:
            digests = [row.garbage] * len(digests)
        for group_id, _ in self._groups:
            table = row.state.block_tables[group_id]
            self._write(table, group_id, digests, row.start, row.end)

    def _write(
        self, table: list[int], group_id: int, digests: list[int], start: int, end: int
    ) -> None:
        group = self._groups[group_id][1]
        for block, first_row, content in rows_of(group, digests, start, end):
            if table[block] != NULL_BLOCK_ID:
                self.memory.write(table[block], group_id, group.rows_per_block, first_row, content)

    def _check_rows(self, rows: Sequence[_Row]) -> None:
        """Write and check rows. For all requests, every layer writes before any layer reads."""
        pending = [row for row in rows if row.garbage is None]
        while pending:
            for row in pending:
                self._check_row(row)
            # A row that has read garbage writes garbage. Other rows of this step may read it.
            spoiled = [row for row in pending if row.garbage is not None]
            for row in spoiled:
                self._write_row(row)
            pending = [row for row in pending if row.garbage is None] if spoiled else []

    def _check_row(self, row: _Row) -> None:
        for group_id, group in self._groups:
            if group.attention is not Attention.MAMBA:
                self._check_read(row, group_id, group.first_read_position(row.start), row.end)

    def _check_states(self, row: _Row) -> None:
        """Check the state after the previous step. Recurrent layers read it before they write."""
        for group_id, group in self._groups:
            if group.attention is Attention.MAMBA and row.start:
                self._check_read(row, group_id, 0, row.start)

    def _check_read(self, row: _Row, group_id: int, first: int, end: int) -> None:
        group = self._groups[group_id][1]
        table = row.state.block_tables[group_id]
        for block, first_row, expected in rows_of(group, row.digests, first, end):
            found = self.memory.read(table[block], group_id, first_row, len(expected))
            is_null = table[block] == NULL_BLOCK_ID
            if self._check_reads and (is_null or self._is_wrong(row, found, expected)):
                raise WrongKVError(
                    f"{row.request_id}, group {group_id} ({group.attention.value}): rows from "
                    f"{first_row} in block {table[block]} are not the request's own; step "
                    f"computes [{row.start}, {row.end}); expected {expected}, found {found}"
                )

    def _is_wrong(self, row: _Row, found: list[int | None], expected: list[int]) -> bool:
        """Whether a row reads wrong KV. If garbage was not reported yet, the row takes it over."""
        if found == expected:
            return False
        garbage = [digest for digest in found if self.is_unreported(digest)]
        if row.garbage is not None:
            garbage.append(row.garbage)
        row.garbage = max(garbage, default=None)  # This failure is reported first.
        return not all(
            digest == own or self.is_unreported(digest)
            for digest, own in zip(found, expected, strict=True)
        )

    def _run_connector(self, metadata: Any) -> KVConnectorOutput | None:
        if metadata is None:
            return None
        self.counts["external loads"] += len(metadata.loads)
        self._receiving += [_Receiving(load, *self._fate(load)) for load in metadata.loads]
        failed: set[int] = set()
        failed_requests: set[str] = set()
        received = set()
        for receiving in self._receiving:
            load = receiving.load
            if receiving.failed_block_ids and receiving.steps_left == receiving.report_when_left:
                failed |= receiving.failed_block_ids
                failed_requests.add(load.request_id)
            if receiving.steps_left == 0:
                garbage = _NEVER_READ if load.between_steps else -self._num_executed_steps - 2
                self._load(load, receiving.failed_block_ids, garbage)
                received |= {load.request_id} if load.between_steps else set()
            receiving.steps_left -= 1
        self._receiving = [each for each in self._receiving if each.steps_left >= 0]
        self._finished_sending.append(set(metadata.sends))
        names_requests = self._failing_loads is not None and self._failing_loads.names_requests
        return KVConnectorOutput(
            finished_sending=self._finished_sending.pop(0) or None,
            finished_recving=received or None,
            invalid_block_ids=set() if names_requests else failed,
            kv_connector_worker_meta=(
                FailedLoads(frozenset(failed_requests)) if names_requests else None
            ),
        )

    def _fate(self, load: Load) -> tuple[set[int], int, int]:
        """Choose the failing blocks of a load, its number of steps, and the step of the report."""
        failing = self._failing_loads
        if failing is None:
            return set(), 0, 0
        self._num_loads[load.request_id] += 1
        rng = random.Random(f"{failing.seed}/{load.request_id}/{self._num_loads[load.request_id]}")
        num_steps = rng.randint(0, failing.max_steps) if load.between_steps else 0
        report_when_left = rng.randint(0, num_steps)
        if rng.random() >= failing.share:
            return set(), num_steps, 0
        self.counts["failed loads"] += 1
        loaded = [
            [load.block_ids[group_id][block] for block, _, _ in self._loaded(load, group_id)]
            for group_id, _ in self._groups
        ]
        groups = rng.choice((loaded, [rng.choice(loaded)]))
        block_ids = [id for table in groups for id in table if id != NULL_BLOCK_ID]
        if not block_ids:
            block_ids = [id for table in loaded for id in table if id != NULL_BLOCK_ID]
        chosen = set(rng.sample(block_ids, k=rng.randint(1, len(block_ids))))
        # Some connectors report the whole table, with its null blocks.
        if rng.random() < 0.5:
            chosen.add(NULL_BLOCK_ID)
        return chosen, num_steps, report_when_left

    def _loaded(self, load: Load, group_id: int) -> Iterator[tuple[int, int, int]]:
        """The places of a load in a group: ``(block index, first position, last + 1)``."""
        group = self._groups[group_id][1]
        if group.attention is Attention.MAMBA:
            first = load.end_tokens - 1
        else:
            first = max(load.start_tokens, group.first_read_position(load.end_tokens))
        first = first // group.block_tokens * group.block_tokens
        return _by_block(group.block_tokens, first, load.end_tokens)

    def _load(self, load: Load, failed_block_ids: set[int], garbage: int) -> None:
        digests = self._streams[load.request_id].digests
        for group_id, _ in self._groups:
            table = load.block_ids[group_id]
            for block, low, high in self._loaded(load, group_id):
                content = digests
                if table[block] in failed_block_ids:
                    content = [garbage] * high
                self._write(table, group_id, content, low, high)


def rows_of(
    group: Group, digests: list[int], start: int, end: int
) -> Iterator[tuple[int, int, list[int]]]:
    """The rows of the tokens ``[start, end)`` in a group: ``(block index, first row, content)``.

    A row is written once all of its tokens are there. Of states, only the last is written.
    """
    if group.attention is Attention.MAMBA:
        yield (end - 1) // group.block_tokens, 0, digests[end - 1 : end]
        return
    ratio = group.tokens_per_row
    for block, low, high in _by_block(group.rows_per_block, start // ratio, end // ratio):
        content = digests[low * ratio + ratio - 1 : high * ratio : ratio]
        yield block, low - block * group.rows_per_block, content


def _by_block(block_tokens: int, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Split positions ``[start, end)`` into ``(block index, first, last + 1)``."""
    while start < end:
        block = start // block_tokens
        stop = min(end, (block + 1) * block_tokens)
        yield block, start, stop
        start = stop
