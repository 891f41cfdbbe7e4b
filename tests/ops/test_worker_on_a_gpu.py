# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A whole worker on a stand-in of a GPU, whose streams do their work as late as they may."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from support.connector.small_workers import (  # noqa: E402
    TOKENS,
    SmallWorker,
    deepseek_v4_like,
    same,
    single_group,
)
from support.connector.worker_configs import worker_options  # noqa: E402
from support.layout.truth import LayoutFixture  # noqa: E402
from support.transfer.stand_in_gpu import StandInGpu, on_gpu  # noqa: E402

from vllm_ascend_kvext.transfer.accelerator import dma  # noqa: E402


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> StandInGpu:
    gpu = StandInGpu()
    gpu.install(monkeypatch)
    return gpu


@pytest.fixture(params=[single_group, deepseek_v4_like], ids=lambda make: make.__name__)
def worker(request: pytest.FixtureRequest, gpu: StandInGpu) -> Iterator[SmallWorker]:
    def make() -> LayoutFixture:
        pages = request.param()
        caches = {name: on_gpu(tensor) for name, tensor in pages.kv_caches.items()}
        return replace(pages, kv_caches=caches)

    worker = SmallWorker(make, worker_options(allow_cuda=True))
    yield worker
    worker.side.shutdown()


def compute(gpu: StandInGpu, worker: SmallWorker, kernel: Callable[[], None]) -> None:
    """Enqueue a kernel between the beginning and the end of a forward."""
    gpu.current_stream().enqueue(kernel)
    worker.side.end_of_forward()


def test_a_store_has_what_the_kernels_before_it_wrote(gpu: StandInGpu, worker: SmallWorker) -> None:
    written = []

    def kernel() -> None:
        worker.pages.fill(seed=5)
        written.extend(worker.page_bytes())

    worker.begin(worker.job, has_forward=True)
    compute(gpu, worker, kernel)
    worker.wait_for(1)
    worker.pages.fill(seed=6)
    target = worker.tables_of(TOKENS, first_page=30)
    worker.run(worker.load(tables=target))
    assert written and same(worker.page_bytes(target), written)
    assert gpu.num_batches == 2


def test_a_load_waits_for_kernels_that_still_use_its_pages(
    gpu: StandInGpu, worker: SmallWorker
) -> None:
    content = worker.page_bytes()
    worker.run(worker.job)
    gpu.current_stream().enqueue(lambda: worker.pages.fill(seed=6))
    worker.run(worker.load())
    # A kernel that the load has not waited for writes now.
    gpu.current_stream().synchronize()
    assert same(worker.page_bytes(), content)


def test_pages_that_return_after_a_reset_are_served_and_told_once(
    gpu: StandInGpu, worker: SmallWorker, caplog: pytest.LogCaptureFixture
) -> None:
    content = worker.page_bytes()
    worker.run(worker.job)
    worker.side.register(worker.pages.kv_caches)
    worker.pages.fill(seed=6)
    worker.run(worker.load())
    assert same(worker.page_bytes(), content)
    assert "allow_cuda" not in caplog.text


def test_copies_in_several_calls_are_the_same_copies(
    gpu: StandInGpu, worker: SmallWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dma, "MAX_COPIES_PER_CALL", 5)
    content = worker.page_bytes()
    worker.run(worker.job)
    worker.pages.fill(seed=6)
    worker.run(worker.load())
    assert same(worker.page_bytes(), content)
    assert gpu.num_batches > 2


def test_a_load_that_the_gpu_refuses_fails_and_the_next_one_does_not(
    gpu: StandInGpu, worker: SmallWorker
) -> None:
    content = worker.page_bytes()
    worker.run(worker.job)

    def refuse() -> None:
        raise RuntimeError("cuMemcpyBatchAsync failed at index 3 with error 1")

    gpu.fails = refuse
    worker.run(worker.load())
    assert worker.results.failed_loads == {"a"} and worker.failed_pages
    gpu.fails = lambda: None
    worker.pages.fill(seed=6)
    worker.run(worker.load(request_id="b"))
    assert same(worker.page_bytes(), content)
    assert worker.results.failed_loads == {"a"}
