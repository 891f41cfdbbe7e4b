# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The order of calls to an NPU and a GPU. Only hardware can show that the device keeps this order.

torch is imported when a test runs, so the tests can be collected without torch.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import pytest
from pytest_mock import MockerFixture

from vllm_ascend_kvext.transfer.accelerator.fence import StreamFence
from vllm_ascend_kvext.transfer.devices import transfers_on
from vllm_ascend_kvext.transfer.errors import BackendError


@dataclass
class Accelerator:
    """A device, and torch's module of it.

    All events of the module are one event, which was recorded a millisecond ago.
    """

    device: SimpleNamespace
    module: mock.MagicMock


@pytest.fixture(params=["npu", "cuda"])
def accelerator(
    request: pytest.FixtureRequest, mocker: MockerFixture, monkeypatch: pytest.MonkeyPatch
) -> Accelerator:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "hip", None)
    module = mocker.patch.object(torch, request.param, create=True)
    module.Event.return_value.elapsed_time.return_value = 1.0
    module.Stream.side_effect = lambda device: mocker.MagicMock()
    return Accelerator(SimpleNamespace(type=request.param, index=3), module)


def test_copies_wait_for_kernels_and_the_thread_for_copies(
    accelerator: Accelerator, mocker: MockerFixture
) -> None:
    calls = mock.Mock()
    module = accelerator.module
    module.Stream.side_effect = None
    calls.attach_mock(module.Stream.return_value, "stream")
    begin, end = mocker.MagicMock(), mocker.MagicMock()
    begin.elapsed_time.return_value = 1.0
    module.Event.side_effect = [recorded := mock.Mock(), begin, end]
    calls.attach_mock(begin.record, "begin")
    calls.attach_mock(end.record, "end")
    fence = transfers_on(accelerator.device.type).make_fence(accelerator.device)
    assert fence.record() is recorded
    recorded.record.assert_called_once_with(module.current_stream())
    module.device.assert_called_once_with(accelerator.device)
    assert fence.run(recorded, calls.copy) == 0.001, "the wait for kernels must not count"
    stream = module.Stream.return_value
    assert calls.mock_calls == [
        mock.call.stream.wait_event(recorded),
        mock.call.begin(stream),
        mock.call.copy(),
        mock.call.end(stream),
        mock.call.stream.synchronize(),
    ]
    begin.elapsed_time.assert_called_once_with(end)
    module.stream.assert_called_once_with(stream)


def test_each_thread_has_a_stream_of_its_own(accelerator: Accelerator) -> None:
    fence = StreamFence(accelerator.device)
    threads = [
        threading.Thread(target=lambda: [fence.run(None, lambda: None) for _ in range(2)])
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
        thread.join()
    one, same, other, _ = (call.args[0] for call in accelerator.module.stream.call_args_list)
    assert one is same and one is not other
    assert accelerator.module.set_device.mock_calls == [mock.call(accelerator.device)] * 2


def test_what_a_failed_copy_has_enqueued_is_waited_for(accelerator: Accelerator) -> None:
    with pytest.raises(BackendError, match="507001"):
        StreamFence(accelerator.device).run(None, mock.Mock(side_effect=BackendError("507001")))
    accelerator.module.stream.call_args.args[0].synchronize.assert_called_once_with()


def test_waiting_is_for_what_this_thread_has_enqueued(accelerator: Accelerator) -> None:
    """Copies are enqueued on the current stream of the pages' device, which may not be current."""
    calls = mock.Mock()
    module = accelerator.module
    module.device.return_value.__enter__.side_effect = lambda *_: calls.enter()
    module.device.return_value.__exit__.side_effect = lambda *_: calls.leave()
    calls.attach_mock(module.current_stream.return_value.synchronize, "synchronize")
    transfers_on(accelerator.device.type).make_fence(accelerator.device).wait()
    module.device.assert_called_once_with(accelerator.device)
    assert calls.mock_calls == [mock.call.enter(), mock.call.synchronize(), mock.call.leave()]


def test_on_a_cpu_there_is_nothing_to_wait_for() -> None:
    fence = transfers_on("cpu").make_fence(SimpleNamespace(type="cpu"))
    assert fence.record() is None
    fence.wait()
    assert 0.01 <= fence.run(fence.record(), lambda: time.sleep(0.01)) < 5


def test_other_devices_are_refused() -> None:
    with pytest.raises(BackendError, match="expected pages on cpu or npu or cuda, found some on x"):
        transfers_on("xpu")
