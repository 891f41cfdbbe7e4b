# SPDX-License-Identifier: Apache-2.0
"""In which order an NPU is asked for what. That it keeps this order only hardware can show.

torch is imported when a test runs: the tests are collected where there is none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from support.connector.recording_npu import Device, RecordingNpu

from vllm_ascend_kvext.transfer.compute_fence import AscendFence, HostFence, fence_of
from vllm_ascend_kvext.transfer.errors import BackendError

NPU = Device("npu", 3)


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> RecordingNpu:
    torch = pytest.importorskip("torch")
    npu = RecordingNpu()
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    return npu


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_copies_wait_for_kernels_and_the_thread_for_copies(npu: RecordingNpu) -> None:
    fence = fence_of(NPU)
    took_s = []

    def copying() -> None:
        for recorded in (first, second):
            copy = lambda: npu.note(f"copy on {npu.current_stream().name}")  # noqa: E731
            took_s.append(fence.run(recorded, copy))

    first, second = fence.record(), fence.record()
    in_thread(copying)
    assert npu.calls == [
        "model: device 3",
        "model: record on compute",
        "model: device 3",
        "model: record on compute",
        "copying: set_device 3",
        "copying: copies 0 on 3 waits for compute",
        "copying: copy on copies 0 on 3",
        "copying: synchronize copies 0 on 3",
        "copying: copies 0 on 3 waits for compute",
        "copying: copy on copies 0 on 3",
        "copying: synchronize copies 0 on 3",
    ]
    assert npu.current_stream().name == "compute"
    assert took_s == [0.001, 0.001], "waiting for kernels does not count"


def test_each_thread_has_a_stream_of_its_own(npu: RecordingNpu) -> None:
    fence = AscendFence(NPU)
    fence.run(fence.record(), lambda: None)
    in_thread(lambda: fence.run(fence.record(), lambda: None))
    waits = [call for call in npu.calls if "waits" in call]
    assert waits == [
        "model: copies 0 on 3 waits for compute",
        "copying: copies 1 on 3 waits for compute",
    ]


def test_what_a_failed_copy_has_enqueued_is_waited_for(npu: RecordingNpu) -> None:
    fence = AscendFence(NPU)

    def fail() -> None:
        npu.note("copy")
        raise BackendError("507001")

    with pytest.raises(BackendError, match="507001"):
        fence.run(fence.record(), fail)
    assert npu.calls[-2:] == ["model: copy", "model: synchronize copies 0 on 3"]
    assert npu.current_stream().name == "compute"


def test_on_a_cpu_there_is_nothing_to_wait_for() -> None:
    fence = fence_of(Device("cpu", 0))
    assert isinstance(fence, HostFence)
    assert 0.01 <= fence.run(fence.record(), lambda: time.sleep(0.01)) < 5


def test_other_devices_are_refused() -> None:
    with pytest.raises(BackendError, match="expected pages on cpu or npu"):
        fence_of(Device("cuda", 0))
