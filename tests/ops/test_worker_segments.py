# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A worker's jobs with segments: what is moved, checked, refused and reported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.connector.gates import until  # noqa: E402
from support.connector.row_pages import (  # noqa: E402
    BLOCK,
    HEAD,
    HEADS,
    NUM_PAGES,
    RotaryEmbedding,
    SmallBackend,
    attention_of,
    registered,
    small_model,
)
from support.connector.worker_configs import vllm_config, worker_options  # noqa: E402
from support.layout.byte_memory import chunk_bytes  # noqa: E402
from support.layout.fakes import FullAttentionSpec, SlidingWindowSpec, config  # noqa: E402
from support.transfer.stand_in_gpu import StandInGpu, on_gpu  # noqa: E402

from vllm_ascend_kvext import loaded_models  # noqa: E402
from vllm_ascend_kvext.connector.common.messages import (  # noqa: E402
    ConnectorMetadata,
    LoadJob,
    StoreJob,
    WorkerOutput,
)
from vllm_ascend_kvext.connector.worker import worker_side  # noqa: E402
from vllm_ascend_kvext.connector.worker.worker_side import EndedJobs, WorkerSide  # noqa: E402
from vllm_ascend_kvext.errors import SegmentError  # noqa: E402
from vllm_ascend_kvext.layout.build import build_layout  # noqa: E402
from vllm_ascend_kvext.layout.model import RowAddressing  # noqa: E402
from vllm_ascend_kvext.layout.planner import TransferPlanner  # noqa: E402
from vllm_ascend_kvext.layout.row_map import StoredChunk  # noqa: E402
from vllm_ascend_kvext.layout.rows import TokenRange  # noqa: E402
from vllm_ascend_kvext.layout.sharing import PlaneShare  # noqa: E402
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk, TablePart  # noqa: E402
from vllm_ascend_kvext.segments.messages import SegmentsOfWorker  # noqa: E402
from vllm_ascend_kvext.segments.options import SegmentOptions, Selector  # noqa: E402
from vllm_ascend_kvext.segments.token_rows import SegmentRows  # noqa: E402
from vllm_ascend_kvext.segments.worker.section_share import SectionShare  # noqa: E402
from vllm_ascend_kvext.segments.worker.segment_mover import SegmentMover  # noqa: E402
from vllm_ascend_kvext.segments.worker.segments_worker import SegmentsWorker  # noqa: E402

WINDOW = 20
TOKEN_BYTES = 2 * 2 * HEADS * HEAD * 4
TOKEN_IDS = tuple(int(i) for i in torch.randint(0, 6, (64,), generator=torch.manual_seed(0)))
"""Few token ids, so that most occur again."""


