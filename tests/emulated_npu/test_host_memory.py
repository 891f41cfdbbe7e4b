# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What workers on an NPU really take for their host memory, and that copies of the device reach it.

The emulated NPU pins powers of two where torch asks it, as torch_npu does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401  # The device.
from torch_npu import _emulator

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from host_memory_taken import measure
from support.connector.small_workers import deepseek_v4_like
from support.connector.worker_configs import vllm_config, worker_options

from vllm_ascend_kvext.connector.worker.extension import WorkerExtension
from vllm_ascend_kvext.connector.worker.host_buffer import HostBuffer, why_torch_pins
from vllm_ascend_kvext.connector.worker.worker_side import WorkerSide
from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.transfer.ascend import host_registration

NPU = torch.device("npu")
NUM_BYTES = (72 << 20) + 64
"""A little more than a power of two."""


@pytest.fixture(autouse=True)
def nothing_stays_registered() -> Iterator[None]:
    yield
    assert not host_registration._REGISTERED


def can_copy(host: torch.Tensor) -> bool:
    """Whether the device copies to the first and the last 64 bytes of host memory."""
    page = torch.arange(64, dtype=torch.uint8).to("npu")
    ends = host.data_ptr(), host.data_ptr() + host.numel() - 64
    arrays = [torch.tensor(each) for each in ([page.data_ptr()] * 2, ends, [64] * 2)]
    try:
        torch.ops._C_ascend.swap_blocks_batch(*arrays, 1)
        torch.npu.synchronize()
    except RuntimeError:
        return False
    return host[:64].tolist() == host[-64:].tolist() == list(range(64))


def test_the_device_copies_to_all_of_it_until_it_is_given_back() -> None:
    assert why_torch_pins("npu") is None
    buffer = HostBuffer.allocate(NUM_BYTES, NPU)
    assert buffer.num_bytes == NUM_BYTES and can_copy(buffer.tensor)
    buffer.unmap()
    assert not can_copy(buffer.tensor)


@pytest.mark.parametrize(
    ("kind", "num_workers"), [("apart", 1), ("apart", 2), ("shared", 2), ("torch", 1)]
)
def test_workers_take_what_was_asked_for(kind: str, num_workers: int, record_property: Any) -> None:
    """Where torch pins the memory instead, it takes 16 parts for 9."""
    found = measure("npu", kind, NUM_BYTES, num_workers)
    record_property("taken, shmem", (found.taken, found.shmem))
    if kind == "torch":
        assert found.taken > 1.7
    else:
        assert 0.95 < found.taken <= 1.05 and abs(found.left) < 0.1


def test_cann_that_refuses_leaves_memory_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_emulator, "register_host", lambda *_: 107000)
    assert "error code 107000" in (why_torch_pins("npu") or "")
    buffer = HostBuffer.allocate(NUM_BYTES, NPU)
    assert buffer.tensor.is_pinned() and can_copy(buffer.tensor)
    buffer.unmap()


def test_a_worker_gives_it_back_at_its_end_and_after_a_failed_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start() -> WorkerSide:
        pages = deepseek_v4_like()
        side = WorkerSide(vllm_config(), pages.config, worker_options())
        side.register({name: tensor.to("npu") for name, tensor in pages.kv_caches.items()})
        return side

    side = start()
    assert len(host_registration._REGISTERED) == 1
    side.shutdown()
    assert not host_registration._REGISTERED

    def refuse(*_: Any) -> None:
        assert len(host_registration._REGISTERED) == 1
        raise SettingsError("no such folder")

    monkeypatch.setattr(WorkerExtension, "register", refuse)
    with pytest.raises(SettingsError, match="no such folder"):
        start()
    assert not host_registration._REGISTERED
