# SPDX-License-Identifier: Apache-2.0
"""A worker's jobs with segments: what is moved, checked, refused and reported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

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
from support.connector.worker_configs import (  # noqa: E402
    CompilationConfig,
    ModelConfig,
    Options,
    VllmConfig,
)
from support.layout.fakes import FullAttentionSpec, SlidingWindowSpec, config  # noqa: E402

from vllm_ascend_kvext.blending.segment_rows import SegmentRows  # noqa: E402
from vllm_ascend_kvext.connector import loaded_models, worker_side  # noqa: E402
from vllm_ascend_kvext.connector.messages import (  # noqa: E402
    JobResults,
    LoadJob,
    StepJobs,
    StoreJob,
    WorkerLayout,
)
from vllm_ascend_kvext.connector.worker_side import EndedJobs, WorkerSide  # noqa: E402
from vllm_ascend_kvext.layout.build import build_layout  # noqa: E402
from vllm_ascend_kvext.layout.model import RowAddressing  # noqa: E402
from vllm_ascend_kvext.layout.planner import TransferPlanner  # noqa: E402
from vllm_ascend_kvext.layout.row_map import StoredChunk  # noqa: E402
from vllm_ascend_kvext.layout.rows import TokenRange  # noqa: E402
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk, TablePart  # noqa: E402

WINDOW = 20
TOKEN_BYTES = 2 * 2 * HEADS * HEAD * 4
TOKEN_IDS = tuple(int(i) for i in torch.randint(0, 6, (64,), generator=torch.manual_seed(0)))
"""Few of them, so that most occur again."""


class Worker:
    """A worker of a model with two layers: one group, or one of full attention and a window."""

    def __init__(
        self,
        *,
        has_window: bool = False,
        is_known: bool = True,
        model: Any = None,
        backend: Any = None,
        options: Options | None = None,
        model_name: str = "some/model",
    ) -> None:
        self.rotary = RotaryEmbedding()
        self.model = model or small_model(self.rotary, self.rotary)
        modules = attention_of(self.model)
        self.names = list(modules)
        sizes = {
            "block_size": BLOCK,
            "num_kv_heads": HEADS,
            "head_size": HEAD,
            "dtype": torch.float32,
        }
        full, window = FullAttentionSpec(**sizes), SlidingWindowSpec(sliding_window=WINDOW, **sizes)
        groups = [(full, *self.names)]
        if has_window:
            groups = [(full, self.names[0]), (window, self.names[1])]
        self.group_of_layer = [0, 1 if has_window else 0]
        self.kv_caches = {name: registered() for name in self.names}
        if is_known:
            loaded_models.remember(self.model)
        self.backend = backend or SmallBackend()
        self.side = WorkerSide(
            VllmConfig(
                compilation_config=CompilationConfig(modules),
                model_config=ModelConfig(model=model_name),
            ),
            config(NUM_PAGES, *groups),
            options or Options(blending=True),
            cpu_backend=self.backend,
        )
        self.side.register(self.kv_caches)
        self.results = JobResults()

    @property
    def layout(self) -> WorkerLayout:
        return self.side.describe()

    def compute(
        self,
        first: int,
        token_ids: tuple[int, ...],
        tables: tuple[TablePart, ...],
        scale: float = 0,
    ) -> None:
        """As a forward would, in the first layer; other layers add what stands before.

        Args:
            scale: Keys are scaled behind the rotation by one plus this much per element.
        """
        of_token = torch.randn((8, 2, HEADS, HEAD), generator=torch.manual_seed(1))
        positions = torch.arange(first, first + len(token_ids))
        for layer, (name, tensor) in enumerate(self.kv_caches.items()):
            table = tables[self.group_of_layer[layer]]
            ids = torch.tensor(table.ids)[positions // BLOCK - table.first_page]
            keys, values = of_token[list(token_ids)].unbind(1)
            if layer:
                keys, values = keys.cumsum(0), values.cumsum(0)
            _, keys = self.rotary(positions, keys, keys.clone())
            keys = keys * (1 + scale * torch.arange(HEAD))
            slots = ids * BLOCK + positions % BLOCK
            self.backend.write_rows(keys, values, *self.backend.caches_of(name, tensor), slots)

    def run(self, *jobs: StoreJob | LoadJob) -> EndedJobs:
        """To their end."""
        stores = tuple(job for job in jobs if isinstance(job, StoreJob))
        loads = tuple(job for job in jobs if isinstance(job, LoadJob))
        self.side.begin_step(StepJobs(stores=stores, loads=loads))
        ended: list[EndedJobs] = []
        found = JobResults()
        names: set[str] = set()
        pages: set[int] = set()

        def all_ended() -> bool:
            ended.append(self.side.end_step())
            found.add(ended[-1].results)
            names.update(ended[-1].loads)
            pages.update(ended[-1].failed_pages)
            return len(found.stores_ended) + len(names) == len(jobs)

        until(all_ended)
        return EndedJobs(frozenset(names), frozenset(pages), found)


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
STORED = SegmentRows(3, 36, 64, 40, 5, 0, TOKEN_IDS[:33])
PLACED = STORED._replace(first_tokens=5, end_tokens=38, shift_tokens=2, token_ids=())


def load_of(*segments: SegmentRows, tables: tuple[TablePart, ...] = TARGET) -> LoadJob:
    tokens = TokenRange(0, 40)
    return LoadJob("a", tokens, (), tables, (tokens,), segments=segments)


# What a worker says


def test_a_worker_says_how_tokens_lie(make_worker) -> None:
    layout = make_worker().layout
    assert layout.segment_refusal == "" and layout.segments is not None
    assert layout.segments.row_bytes == (HEADS * HEAD * 4,) * 4
    assert layout.segments.window_tokens == 0
    assert (
        len(layout.segments.fingerprint) == 64 and layout.segments.fingerprint != layout.fingerprint
    )


def test_a_window_is_told(make_worker) -> None:
    assert make_worker(has_window=True).layout.segments.window_tokens == WINDOW


def test_a_window_of_a_group_that_keeps_all_is_told(make_worker) -> None:
    """vLLM without its hybrid manager: full attention to the scheduler, a window to the kernel."""
    rotary = RotaryEmbedding()
    layout = make_worker(model=small_model(rotary, rotary, sliding_window=33)).layout
    assert layout.segments.window_tokens == 33


def test_nothing_is_made_without_being_asked_for(make_worker) -> None:
    layout = make_worker(options=Options()).layout
    assert layout.segments is None and layout.segment_refusal == ""


def test_what_makes_another_fingerprint(make_worker) -> None:
    one, other = make_worker(), make_worker()
    assert one.layout.segments == other.layout.segments
    far = RotaryEmbedding(500_000.0)
    turning = make_worker(model=small_model(far, far))
    named = make_worker(model_name="another/model")
    found = {each.layout.segments.fingerprint for each in (one, turning, named)}
    assert len(found) == 3


class RaisingBackend(SmallBackend):
    def write_rows(self, *arguments: Any) -> None:
        raise RuntimeError("no such kernel")


class ForgetfulBackend(SmallBackend):
    """Writes no values."""

    def write_rows(self, keys, values, key_cache, value_cache, slots) -> None:
        super().write_rows(
            keys, value_cache[:1, :, 0] * 0 + values * 0, key_cache, value_cache, slots
        )


def no_rotation() -> Any:
    return small_model(RotaryEmbedding(), None)


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "model not known": (lambda: {"is_known": False}, "a model that vLLM's own loader has loaded"),
    "no rotary module": (
        lambda: {"model": no_rotation()},
        "found none: keys of this layer",
    ),
    "op fails": (lambda: {"backend": RaisingBackend()}, "RuntimeError: no such kernel. Serve this"),
    "op not understood": (
        lambda: {"backend": ForgetfulBackend()},
        "to write the 256 elements",
    ),
    "heads": (
        lambda: {"model": small_model(RotaryEmbedding(), RotaryEmbedding(), num_kv_heads=4)},
        r"expected pages of shape \[pages, heads, tokens, elements\] = \[24, 4, 8, 16\]",
    ),
    "latents": (
        lambda: {
            "model": small_model(
                RotaryEmbedding(), RotaryEmbedding(), kv_lora_rank=8, qk_rope_head_dim=HEAD
            )
        },
        "and no values. Serve this model without blending",
    ),
    "shared pages": (
        lambda: {
            "model": small_model(
                RotaryEmbedding(), RotaryEmbedding(), kv_sharing_target_layer_name="x"
            )
        },
        "found one that shares those of another layer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_a_text_and_the_worker_serves(name: str, make_worker) -> None:
    arguments, message = REFUSED[name]
    worker = make_worker(**arguments())
    assert worker.layout.segments is None
    assert re.search(message, worker.layout.segment_refusal), worker.layout.segment_refusal
    ended = worker.run(StoreJob(1, (PlacedChunk(TokenRange(0, 32)),), SOURCE[:1]))
    assert ended.results.stores_ended == {1: 1} and not ended.results.failed_stores
    ended = worker.run(StoreJob(2, (), SOURCE[:1], (STORED,)))
    assert ended.results.failed_stores == {2}


def test_no_backend_is_refused(make_worker) -> None:
    worker = make_worker()
    side = WorkerSide(
        worker.side._vllm_config, worker.side._kv_cache_config, Options(blending=True)
    )
    side.register(worker.kv_caches)
    assert (
        "expected some whose rows of tokens can be addressed, or that"
        in side.describe().segment_refusal
    )
    side.shutdown()


def test_states_are_refused() -> None:
    from support.connector.small_workers import SmallWorker, deepseek_v4_like

    worker = SmallWorker(deepseek_v4_like, Options(blending=True), cpu_backend=SmallBackend())
    refusal = worker.side.describe().segment_refusal
    worker.side.shutdown()
    assert "expected full or sliding-window attention with a row per token" in refusal


# Jobs


@pytest.mark.parametrize("has_window", [False, True])
def test_segments_alone_are_stored_and_placed(has_window: bool, make_worker) -> None:
    worker = make_worker(has_window=has_window)
    worker.compute(3, STORED.token_ids, SOURCE)
    ended = worker.run(StoreJob(7, (), SOURCE, (STORED,)))
    assert ended.results.stores_ended == {7: 1} and not ended.results.failed_stores
    traffic = ended.results.traffic["store"]
    assert (traffic.num_bytes, traffic.transfers) == (33 * TOKEN_BYTES, 1) and traffic.seconds > 0

    expected = make_worker(has_window=has_window)
    for mine, theirs in zip(expected.kv_caches.values(), worker.kv_caches.values(), strict=True):
        mine.copy_(theirs)
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
    planner = TransferPlanner(worker.layout.layout, Options().state_policy)
    worker.compute(0, TOKEN_IDS[:40], SOURCE)
    exact = TokenRange(0, 16)
    chunk = PlacedChunk(exact)
    first_free = planner.chunk_bytes(exact)
    offset = first_free + -first_free % 64
    segment = SegmentRows(20, 38, offset, 18, 0, 0, TOKEN_IDS[20:38])
    stored = worker.run(StoreJob(1, (chunk,), SOURCE[:1], (segment,)))
    assert not stored.results.failed_stores
    assert stored.results.traffic["store"].num_bytes == (16 + 18) * TOKEN_BYTES

    wanted = make_worker()
    for mine, theirs in zip(wanted.kv_caches.values(), worker.kv_caches.values(), strict=True):
        mine.copy_(theirs)
    for name, tensor in wanted.kv_caches.items():
        for page, other in ((3, 21), (9, 1)):
            tensor[other] = worker.kv_caches[name][page]
    plan = planner.plan_store([chunk], SOURCE[:1])
    placed = segment._replace(first_tokens=18, end_tokens=36, shift_tokens=-2, token_ids=())
    job = LoadJob("a", exact, (StoredChunk(plan.row_maps[0], 0),), TARGET[:1], segments=(placed,))
    ended = worker.run(job)
    assert not ended.results.failed_loads
    assert ended.results.traffic["load"].num_bytes == (16 + 18) * TOKEN_BYTES
    for name, tensor in worker.kv_caches.items():
        assert torch.equal(tensor[[21, 1]], wanted.kv_caches[name][[21, 1]])
        assert not torch.equal(tensor[[20, 13]], wanted.kv_caches[name][[20, 13]])


def test_holes_that_cover_all_of_a_load_in_parts(make_worker) -> None:
    worker = make_worker()
    worker.compute(3, STORED.token_ids, SOURCE)
    worker.run(StoreJob(7, (), SOURCE, (STORED,)))
    holes = (TokenRange(20, 40), TokenRange(0, 20))
    ended = worker.run(replace(load_of(PLACED), holes=holes))
    assert not ended.results.failed_loads
    ended = worker.run(replace(load_of(PLACED), holes=(TokenRange(0, 20), TokenRange(21, 40))))
    assert ended.results.failed_loads == {"a"}, "token 20 is nowhere"


def test_a_segment_that_does_not_fit_fails_the_job(make_worker) -> None:
    worker = make_worker()
    worker.compute(3, STORED.token_ids, SOURCE)
    worker.run(StoreJob(7, (), SOURCE, (STORED,)))
    before = {name: tensor.clone() for name, tensor in worker.kv_caches.items()}
    null = (TablePart(0, (21, 1, 0, 13, 2)),)
    ended = worker.run(load_of(PLACED, tables=null))
    assert ended.results.failed_loads == {"a"}
    assert ended.failed_pages == {21, 1, 13, 2}
    assert all(torch.equal(tensor, before[name]) for name, tensor in worker.kv_caches.items())
    ended = worker.run(StoreJob(8, (), null, (STORED,)))
    assert ended.results.failed_stores == {8} and not ended.results.key_checks


def test_pages_of_segments_are_among_those_that_failed(make_worker) -> None:
    """Also where the exact part of the load ends before them."""
    worker = make_worker()
    tokens = TokenRange(0, 8)
    job = LoadJob("a", tokens, (), TARGET, (tokens,), segments=(PLACED._replace(offset_bytes=1),))
    ended = worker.run(job)
    assert ended.results.failed_loads == {"a"}
    assert ended.failed_pages == {21, 1, 20, 13, 2}


def test_a_second_registration_takes_the_tokens_where_they_are(make_worker) -> None:
    worker = make_worker()
    worker.compute(3, STORED.token_ids, SOURCE)
    worker.run(StoreJob(7, (), SOURCE, (STORED,)))
    old = worker.kv_caches
    worker.kv_caches = {name: registered() for name in old}
    worker.side.register(worker.kv_caches)
    assert worker.layout.segments is not None
    before = {name: tensor.clone() for name, tensor in old.items()}
    assert not worker.run(load_of(PLACED)).results.failed_loads
    assert all(torch.equal(tensor, before[name]) for name, tensor in old.items())
    for tensor in worker.kv_caches.values():
        assert (tensor[[21, 1, 20, 13, 2]] != -7).any()


# The check of keys


def test_keys_are_checked_until_they_have_passed(make_worker) -> None:
    worker = make_worker()
    worker.compute(3, STORED.token_ids, SOURCE)
    few = STORED._replace(end_tokens=6, token_ids=STORED.token_ids[:3])
    found = [
        worker.run(StoreJob(number, (), SOURCE, (rows,))).results
        for number, rows in enumerate((few, STORED, STORED))
    ]
    assert [results.key_checks for results in found] == [0, 1, 0]
    assert not any(results.key_check_failure for results in found)


def test_keys_that_do_not_turn_are_reported(make_worker) -> None:
    worker = make_worker()
    worker.compute(3, STORED.token_ids, SOURCE, scale=0.02)
    results = worker.run(StoreJob(1, (), SOURCE, (STORED,))).results
    assert results.key_checks == 0 and not results.failed_stores
    assert results.key_check_failure.startswith("keys of the first layer, token ")
    again = worker.run(StoreJob(2, (), SOURCE, (STORED,))).results
    assert again.key_checks == 0 and not again.key_check_failure


def test_loads_and_stores_without_segments_check_nothing(make_worker) -> None:
    worker = make_worker()
    results = worker.run(StoreJob(1, (PlacedChunk(TokenRange(0, 32)),), SOURCE[:1])).results
    assert results.key_checks == 0 and not results.key_check_failure


# Pages that are addressed by token, as on NPUs; here in host memory.


class TokenWorker:
    """A worker whose layers register keys and values, or latents and what is rotated of them.

    Args:
        sizes: Heads and elements of a head, of both tensors.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *sizes: tuple[int, int], **attributes: Any):
        rotary = RotaryEmbedding()
        self.model = small_model(rotary, rotary, **attributes)
        loaded_models.remember(self.model)
        modules = attention_of(self.model)
        self.kv_caches = {
            name: tuple(torch.zeros(NUM_PAGES, BLOCK, *size) for size in sizes) for name in modules
        }
        spec = FullAttentionSpec(
            block_size=BLOCK,
            num_kv_heads=sizes[0][0],
            head_size=sum(size[1] for size in sizes) // 2,
            dtype=torch.float32,
        )
        self.rotary = rotary
        by_token = partial(build_layout, addressing=RowAddressing.TOKENS)
        monkeypatch.setattr(worker_side, "build_layout", by_token)
        self.side = WorkerSide(
            VllmConfig(compilation_config=CompilationConfig(modules)),
            config(NUM_PAGES, (spec, *modules)),
            Options(blending=True),
        )
        self.side.register(self.kv_caches)

    run = Worker.run