class Worker:
    """A worker of a model with two layers, in one group, or one of full attention and a window."""

    def __init__(
        self,
        *,
        has_window: bool = False,
        is_known: bool = True,
        model: Any = None,
        backend: Any = None,
        model_name: str = "some/model",
        make_caches: Callable[[], Any] = registered,
        **sizes: int,
    ) -> None:
        self.rotary, self.other_rotary = RotaryEmbedding(), RotaryEmbedding(500.0)
        self.model = model or small_model(self.rotary, self.other_rotary)
        modules = attention_of(self.model)
        sizes = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": HEAD, **sizes}
        sizes["dtype"] = torch.float32
        full, window = FullAttentionSpec(**sizes), SlidingWindowSpec(sliding_window=WINDOW, **sizes)
        groups = [(full, *modules)]
        if has_window:
            groups = [(spec, name) for spec, name in zip((full, window), modules, strict=True)]
        self.group_of_layer = [0, 1 if has_window else 0]
        self.kv_caches = {name: make_caches() for name in modules}
        if is_known:
            loaded_models.remember(self.model)
        self.backend = backend or SmallBackend()
        vllm = vllm_config(modules)
        vllm.model_config.model = model_name
        self.side = WorkerSide(
            vllm,
            config(NUM_PAGES, *groups),
            worker_options(allow_cuda=True),
            extension=SegmentsWorker(vllm, SegmentOptions(), self.backend),
        )
        self.side.register(self.kv_caches)

    @property
    def layout(self) -> SegmentsOfWorker:
        return self.side.describe().extras

    @property
    def mover(self) -> SegmentMover:
        mover = self.side._runner.mover
        assert mover is not None
        return mover

    def copy_pages(self, other: Worker) -> None:
        for mine, theirs in zip(self.kv_caches.values(), other.kv_caches.values(), strict=True):
            mine.copy_(theirs)

    def compute(
        self,
        first: int,
        token_ids: tuple[int, ...],
        tables: tuple[TablePart, ...],
        scale: float = 0,
        only: slice = slice(None),
    ) -> None:
        """Write tokens as a forward would, in the first layer. Other layers add the tokens before.

        Args:
            scale: Keys are scaled behind the rotation by one plus this much per element.
            only: The tokens that are written, the first of them at ``first``.
        """
        of_token = torch.randn((12, 2, HEADS, HEAD), generator=torch.manual_seed(1))
        positions = torch.arange(first, first + len(token_ids[only]))
        for layer, (name, tensor) in enumerate(self.kv_caches.items()):
            table = tables[self.group_of_layer[layer]]
            ids = torch.tensor(table.ids)[positions // BLOCK - table.first_page]
            keys, values = of_token[list(token_ids)].unbind(1)
            if layer:
                keys, values = keys.cumsum(0), values.cumsum(0)
            keys, values = keys[only], values[only]
            rotary = self.other_rotary if layer else self.rotary
            _, keys = rotary(positions, keys, keys.clone())
            keys = keys * (1 + scale * torch.arange(HEAD))
            slots = ids * BLOCK + positions % BLOCK
            self.backend.write_rows(keys, values, *self.backend.caches_of(name, tensor), slots)

    def run(self, *jobs: StoreJob | LoadJob) -> EndedJobs:
        """Run jobs to their end."""
        stores = tuple(job for job in jobs if isinstance(job, StoreJob))
        loads = tuple(job for job in jobs if isinstance(job, LoadJob))
        self.side.begin_step(ConnectorMetadata(stores=stores, loads=loads))
        names, pages, found = frozenset[str](), frozenset[int](), WorkerOutput()

        def have_ended() -> bool:
            nonlocal names, pages
            ended = self.side.end_step()
            found.add(ended.results)
            names, pages = names | ended.loads, pages | ended.failed_pages
            return len(found.jobs_ended) + len(names) == len(jobs)

        until(have_ended)
        return EndedJobs(names, pages, found)


@pytest.fixture
def make_worker() -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(**arguments: Any) -> Worker:
        made.append(Worker(**arguments))
        return made[-1]

    loaded_models.forget_all()
    yield make
    for worker in made:
        worker.side.shutdown()
    loaded_models.forget_all()


SOURCE = (TablePart(0, (3, 9, 4, 11, 7)), TablePart(0, (5, 12, 6, 10, 8)))
TARGET = (TablePart(0, (21, 1, 20, 13, 2)), TablePart(0, (16, 15, 14, 17, 18)))
MOVED = (TablePart(2, (21, 1, 20, 13, 2)), TablePart(1, (16, 15, 14, 17, 18, 19)))
STORED = SegmentRows(3, 36, 64, 40, 5, 0, TOKEN_IDS[:33])
PLACED = STORED._replace(first_tokens=5, end_tokens=38, shift_tokens=2, token_ids=())


def load_of(*segments: SegmentRows, tables: tuple[TablePart, ...] = TARGET) -> LoadJob:
    tokens = TokenRange(0, 40)
    return LoadJob("a", tokens, (), tables, (tokens,), extras=segments)


@pytest.fixture
def stored(make_worker: Callable[..., Worker]) -> Worker:
    """A worker that has stored a segment."""
    worker = make_worker()
    worker.compute(3, STORED.token_ids, SOURCE)
    worker.run(StoreJob(7, (), SOURCE, (STORED,)))
    return worker


# The reports of a worker.


def window_of_kernel() -> dict[str, Any]:
    """vLLM without its hybrid manager: the scheduler sees full attention, the kernel a window."""
    rotary = RotaryEmbedding()
    return {"model": small_model(rotary, rotary, sliding_window=33)}


@pytest.mark.parametrize(
    ("arguments", "window_tokens"),
    [(dict, 0), (lambda: {"has_window": True}, WINDOW), (window_of_kernel, 33)],
    ids=["full", "window", "window of the kernel"],
)
def test_a_worker_says_how_tokens_lie(make_worker, arguments, window_tokens: int) -> None:
    layout = make_worker(**arguments()).layout
    assert layout.refusal == "" and layout.layout is not None
    assert layout.layout.row_bytes == (HEADS * HEAD * 4,) * 4
    assert layout.layout.window_tokens == window_tokens


def test_nothing_is_made_without_being_asked_for(make_worker) -> None:
    worker = make_worker()
    side = WorkerSide(worker.side._vllm_config, worker.side._kv_cache_config, worker_options())
    side.register(worker.kv_caches)
    assert side.describe().extras is None and side._runner.mover is None
    side.shutdown()


def test_workers_of_one_model_lay_tokens_out_alike(make_worker) -> None:
    assert make_worker().layout.layout == make_worker().layout.layout


class RaisingBackend(SmallBackend):
    def write_rows(self, *arguments: Any) -> None:
        raise RuntimeError("no such kernel")


class ForgetfulBackend(SmallBackend):
    """An op that writes no values."""

    def write_rows(self, keys, values, key_cache, value_cache, slots) -> None:
        super().write_rows(
            keys, value_cache[:1, :, 0] * 0 + values * 0, key_cache, value_cache, slots
        )


def model_with(**attributes: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"model": small_model(RotaryEmbedding(), RotaryEmbedding(), **attributes)}


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "model not known": (lambda: {"is_known": False}, "a model that vLLM's own loader has loaded"),
    "no rotary module": (
        lambda: {"model": small_model(RotaryEmbedding(), None)},
        "found none: keys of this layer",
    ),
    "op fails": (lambda: {"backend": RaisingBackend()}, "RuntimeError: no such kernel. Serve this"),
    "op not understood": (lambda: {"backend": ForgetfulBackend()}, "to write the 256 elements"),
    "heads": (
        model_with(num_kv_heads=4),
        r"expected pages of shape \[pages, heads, tokens, elements\] = \[24, 4, 8, 16\]",
    ),
    "latents": (model_with(kv_lora_rank=8, qk_rope_head_dim=HEAD), "and no values. Serve this"),
    "shared pages": (
        model_with(kv_sharing_target_layer_name="x"),
        "found one that shares those of another layer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_a_text_and_the_worker_serves(name: str, make_worker) -> None:
    arguments, message = REFUSED[name]
    worker = make_worker(**arguments())
    assert worker.layout.layout is None
    assert re.search(message, worker.layout.refusal), worker.layout.refusal
    ended = worker.run(StoreJob(1, (PlacedChunk(TokenRange(0, 32)),), SOURCE[:1]))
    assert ended.results.jobs_ended == {1: 1} and not ended.results.failed_jobs
    ended = worker.run(StoreJob(2, (), SOURCE[:1], (STORED,)))
    assert ended.results.failed_jobs == {2}


def test_no_backend_is_refused(make_worker) -> None:
    worker = make_worker()
    vllm = worker.side._vllm_config
    side = WorkerSide(
        vllm,
        worker.side._kv_cache_config,
        worker_options(),
        extension=SegmentsWorker(vllm, SegmentOptions(), None),
    )
    side.register(worker.kv_caches)
    assert (
        "expected some whose rows of tokens can be addressed, or that"
        in side.describe().extras.refusal
    )
    side.shutdown()


def test_questions_are_not_compared_in_steps_that_are_computed_in_parts(make_worker) -> None:
    worker = make_worker()
    vllm = worker.side._vllm_config
    vllm.parallel_config.use_ubatching = True
    side = WorkerSide(
        vllm,
        worker.side._kv_cache_config,
        worker_options(),
        extension=SegmentsWorker(vllm, SegmentOptions(selector=Selector.QUESTION), SmallBackend()),
    )
    side.register(worker.kv_caches)
    described = side.describe().extras
    assert not described.refusal and "found microbatches" in described.probe_refusal
    side.shutdown()


def test_states_are_refused() -> None:
    from support.connector.small_workers import SmallWorker, deepseek_v4_like

    worker = SmallWorker(
        deepseek_v4_like,
        worker_options(),
        extension=SegmentsWorker(vllm_config(), SegmentOptions(), SmallBackend()),
    )
    refusal = worker.side.describe().extras.refusal
    worker.side.shutdown()
    assert "expected full or sliding-window attention with a row per token" in refusal


# Jobs.


@pytest.mark.parametrize("has_window", [False, True])
def test_segments_alone_are_stored_and_placed(has_window: bool, make_worker) -> None:
    worker = make_worker(has_window=has_window)
    worker.compute(3, STORED.token_ids, SOURCE)
    ended = worker.run(StoreJob(7, (), SOURCE, (STORED,)))
    assert ended.results.jobs_ended == {7: 1} and not ended.results.failed_jobs
    traffic = ended.results.traffic["store"]
    assert (traffic.num_bytes, traffic.transfers) == (33 * TOKEN_BYTES, 1) and traffic.seconds > 0

    expected = make_worker(has_window=has_window)
    expected.copy_pages(worker)
    expected.compute(5, STORED.token_ids, TARGET)
    ended = worker.run(load_of(PLACED))
    assert ended.loads == {"a"} and not ended.results.failed_loads and not ended.results.unreadable
    traffic = ended.results.traffic["load"]
    assert (traffic.num_bytes, traffic.transfers) == (33 * TOKEN_BYTES, 1) and traffic.seconds > 0
    for found, wanted in zip(worker.kv_caches.values(), expected.kv_caches.values(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


def test_segments_follow_what_is_exact(make_worker) -> None:
    """A request whose first pages are hit, and which has a segment behind them."""
    worker = make_worker()
    pages = worker.side.describe().layout
    planner = TransferPlanner(pages, worker_options().state_policy)
    worker.compute(0, TOKEN_IDS[:40], SOURCE)
    exact = TokenRange(0, 16)
    chunk = PlacedChunk(exact)
    first_free = chunk_bytes(pages, chunk, worker_options().state_policy)
    offset = first_free + -first_free % 64
    segment = SegmentRows(20, 38, offset, 18, 0, 0, TOKEN_IDS[20:38])
    stored = worker.run(StoreJob(1, (chunk,), SOURCE[:1], (segment,)))
    assert not stored.results.failed_jobs
    traffic = stored.results.traffic["store"]
    assert traffic.num_bytes == (16 + 18) * TOKEN_BYTES and traffic.seconds > 0

    wanted = make_worker()
    wanted.copy_pages(worker)
    for name, tensor in wanted.kv_caches.items():
        for page, other in ((3, 21), (9, 1)):
            tensor[other] = worker.kv_caches[name][page]
    plan = planner.plan_store([chunk], SOURCE[:1])
    placed = segment._replace(first_tokens=18, end_tokens=36, shift_tokens=-2, token_ids=())
    job = LoadJob("a", exact, (StoredChunk(plan.row_maps[0], 0),), TARGET[:1], extras=(placed,))
    ended = worker.run(job)
    assert ended.loads == {"a"} and not (ended.results.failed_loads or ended.results.unreadable)
    traffic = ended.results.traffic["load"]
    assert traffic.num_bytes == (16 + 18) * TOKEN_BYTES and traffic.seconds > 0
    for name, tensor in worker.kv_caches.items():
        assert torch.equal(tensor[[21, 1]], wanted.kv_caches[name][[21, 1]])
        assert not torch.equal(tensor[[20, 13]], wanted.kv_caches[name][[20, 13]])


def test_holes_that_cover_all_of_a_load_in_parts(stored: Worker) -> None:
    holes = (TokenRange(20, 40), TokenRange(0, 20))
    assert not stored.run(replace(load_of(PLACED), holes=holes)).results.failed_loads
    holes = (TokenRange(0, 20), TokenRange(21, 40))
    ended = stored.run(replace(load_of(PLACED), holes=holes))
    assert ended.results.failed_loads == {"a"}, "token 20 is nowhere"


def test_a_segment_that_does_not_fit_fails_the_job(stored: Worker) -> None:
    """The failed pages include the segment's pages, even if the exact part ends before them."""
    before = {name: tensor.clone() for name, tensor in stored.kv_caches.items()}
    null = (TablePart(0, (21, 1, 0, 13, 2)),)
    exact = TokenRange(0, 8)
    ended = stored.run(replace(load_of(PLACED, tables=null), tokens=exact, holes=(exact,)))
    assert ended.results.failed_loads == {"a"}
    assert ended.failed_pages == {21, 1, 13, 2}
    assert all(torch.equal(tensor, before[name]) for name, tensor in stored.kv_caches.items())
    ended = stored.run(StoreJob(8, (), null, (STORED,)))
    assert ended.results.failed_jobs == {8} and ended.results.extras is None


def test_a_second_registration_takes_the_tokens_where_they_are(stored: Worker) -> None:
    old = stored.kv_caches
    stored.kv_caches = {name: registered() for name in old}
    stored.side.register(stored.kv_caches)
    assert stored.layout.layout is not None
    before = {name: tensor.clone() for name, tensor in old.items()}
    assert not stored.run(load_of(PLACED)).results.failed_loads
    assert all(torch.equal(tensor, before[name]) for name, tensor in old.items())
    for tensor in stored.kv_caches.values():
        assert (tensor[[21, 1, 20, 13, 2]] != -7).any()


# Moves.


@pytest.mark.parametrize("staging_tokens", [1, 5, 7, 1000])
def test_segments_are_placed_at_other_positions(staging_tokens: int, make_worker) -> None:
    """Two texts change their order. Their first tokens stay out, and one text is used twice."""
    worker, wanted = make_worker(has_window=True), make_worker(has_window=True)
    mover, token_ids = worker.mover, TOKEN_IDS[:33]
    mover._max_tokens = staging_tokens
    worker.compute(3, token_ids, SOURCE)
    one = SegmentRows(3, 16, 64, 20, 2)
    other = SegmentRows(16, 36, 64 + mover.layout.num_bytes(20), 20, 0)
    assert mover.store([one, other], SOURCE) == 33 * TOKEN_BYTES
    wanted.copy_pages(worker)
    loads = []
    for segment, first_row, first, tokens in (
        *((other, 4, 17, slice(17, 33)), (one, 5, 36, slice(3, 13)), (one, 6, 47, slice(4, 6))),
    ):
        end = first + tokens.stop - tokens.start
        loads.append(
            SegmentRows(first, end, segment.offset_bytes, 20, first_row, first - 3 - tokens.start)
        )
        wanted.compute(first, token_ids, MOVED, only=tokens)
    assert mover.load(loads, MOVED) == 28 * TOKEN_BYTES
    for found, expected in zip(worker.kv_caches.values(), wanted.kv_caches.values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
        assert torch.equal(found[:, 1], expected[:, 1]), "values are copied bit by bit"


def test_staging_is_given_back_when_it_grows_and_at_the_end(make_worker) -> None:
    worker = make_worker(has_window=True)
    mover, made = worker.mover, []

    def make(num_bytes: int) -> Any:
        made.append(mock.Mock(tensor=torch.empty(num_bytes, dtype=torch.uint8)))
        return made[-1]

    mover._make_staging = make
    mover.store([SegmentRows(0, 30, 64, 30, 0)], SOURCE)
    assert not made, "a store needs none"
    for num_tokens in (3, 2, 20):
        mover.load([SegmentRows(17, 17 + num_tokens, 64, 30, 0, shift_tokens=5)], MOVED)
    assert [each.unmap.call_count for each in made] == [1, 0]
    for _ in range(2):
        mover.close()
        assert [each.unmap.call_count for each in made] == [1, 1]


def test_a_shift_of_zero_keeps_every_bit_and_only_named_rows_are_written(make_worker) -> None:
    worker = make_worker(has_window=True)
    mover, host = worker.mover, worker.mover._host
    for tensor in worker.kv_caches.values():
        tensor.view(torch.int32).random_(-(1 << 31), (1 << 31) - 1)
    rows = SegmentRows(3, 36, 128, 40, 5)
    host.fill_(0xA5)
    mover.store([rows], SOURCE)
    is_row = torch.zeros(len(host), dtype=torch.bool)
    for offset, row_bytes in zip(
        mover.layout.plane_offsets_bytes(40)[:-1], mover.layout.row_bytes, strict=True
    ):
        is_row[128 + offset + 5 * row_bytes : 128 + offset + 38 * row_bytes] = True
    assert (host[~is_row] == 0xA5).all() and not (host[is_row] == 0xA5).all()
    stored = host.clone()
    elsewhere = TablePart(0, (20, 21, 22, 23, 19)), TablePart(0, (13, 14, 15, 16, 17))
    mover.load([rows], elsewhere)
    host.fill_(0xA5)
    mover.store([rows], elsewhere)
    assert torch.equal(host, stored)


MISFITS: dict[str, tuple[dict[str, Any], tuple[TablePart, ...], str]] = {
    "no token": ({"end_tokens": 3}, SOURCE, "request: expected at least one token, found 3 to 2"),
    "before the request": ({"first_tokens": -1}, SOURCE, "at least one token, found -1 to 35"),
    "offset": ({"offset_bytes": 65}, SOURCE, "expected an offset in multiples of 64, found 65"),
    "offset below 0": ({"offset_bytes": -64}, SOURCE, "multiples of 64, found -64"),
    "rows behind the section": ({"section_rows": 37}, SOURCE, "the 37 of its section, found 5 to"),
    "rows before the section": ({"first_row": -1}, SOURCE, "the 40 of its section, found -1"),
    "end of host memory": ({"offset_bytes": 1 << 40}, SOURCE, "bytes of the host buffer, found "),
    "no table": ({}, SOURCE[:1], "expected a block table of every KV cache group, found 1 tables"),
    "a short table": (
        {"end_tokens": 60, "section_rows": 100},
        SOURCE,
        "block ids of KV cache group 0: expected pages 0 to 7, found 0 to 5",
    ),
    "a part that begins later": (
        {},
        (TablePart(1, (9, 4, 11, 7)), SOURCE[1]),
        "block ids of KV cache group 0: expected pages 0 to 4, found 1 to 5",
    ),
    "a null page": (
        {},
        (SOURCE[0], TablePart(0, (5, 12, 0, 10, 8))),
        "group 1: expected pages 1 to 23, found 0 for page 2 of the request, the null page",
    ),
    **{
        f"page {page}": (
            {},
            (TablePart(0, (3, 9, 4, page, 7)), SOURCE[1]),
            f"group 0: expected pages 1 to 23, found {page} for page 3 of the request.",
        )
        for page in (NUM_PAGES, -1)
    },
}


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused_before_a_byte_moves(
    name: str, direction: str, make_worker
) -> None:
    changes, tables, message = MISFITS[name]
    worker = make_worker(has_window=True)
    host = worker.mover._host
    host.random_(0, 255)
    before = [each.clone() for each in (host, *worker.kv_caches.values())]
    # The first of the two would be right.
    jobs = [SegmentRows(36, 38, 64, 40, 5), SegmentRows(3, 36, 64, 40, 5)._replace(**changes)]
    longer = tuple(TablePart(table.first_page, (*table.ids, 22)) for table in tables)
    with pytest.raises(SegmentError, match=re.escape(message)) as caught:
        getattr(worker.mover, direction)(jobs, longer)
    assert re.fullmatch(
        r"segment with tokens .* of the request.*: expected .*, found .*\. [A-Z].*\.",
        str(caught.value),
    )
    assert all(map(torch.equal, before, (host, *worker.kv_caches.values())))


# The check of keys.


def test_keys_of_small_chunks_are_checked_together(make_worker) -> None:
    """Each token occurs twice, in two chunks. Sections are in any order, with a gap before one."""
    worker, token_ids = make_worker(has_window=True), (*range(12), *range(10))
    worker.compute(3, token_ids, SOURCE)
    mover = worker.mover
    chunks = [
        SegmentRows(3 + first, 3 + end, offset, end - first, 0, 0, token_ids[first:end])
        for first, end, offset in ((0, 5, 4096), (5, 10, 64), (12, 22, 8192))
    ]
    mover.store(chunks, SOURCE)
    for chunk in chunks:
        assert mover.check_keys([chunk]) is None
    assert mover.check_keys(chunks) == ""
    swapped = [chunks[0]._replace(offset_bytes=64), chunks[1]._replace(offset_bytes=4096)]
    assert mover.check_keys([*swapped, chunks[2]])


def test_keys_are_checked_until_they_have_passed(make_worker) -> None:
    worker = make_worker()
    worker.compute(3, STORED.token_ids, SOURCE)
    few = STORED._replace(end_tokens=6, token_ids=STORED.token_ids[:3])
    jobs = [StoreJob(number, (), SOURCE, (rows,)) for number, rows in enumerate((few, STORED) * 2)]
    prompt = StoreJob(9, (PlacedChunk(TokenRange(0, 32)),), SOURCE[:1])
    found = [worker.run(job).results for job in (prompt, *jobs)]
    assert [results.extras and results.extras.key_checks for results in found] == [
        *(None, None, 1, None, None)
    ]
    assert not any(results.extras and results.extras.key_check_failure for results in found)


def shares(*is_stored: bool) -> SectionShare:
    """The share of a worker that stores some planes, by turns, and shares all of them."""
    return SectionShare(1, 0, 0, tuple(PlaneShare(1, 0, each, 0) for each in is_stored))


def test_what_another_worker_writes_is_checked_and_compared_in_pages(make_worker) -> None:
    """Host memory may not have it yet."""
    worker = make_worker(has_window=True)
    worker.compute(3, STORED.token_ids, SOURCE)
    mover = worker.mover
    mover._share = shares(True)
    digests = mover.digests([STORED], SOURCE)
    assert len({each.digest for each in digests}) == len(digests) == len(mover.pages.planes)
    mover._share = shares(False)
    host = mover._host
    host.random_(0, 255)
    before = host.clone()
    assert mover.store([STORED], SOURCE) == 0
    mover.after_store([STORED])
    assert mover.take_key_checks() == (1, "") and torch.equal(host, before)
    assert mover.digests([STORED], SOURCE) == digests
    for caches in worker.kv_caches.values():
        caches.mul_(2)
    assert all(
        one.digest != other.digest
        for one, other in zip(mover.digests([STORED], SOURCE), digests, strict=True)
    )


def test_of_a_store_that_two_workers_write_each_has_its_chunks(make_worker) -> None:
    worker = make_worker(has_window=True)
    worker.compute(3, STORED.token_ids, SOURCE)
    mover = worker.mover
    chunks = [
        SegmentRows(3 + first, 3 + first + 8, offset, 8, 0, 0, STORED.token_ids[first : first + 8])
        for first, offset in ((0, 0), (8, 64 * 101))
    ]
    written = []
    for share in (shares(True, False), shares(False, True), shares(True)):
        mover._share = share
        mover._host.zero_()
        num_bytes = mover.store(chunks, SOURCE)
        written.append((num_bytes, mover._host.clone()))
    sizes = [num_bytes for num_bytes, _ in written]
    assert sizes[0] == sizes[1] == sizes[2] // 2 > 0
    (_, first), (_, second), (_, both) = written
    assert torch.equal(first + second, both) and first.any() and second.any()


def test_keys_that_do_not_turn_are_reported_once(make_worker) -> None:
    worker = make_worker()
    worker.compute(3, STORED.token_ids, SOURCE, scale=0.02)
    results, again = (
        worker.run(StoreJob(number, (), SOURCE, (STORED,))).results for number in (1, 2)
    )
    assert not (results.extras.key_checks or results.failed_jobs)
    assert results.extras.key_check_failure.startswith("keys of the first layer, token ")
    assert again.extras is None


# Pages that are addressed by token, as on NPUs. They are in host memory here.


@pytest.fixture
def make_token_worker(
    make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Worker]:
    """A worker of a model whose layers register two tensors, with heads and elements of each."""

    def make(*sizes: tuple[int, int], **attributes: Any) -> Any:
        by_token = partial(build_layout, addressing=RowAddressing.TOKENS)
        monkeypatch.setattr(worker_side, "build_layout", by_token)
        rotary = RotaryEmbedding()
        return make_worker(
            model=small_model(rotary, rotary, **attributes),
            make_caches=lambda: tuple(torch.zeros(NUM_PAGES, BLOCK, *size) for size in sizes),
            num_kv_heads=sizes[0][0],
            head_size=sum(size[1] for size in sizes) // 2,
        )

    return make


@pytest.mark.parametrize("is_latent", [False, True])
def test_rows_of_tokens_are_stored_and_placed(is_latent: bool, make_token_worker) -> None:
    """The rotated tensor is the first one, or with latents the second one."""
    rank = {"kv_lora_rank": 24, "qk_rope_head_dim": HEAD} if is_latent else {}
    sizes = [(1, 24), (1, HEAD)] if is_latent else [(HEADS, HEAD)] * 2
    worker = make_token_worker(*sizes, **rank)
    assert worker.layout.refusal == ""
    of_token = [torch.randn(8, *size) for size in sizes]
    turning = int(is_latent)

    def rows_at(first: int) -> list[Any]:
        rows = [tensor[list(STORED.token_ids)] for tensor in of_token]
        positions = torch.arange(first, first + 33)
        rows[turning] = worker.rotary(positions, rows[turning], rows[turning])[1]
        return rows

    def places(table: TablePart, first: int) -> tuple[Any, Any]:
        positions = torch.arange(first, first + 33)
        return torch.tensor(table.ids)[positions // BLOCK], positions % BLOCK

    for both in worker.kv_caches.values():
        for tensor, rows in zip(both, rows_at(3), strict=True):
            tensor[places(SOURCE[0], 3)] = rows
    results = worker.run(StoreJob(7, (), SOURCE[:1], (STORED,))).results
    assert not results.failed_jobs and results.extras.key_checks == 1
    expected = [[tensor.clone() for tensor in both] for both in worker.kv_caches.values()]
    assert not worker.run(load_of(PLACED, tables=TARGET[:1])).results.failed_loads
    for both, wanted in zip(worker.kv_caches.values(), expected, strict=True):
        for tensor, rows in zip(wanted, rows_at(5), strict=True):
            tensor[places(TARGET[0], 5)] = rows
        torch.testing.assert_close(both[turning], wanted[turning], rtol=1e-5, atol=1e-5)
        assert torch.equal(both[1 - turning], wanted[1 - turning])


def test_rows_that_are_not_keys_and_values_are_refused(make_token_worker) -> None:
    refusal = make_token_worker((HEADS, 2 * HEAD), (HEADS, HEAD)).layout.refusal
    assert "expected rows of 128 bytes of float32 that are rotated, beside such" in refusal
    assert "found 256 bytes of float32, 128 bytes of float32" in refusal


# Pages of a GPU, shaped as FlashAttention shapes them. The streams are late.


def make_gpu_worker(make_worker: Callable[..., Worker], order: tuple[int, ...]) -> Worker:
    """A worker with pages of shape [pages, 2, tokens, heads, elements]; ``order`` is in memory."""
    rotary = RotaryEmbedding()
    shape = [(NUM_PAGES, 2, BLOCK, HEADS, HEAD)[axis] for axis in order]
    return make_worker(
        model=small_model(rotary, rotary),
        make_caches=lambda: on_gpu(torch.zeros(shape).permute(*map(order.index, range(5)))),
    )


@pytest.mark.parametrize("staged_tokens", [8, 1024])
def test_segments_are_stored_and_placed_on_a_gpu(
    staged_tokens: int, make_worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staging has room for some of the segment's tokens, or for all."""
    StandInGpu().install(monkeypatch)
    worker = make_gpu_worker(make_worker, (0, 1, 2, 3, 4))
    assert worker.layout.refusal == ""
    # Questions are compared on a GPU only if an option asks for it.
    assert "to compare questions with segments on cuda, found none" in worker.layout.probe_refusal
    worker.mover._max_tokens = staged_tokens
    of_token = torch.randn(8, 2, HEADS, HEAD)

    def write(kv_cache: torch.Tensor, table: TablePart, first: int) -> None:
        keys, values = of_token[list(STORED.token_ids)].unbind(1)
        positions = torch.arange(first, first + 33)
        pages, in_page = torch.tensor(table.ids)[positions // BLOCK], positions % BLOCK
        kv_cache[pages, 0, in_page] = worker.rotary(positions, keys, keys)[1]
        kv_cache[pages, 1, in_page] = values

    pages = [kv_cache.as_subclass(torch.Tensor) for kv_cache in worker.kv_caches.values()]
    for kv_cache in pages:
        write(kv_cache, SOURCE[0], 3)
    results = worker.run(StoreJob(7, (), SOURCE[:1], (STORED,))).results
    assert not results.failed_jobs
    expected = [kv_cache.clone() for kv_cache in pages]
    assert not worker.run(load_of(PLACED, tables=TARGET[:1])).results.failed_loads
    for kv_cache, wanted in zip(pages, expected, strict=True):
        write(wanted, TARGET[0], 5)
        torch.testing.assert_close(kv_cache[:, 0], wanted[:, 0], rtol=1e-5, atol=1e-5)
        assert torch.equal(kv_cache[:, 1], wanted[:, 1])


def test_keys_are_read_in_a_forward_also_on_the_default_stream_of_a_gpu(
    make_worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question is compared between the kernels of the model, on their stream."""
    gpu = StandInGpu()
    gpu.install(monkeypatch)
    worker = make_gpu_worker(make_worker, (0, 1, 2, 3, 4))
    (kv_cache, _) = (each.as_subclass(torch.Tensor) for each in worker.kv_caches.values())
    written = torch.randn(NUM_PAGES, 2, BLOCK, HEADS, HEAD)
    for stream in (gpu.current_stream(), torch.cuda.Stream()):
        kv_cache.zero_()
        with gpu.stream(stream):
            stream.enqueue(lambda: kv_cache.copy_(written))
            found = worker.mover.pages.read_plane(0, np.array([2 * BLOCK + 3, 17]))
        wanted = [written[2, 0, 3], written[17 // BLOCK, 0, 17 % BLOCK]]
        assert found.tobytes() == torch.stack(wanted).numpy().tobytes()


def test_pages_of_a_gpu_whose_heads_lie_apart_have_no_segments(
    make_worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such pages (HND) are stored and loaded without segments."""
    StandInGpu().install(monkeypatch)
    worker = make_gpu_worker(make_worker, (0, 1, 3, 2, 4))
    assert "expected rows of 128 bytes of float32 that are rotated" in worker.layout.refusal
    ended = worker.run(StoreJob(1, (PlacedChunk(TokenRange(0, 32)),), SOURCE[:1]))
    assert ended.results.jobs_ended == {1: 1} and not ended.results.failed_jobs
