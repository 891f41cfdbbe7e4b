# SPDX-License-Identifier: Apache-2.0
"""The order of calls to an NPU. Only hardware can show that the NPU keeps this order.

torch is imported when a test runs, so the tests can be collected without torch.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
from pytest_mock import MockerFixture

from vllm_ascend_kvext.transfer.ascend.fence import AscendFence
from vllm_ascend_kvext.transfer.devices import transfers_on
from vllm_ascend_kvext.transfer.errors import BackendError

NPU = SimpleNamespace(type="npu", index=3)


@pytest.fixture
def npu(mocker: MockerFixture) -> mock.MagicMock:
    """`torch.npu`. All of its events are one event that was recorded a millisecond ago."""
    pytest.importorskip("torch")
    npu = mocker.patch("torch.npu", create=True)
    npu.Event.return_value.elapsed_time.return_value = 1.0
    npu.Stream.side_effect = lambda device: mocker.MagicMock()
    return npu


def test_copies_wait_for_kernels_and_the_thread_for_copies(
    npu: mock.MagicMock, mocker: MockerFixture
) -> None:
    calls = mock.Mock()
    npu.Stream.side_effect = None
    calls.attach_mock(npu.Stream.return_value, "stream")
    begin, end = mocker.MagicMock(), mocker.MagicMock()
    begin.elapsed_time.return_value = 1.0
    npu.Event.side_effect = [recorded := mock.Mock(), begin, end]
    calls.attach_mock(begin.record, "begin")
    calls.attach_mock(end.record, "end")
    fence = transfers_on("npu").make_fence(NPU)
    assert fence.record() is recorded
    recorded.record.assert_called_once_with(npu.current_stream())
    npu.device.assert_called_once_with(NPU)
    assert fence.run(recorded, calls.copy) == 0.001, "the wait for kernels must not count"
    stream = npu.Stream.return_value
    assert calls.mock_calls == [
        mock.call.stream.wait_event(recorded),
        mock.call.begin(stream),
        mock.call.copy(),
        mock.call.end(stream),
        mock.call.stream.synchronize(),
    ]
    begin.elapsed_time.assert_called_once_with(end)
    npu.stream.assert_called_once_with(stream)


def test_each_thread_has_a_stream_of_its_own(npu: mock.MagicMock) -> None:
    fence = AscendFence(NPU)
    threads = [
        threading.Thread(target=lambda: [fence.run(None, lambda: None) for _ in range(2)])
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
        thread.join()
    one, same, other, _ = (call.args[0] for call in npu.stream.call_args_list)
    assert one is same and one is not other
    assert npu.set_device.mock_calls == [mock.call(NPU)] * 2


def test_what_a_failed_copy_has_enqueued_is_waited_for(npu: mock.MagicMock) -> None:
    with pytest.raises(BackendError, match="507001"):
        AscendFence(NPU).run(None, mock.Mock(side_effect=BackendError("507001")))
    npu.stream.call_args.args[0].synchronize.assert_called_once_with()


def test_on_a_cpu_there_is_nothing_to_wait_for() -> None:
    fence = transfers_on("cpu").make_fence(SimpleNamespace(type="cpu"))
    assert fence.record() is None
    assert 0.01 <= fence.run(fence.record(), lambda: time.sleep(0.01)) < 5


def test_other_devices_are_refused() -> None:
    with pytest.raises(BackendError, match="expected pages on cpu or npu"):
        transfers_on("cuda")
