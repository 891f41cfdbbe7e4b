# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Graphs of the emulated NPU: what a capture records and refuses, and what a replay does when.

A *hazard* is a program that is wrong on a device, as in ``test_streams.py``. Each is run under many
seeds, as it is and corrected.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch_npu
from torch_npu import emulation
from torch_npu.kernels import kernel
from torch_npu.npu import graphs

SEEDS = range(60)
NUMBERS = 64
FROM_DEVICE = 1
"""A direction of batched copies."""


@pytest.fixture(autouse=True)
def synchronous_again() -> Iterator[None]:
    yield
    emulation.set_seed(None)


def numbers(value: float) -> torch.Tensor:
    return torch.full((NUMBERS,), value, device="npu")


def is_all(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor.cpu() == value).all())


def captured(
    work: Callable[[], Any], pool: graphs.Pool | None = None
) -> tuple[graphs.NPUGraph, Any]:
    """A graph of some work, and what the work has returned."""
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, pool=pool):
        found = work()
    return graph, found


def under_seeds(program: Callable[[], bool]) -> set[bool]:
    """Whether the program was right, under all seeds."""
    outcomes = set()
    for seed in SEEDS:
        emulation.set_seed(seed)
        try:
            outcomes.add(program())
        finally:
            torch.npu.synchronize()
    return outcomes


# --- what is recorded


@pytest.mark.parametrize("seed", [None, 3])
def test_work_runs_at_each_replay_and_not_in_the_capture(seed: int | None) -> None:
    emulation.set_seed(seed)
    source, sums = numbers(1.0), numbers(0.0)

    def work() -> torch.Tensor:
        sums.add_(source)
        return (source + 1) * 2

    graph, result = captured(work)
    assert is_all(sums, 0.0)
    before = emulation.num_replays()
    for number in (3.0, 5.0):
        source.fill_(number)
        graph.replay()
        assert is_all(result, (number + 1) * 2)
    assert is_all(sums, 8.0)
    assert emulation.num_replays() == before + 2


def test_pinned_memory_is_read_at_each_replay() -> None:
    host = torch.ones(NUMBERS, pin_memory=True)
    page = numbers(0.0)
    graph, _ = captured(lambda: page.copy_(host, non_blocking=True))
    host.fill_(4.0)
    graph.replay()
    assert is_all(page, 4.0)


def test_a_kernel_is_recorded_with_the_values_of_its_call() -> None:
    page = numbers(0.0)
    add = kernel("add", lambda tensor, values: tensor.add_(sum(values)))
    values = [1, 2]
    graph, _ = captured(lambda: add(page, values))
    values[0] = 10
    graph.replay()
    graph.replay()
    assert is_all(page, 6.0)


def test_only_streams_of_the_capture_are_recorded() -> None:
    page, other_page = numbers(0.0), numbers(0.0)
    other = torch.npu.Stream()

    def work() -> None:
        page.add_(1)
        with torch.npu.stream(other):
            other_page.add_(1)
        assert torch.npu.is_current_stream_capturing()

    graph, _ = captured(work)
    assert not torch.npu.is_current_stream_capturing()
    other.synchronize()
    assert is_all(page, 0.0) and is_all(other_page, 1.0)
    graph.replay()
    assert is_all(page, 1.0) and is_all(other_page, 1.0)


def test_a_stream_that_waits_for_the_capture_is_captured_and_late() -> None:
    first, second, joined = (numbers(0.0) for _ in range(3))
    other = torch.npu.Stream()

    def work(is_joined_late: bool) -> None:
        stream = torch.npu.current_stream()
        first.add_(1)
        other.wait_stream(stream)
        with torch.npu.stream(other):
            second.copy_(first)
            second.mul_(10)
        if is_joined_late:
            joined.copy_(second)
        stream.wait_stream(other)
        if not is_joined_late:
            joined.copy_(second)

    for is_joined_late in (False, True):
        first.zero_()
        second.zero_()
        graph, _ = captured(partial(work, is_joined_late))

        def program(graph: graphs.NPUGraph = graph) -> bool:
            first.fill_(6.0)
            second.fill_(1.0)
            graph.replay()
            return is_all(joined, 70.0) and is_all(second, 70.0)

        assert under_seeds(program) == ({True, False} if is_joined_late else {True})


# --- what is refused


def host_copy(page: torch.Tensor) -> None:
    page.cpu()


def batched_copy(page: torch.Tensor) -> None:
    host = torch.zeros(NUMBERS, pin_memory=True)
    addresses = [torch.tensor([one.data_ptr()]) for one in (page, host)]
    size = torch.tensor([page.nbytes])
    torch.ops._C_ascend.swap_blocks_batch(*addresses, size, FROM_DEVICE)