@pytest.mark.parametrize("is_latent", [False, True])
def test_rows_of_tokens_are_stored_and_placed(
    is_latent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is rotated is the first tensor, or of latents the second."""
    loaded_models.forget_all()
    rank = {"kv_lora_rank": 24, "qk_rope_head_dim": HEAD} if is_latent else {}
    sizes = [(1, 24), (1, HEAD)] if is_latent else [(HEADS, HEAD)] * 2
    worker = TokenWorker(monkeypatch, *sizes, **rank)
    assert worker.side.describe().segment_refusal == ""
    of_token = [torch.randn(8, *size) for size in sizes]
    turning = int(is_latent)

    def rows_at(first: int) -> list[Any]:
        rows = [tensor[list(STORED.token_ids)] for tensor in of_token]
        positions = torch.arange(first, first + 33)
        rows[turning] = worker.rotary(positions, rows[turning], rows[turning])[1]
        return rows

    def rows_in(table: TablePart, first: int) -> list[list[Any]]:
        positions = torch.arange(first, first + 33)
        ids = torch.tensor(table.ids)[positions // BLOCK]
        return [
            [tensor[ids, positions % BLOCK] for tensor in both]
            for both in worker.kv_caches.values()
        ]

    positions = torch.arange(3, 36)
    ids = torch.tensor(SOURCE[0].ids)[positions // BLOCK]
    for both in worker.kv_caches.values():
        for tensor, rows in zip(both, rows_at(3), strict=True):
            tensor[ids, positions % BLOCK] = rows
    results = worker.run(StoreJob(7, (), SOURCE[:1], (STORED,))).results
    assert not results.failed_stores and results.key_checks == 1
    assert not worker.run(load_of(PLACED, tables=TARGET[:1])).results.failed_loads
    for found in rows_in(TARGET[0], 5):
        for got, wanted in zip(found, rows_at(5), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        copied = found[1 - turning]
        assert torch.equal(copied, rows_at(5)[1 - turning])
    worker.side.shutdown()
    loaded_models.forget_all()


def test_rows_that_are_not_keys_and_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded_models.forget_all()
    worker = TokenWorker(monkeypatch, (HEADS, 2 * HEAD), (HEADS, HEAD))
    refusal = worker.side.describe().segment_refusal
    worker.side.shutdown()
    loaded_models.forget_all()
    assert "expected rows of 128 bytes of float32 that are rotated, beside such" in refusal
    assert "found 256 bytes of float32, 128 bytes of float32" in refusal