REFUSED: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "item": (lambda page: page[0].item(), "waits for its stream"),
    "copy to the host": (host_copy, "waits for its stream"),
    "copy from the host": (lambda page: page.copy_(torch.ones(NUMBERS)), "waits for its stream"),
    "late copy of memory that is not pinned": (
        lambda page: page.copy_(torch.ones(NUMBERS), non_blocking=True),
        "waits for its stream",
    ),
    "shape of values": (lambda page: page.nonzero(), "waits for its stream"),
    "mask": (lambda page: page[page > 0], "waits for its stream"),
    "synchronize": (lambda _: torch.npu.current_stream().synchronize(), "waits for its stream"),
    "synchronize the device": (lambda _: torch.npu.synchronize(), "waits for the device"),
    "synchronize an event": (
        lambda _: torch.npu.current_stream().record_event().synchronize(),
        "the host waits for it",
    ),
    "query": (lambda _: torch.npu.current_stream().query(), "is done"),
    "an event from outside": (
        lambda _: torch.npu.current_stream().wait_stream(torch.npu.Stream()),
        "recorded outside of the capture",
    ),
    "batched copy": (batched_copy, "swap_blocks_batch"),
    "replay": (lambda _: WITHOUT_WORK.replay(), "a graph is replayed"),
}
WITHOUT_WORK, _ = captured(lambda: None)


@pytest.mark.parametrize("seed", [None, 0], ids=["synchronous", "late"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_capture_cannot_record_is_refused_and_ends_it(name: str, seed: int | None) -> None:
    emulation.set_seed(seed)
    page = numbers(1.0)
    do, message = REFUSED[name]
    graph = torch.npu.NPUGraph()
    with (
        pytest.raises(RuntimeError, match="the capture is not valid"),
        torch.npu.graph(graph),
        pytest.raises(RuntimeError, match=f"not permitted during a capture.*{message}"),
    ):
        do(page)
    with pytest.raises(RuntimeError, match="was not captured"):
        graph.replay()
    assert is_all(page, 1.0)
    graph, result = captured(lambda: page + 1)  # The next capture is not concerned.
    graph.replay()
    assert is_all(result, 2.0)


def test_work_of_another_stream_that_is_not_joined_is_refused() -> None:
    page = numbers(1.0)
    other = torch.npu.Stream()

    def work() -> None:
        other.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(other):
            page.add_(1)

    with pytest.raises(RuntimeError, match=r"another stream that .* does not wait for: aten::add_"):
        captured(work)


def test_an_event_of_a_capture_is_of_no_use_outside() -> None:
    _, event = captured(lambda: torch.npu.current_stream().record_event())
    for use in (event.synchronize, event.query, event.wait):
        with pytest.raises(RuntimeError, match="recorded in a capture"):
            use()


def test_the_default_stream_and_a_captured_graph_cannot_be_captured() -> None:
    with pytest.raises(RuntimeError, match="another stream than the default one"):
        torch.npu.NPUGraph().capture_begin()
    graph, _ = captured(lambda: None)
    with pytest.raises(RuntimeError, match="can be reset"), torch.npu.graph(graph):
        pass
    graph.reset()
    with pytest.raises(RuntimeError, match="was not captured"):
        graph.replay()
    with torch.npu.graph(graph):
        page = numbers(2.0)
    graph.replay()
    assert is_all(page, 2.0)


# --- memory


def test_memory_belongs_to_the_graph_and_is_not_given_away() -> None:
    before = torch.npu.memory_allocated()
    source = torch.ones(1 << 18, device="npu")
    num_bytes = source.nbytes

    def work() -> torch.Tensor:
        between = source + 1
        return between * 2

    graph, result = captured(work)
    assert torch.npu.memory_allocated() == before + 3 * num_bytes
    weak = torch_npu._C._weak_ref_tensor(result)
    del result
    assert torch.npu.memory_allocated() == before + 3 * num_bytes
    graph.replay()
    assert is_all(weak, 4.0)
    del weak
    graph.reset()
    assert torch.npu.memory_allocated() == before + num_bytes


def test_memory_that_a_capture_has_dropped_is_poisoned_where_another_tensor_may_get_it() -> None:
    weak: list[torch.Tensor] = []

    def work(is_next_allocated: bool) -> Any:
        page = numbers(7.0)
        weak.append(torch_npu._C._weak_ref_tensor(page))
        del page
        return numbers(8.0) if is_next_allocated else None

    for is_next_allocated in (False, True):
        graph, _ = captured(partial(work, is_next_allocated))
        graph.replay()
        assert is_all(weak[-1], 7.0) is not is_next_allocated
        assert bool(weak[-1].isnan().all()) is is_next_allocated


def test_fresh_memory_of_a_graph_is_poisoned_at_each_replay() -> None:
    page: list[torch.Tensor] = []

    def work() -> torch.Tensor:
        page.append(torch.empty(NUMBERS, device="npu"))
        before = page[0] + 1
        page[0].fill_(1.0)
        return before

    graph, before = captured(work)
    for _ in range(2):
        graph.replay()
        assert before.isnan().all() and is_all(page[0], 1.0)


@pytest.mark.parametrize("is_shared", [True, False])
def test_graphs_of_a_pool_overwrite_each_other_and_others_do_not(is_shared: bool) -> None:
    pool = torch.npu.graph_pool_handle()
    pools = (pool, pool if is_shared else torch.npu.graph_pool_handle())
    first, kept = captured(lambda: (numbers(1.0) + 1, numbers(3.0)), pools[0])
    dropped = torch_npu._C._weak_ref_tensor(kept[1])
    kept = kept[0]
    second, of_second = captured(lambda: numbers(5.0), pools[1])
    first.replay()
    second.replay()
    # The second graph could get what was dropped before its capture, and only that.
    assert is_all(kept, 2.0) and is_all(of_second, 5.0)
    assert bool(dropped.isnan().all()) is is_shared
    # What the first graph computes with may be the second one's memory.
    first.replay()
    assert is_all(kept, 2.0) and is_all(dropped, 3.0)
    assert is_all(of_second, 5.0) is not is_shared


# --- order


def test_replays_are_work_of_the_replaying_stream() -> None:
    page, copy, flag = (numbers(0.0) for _ in range(3))
    graph, _ = captured(lambda: page.add_(flag).mul_(2))
    other = torch.npu.Stream()

    def program(is_ordered: bool) -> bool:
        page.fill_(1.0)
        flag.fill_(2.0)
        graph.replay()
        if is_ordered:
            other.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(other):
            copy.copy_(page)
        other.synchronize()
        return is_all(copy, 6.0)

    assert under_seeds(partial(program, True)) == {True}
    assert under_seeds(partial(program, False)) == {True, False}


def test_a_replay_begins_after_the_one_before_on_whatever_stream() -> None:
    page = numbers(0.0)
    graph, _ = captured(lambda: page.mul_(2).add_(1))
    streams = [torch.npu.Stream() for _ in range(3)]

    def program() -> bool:
        page.zero_()
        torch.npu.synchronize()
        for number in (0, 1, 2, 0):
            with torch.npu.stream(streams[number]):
                graph.replay()
        torch.npu.synchronize()
        return is_all(page, 15.0)

    assert under_seeds(program) == {True}


def test_a_random_program_does_what_it_does_without_graphs() -> None:
    """Programs of captured pieces on two streams, against their numbers on a host."""
    pages = [numbers(0.0) for _ in range(4)]
    other = torch.npu.Stream()
    pieces = []
    rng = random.Random(0)
    for _ in range(6):
        steps = [(rng.randrange(4), rng.randrange(4), rng.randrange(1, 4)) for _ in range(5)]
        pieces.append((steps, captured(partial(run_steps, pages, steps))[0]))
    for seed in SEEDS:
        rng = random.Random(seed)
        emulation.set_seed(seed)
        expected = [float(rng.randrange(9)) for _ in pages]
        for page, value in zip(pages, expected, strict=True):
            page.fill_(value)
        for _ in range(8):
            steps, graph = rng.choice(pieces)
            stream = rng.choice((torch.npu.default_stream(), other))
            stream.wait_stream(other if stream != other else torch.npu.default_stream())
            with torch.npu.stream(stream):
                graph.replay()
                has_eager_work = rng.random() < 0.5
                if has_eager_work:
                    pages[0].remainder_(1000)
            for target, source, factor in steps:
                expected[target] = (expected[source] * factor + 1) % 4096
            if has_eager_work:
                expected[0] %= 1000
        torch.npu.synchronize()
        assert [page[0].item() for page in pages] == expected, seed


def run_steps(pages: list[torch.Tensor], steps: list[tuple[int, int, int]]) -> None:
    for target, source, factor in steps:
        pages[target].copy_((pages[source] * factor + 1).remainder_(4096))


# --- task groups, updates and external events


class Updated:
    """A graph that adds a number of the host to a page. The number is a task group's.

    Args:
        waits: Whether the graph waits for an external event before the group.
    """

    def __init__(self, page: torch.Tensor, waits: bool) -> None:
        self.page = page
        self.event = torch.npu.ExternalEvent()
        self.update_stream = torch.npu.Stream()
        self.add = kernel("add a number", lambda tensor, number: tensor.add_(number))
        self.graph, self.handle = captured(partial(self._work, waits))

    def _work(self, waits: bool) -> Any:
        stream = torch.npu.current_stream()
        self.page.mul_(2)
        if waits:
            self.event.wait(stream)
            self.event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        self.add(self.page, 1000)
        handle = torch.npu.graph_task_group_end(stream)
        self.page.mul_(10)
        return handle

    def update(self, number: int, how_often: int = 1) -> None:
        with torch.npu.stream(self.update_stream):
            torch.npu.graph_task_update_begin(self.update_stream, self.handle)
            for _ in range(how_often):
                self.add(self.page, number)
            torch.npu.graph_task_update_end(self.update_stream)
            self.event.record(self.update_stream)


@pytest.mark.parametrize("waits", [True, False])
def test_an_update_is_late_and_an_external_event_orders_it(waits: bool) -> None:
    page = numbers(0.0)
    updated = Updated(page, waits)

    def program() -> bool:
        rights = []
        for number in (1, 2, 3):
            torch.npu.synchronize()  # The event's reset has run, as vLLM-Ascend waits for.
            page.fill_(4.0)
            updated.graph.replay()
            updated.update(number)
            rights.append(is_all(page, (8.0 + number) * 10))
        return all(rights)

    assert under_seeds(program) == ({True} if waits else {True, False})


def test_an_event_that_is_recorded_before_the_reset_is_lost() -> None:
    """So vLLM-Ascend waits for the replay before."""
    page = numbers(0.0)
    updated = Updated(page, waits=True)
    outcomes = set()
    for seed in SEEDS:
        emulation.set_seed(seed)
        page.fill_(1.0)
        for number in (1, 2):
            updated.graph.replay()
            updated.update(number)
        try:
            outcomes.add(is_all(page, ((2.0 + 1) * 10 * 2 + 2) * 10))
        except RuntimeError as error:
            outcomes.add(str(error).partition(" (seed")[0])
            updated.event.record(updated.update_stream)
            torch.npu.synchronize()
    assert "npu: nothing can run, and somebody waits" in outcomes and True in outcomes


def test_a_replay_without_seed_waits_for_its_update() -> None:
    page = numbers(1.0)
    updated = Updated(page, waits=True)
    updated.graph.replay()
    assert emulation.num_in_flight() > 0
    assert torch_npu._emulator.alias(page)[0].item() == 2.0
    with pytest.raises(RuntimeError, match="nothing can run"):
        torch.npu.synchronize()
    updated.update(3)
    assert emulation.num_in_flight() == 0
    assert is_all(page, 50.0)
    updated.update(4)
    updated.graph.replay()
    assert is_all(page, 1040.0)


def test_an_update_has_work_of_the_same_kinds() -> None:
    updated = Updated(numbers(1.0), waits=False)
    with pytest.raises(RuntimeError, match="2 tasks instead of 1"):
        updated.update(3, how_often=2)
    with torch.npu.stream(updated.update_stream):
        torch.npu.graph_task_update_begin(updated.update_stream, updated.handle)
        updated.page.add_(1)
        with pytest.raises(RuntimeError, match="or others"):
            torch.npu.graph_task_update_end(updated.update_stream)
    updated.page.fill_(1.0)
    updated.graph.replay()
    assert is_all(updated.page, 10020.0)


def test_groups_and_updates_are_where_they_can_be() -> None:
    stream = torch.npu.Stream()
    with pytest.raises(RuntimeError, match="a stream that is not captured"):
        torch.npu.graph_task_group_begin(stream)
    updated = Updated(numbers(1.0), waits=False)

    def update_in_capture() -> None:
        torch.npu.graph_task_update_begin(torch.npu.current_stream(), updated.handle)

    with pytest.raises(RuntimeError, match="a stream that is captured"):
        captured(update_in_capture)
    with pytest.raises(RuntimeError, match="ends in a task group"):
        captured(lambda: torch.npu.graph_task_group_begin(torch.npu.current_stream()))


def test_the_device_can_be_waited_for_during_an_update() -> None:
    updated = Updated(numbers(1.0), waits=False)
    with torch.npu.stream(updated.update_stream):
        torch.npu.graph_task_update_begin(updated.update_stream, updated.handle)
        torch.npu.synchronize()
        with pytest.raises(RuntimeError, match="not permitted during an update"):
            updated.update_stream.synchronize()
        updated.add(updated.page, 5)
        torch.npu.graph_task_update_end(updated.update_stream)
    updated.graph.replay()
    assert is_all(updated.page, 70.0)


def test_an_error_in_a_replay_has_the_operators_name() -> None:
    def fails(tensor: torch.Tensor) -> None:
        raise ValueError("no such row")

    launch = kernel("npu_that_fails", fails)
    page = numbers(1.0)
    graph, _ = captured(lambda: launch(page))
    for seed in (None, 5):
        emulation.set_seed(seed)
        with pytest.raises(RuntimeError, match=r"npu_that_fails.*no such row"):
            graph.replay()
            torch.npu.synchronize()
        torch.npu.synchronize()  # once
