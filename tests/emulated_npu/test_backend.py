# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The device ``npu``: its memory, the calls that it refuses, and results equal to a CPU's."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch_npu
from support.scenarios import processes
from torch_npu import emulation
from torch_npu.kernels import kernel, like

from vllm_ascend_kvext.transfer.ascend.host_registration import pin_host
from vllm_ascend_kvext.transfer.errors import BackendError

SCRIPT = """
import torch
from torch_npu import emulation

torch.ones(8, device="npu").add_(1)
print(torch.npu.device_count(), "devices, late:", emulation.num_in_flight() > 0)
"""


@pytest.fixture(params=[None, 0, 3], ids=["synchronous", "seed 0", "seed 3"], autouse=True)
def schedule(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run every test on a synchronous device and on a late one."""
    emulation.set_seed(request.param)
    yield
    emulation.set_seed(None)


def on_npu(*sizes: int) -> torch.Tensor:
    return torch.arange(torch.Size(sizes).numel(), dtype=torch.float32, device="npu").view(sizes)


# --- the environment


@pytest.mark.parametrize("seed", ["", "3"])
@pytest.mark.parametrize("schedule", [None], indirect=True)
def test_a_process_obeys_its_environment(seed: str, tmp_path: Path) -> None:
    """It may be a copy of a process that has imported torch in another environment."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environ = {"EMULATED_NPU_DEVICES": "3", "EMULATED_NPU_SEED": seed}
    ended = processes.run(script, [], environ, processes.NPU)
    assert ended.exit_code == 0, ended.log
    assert ended.log.splitlines()[-1] == f"3 devices, late: {bool(seed)}"


# --- views and memory


def test_a_view_has_the_memory_of_its_base() -> None:
    base = on_npu(4, 6)
    base[1:3, ::2].mul_(10)
    base.t()[0] = -1
    base.view(-1).unfold(0, 2, 2)[0, 1] = 7
    expected = torch.arange(24.0).view(4, 6)
    expected[1:3, ::2].mul_(10)
    expected.t()[0] = -1
    expected.view(-1)[1] = 7
    assert base.tolist() == expected.tolist()
    assert base[2].data_ptr() == base.data_ptr() + 2 * 6 * 4


def test_bytes_have_other_types_and_storages_are_shared() -> None:
    raw = torch.zeros(64, dtype=torch.int8, device="npu")
    pages = raw.view(torch.float32).view(4, 4)
    pages[1] = 1.0
    again = torch.empty(0, device="npu").set_(raw.untyped_storage(), 4, (4,))
    assert again.tolist() == [1.0] * 4 and raw.view(torch.int32)[4].item() == 0x3F800000


def test_a_tensor_of_inference_mode_can_be_written_within() -> None:
    with torch.inference_mode():
        made = on_npu(2, 2)
        made[0].add_(1)
        part = made.view(-1)
        part += 1
    assert made.tolist() == [[2.0, 3.0], [3.0, 4.0]] and part.is_inference()


def test_a_result_grows_to_its_size() -> None:
    result = torch.empty(0, device="npu")
    torch.add(on_npu(2, 3), 1, out=result)
    assert result.shape == (2, 3) and result.sum().item() == 21
    result.resize_(4, 3)
    assert result.view(-1)[:6].tolist() == [1, 2, 3, 4, 5, 6]


def test_memory_is_counted_and_ends() -> None:
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    tensor = torch.empty(1 << 20, dtype=torch.int8, device="npu")
    assert torch.npu.memory_allocated() == before + (1 << 20)
    assert torch.npu.mem_get_info()[1] - torch.npu.mem_get_info()[0] == before + (1 << 20)
    del tensor
    assert torch.npu.memory_allocated() == before
    assert torch.npu.max_memory_allocated() == before + (1 << 20)
    with pytest.raises(RuntimeError, match="NPU out of memory"):
        torch.empty(1 << 40, dtype=torch.int8, device="npu")


def test_memory_that_the_process_has_mapped_is_pinned_while_it_is_registered() -> None:
    memory = torch.frombuffer(mmap.mmap(-1, 8192), dtype=torch.uint8)
    page = torch.arange(64, dtype=torch.uint8).to("npu")

    def copy() -> None:
        copies = [page.data_ptr()], [memory.data_ptr() + 4096], [64]
        arrays = [torch.tensor(each) for each in copies]  # The device reads them later.
        torch.ops._C_ascend.swap_blocks_batch(*arrays, 1)
        torch.npu.synchronize()

    with pytest.raises(RuntimeError, match="neither the device's nor pinned"):
        copy()
    unpin = pin_host(memory)
    with pytest.raises(BackendError, match="error code 107000"):
        pin_host(memory)
    copy()
    assert memory[4096:4160].tolist() == list(range(64))
    unpin()
    with pytest.raises(RuntimeError, match="neither the device's nor pinned"):
        copy()


def test_pinned_memory_is_known_by_its_address() -> None:
    pinned = torch.zeros(4, 4, pin_memory=True)
    assert pinned.is_pinned() and pinned[2:].is_pinned()
    assert not torch.zeros(4).is_pinned() and torch.zeros(4).pin_memory().is_pinned()
    with pytest.raises(RuntimeError, match="CPU tensors can be pinned"):
        torch.empty(4, device="npu", pin_memory=True)
    # A tensor that is filled at once is the device's, and pin_memory is ignored, as in torch_npu.
    for make, value in ((torch.zeros, 0), (torch.ones, 1)):
        filled = make(4, 2, dtype=torch.int32, device="npu", pin_memory=True)
        assert filled.device.type == "npu" and filled.cpu().unique().tolist() == [value]


# --- refusals


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "numpy": (lambda: on_npu(2).numpy(), "can't convert npu:0 device type tensor to numpy"),
    "two devices": (lambda: on_npu(2) + torch.ones(2), "two devices, npu:0 and cpu"),
    "two devices in place": (lambda: on_npu(2).mul_(torch.ones(2)), "two devices"),
    "two devices in a list": (lambda: torch.cat([on_npu(2), torch.ones(2)]), "two devices"),
    "host table, device index": (
        lambda: torch.ones(4)[torch.tensor([1, 2]).npu()],
        "two devices",
    ),
    "host table to write to": (
        lambda: torch.ones(4).index_put_((torch.tensor([1, 2]).npu(),), torch.ones(2)),
        "two devices",
    ),
    "host values": (
        lambda: on_npu(4).index_put_((torch.tensor([1, 2]).npu(),), torch.ones(2)),
        "two devices",
    ),
    "kernel": (
        lambda: kernel("npu_x", lambda a, b: None)(on_npu(2), torch.ones(2)),
        "npu_x: expected tensors on npu",
    ),
    "no such device": (lambda: torch.empty(2, device="npu:7"), "invalid device"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_device_refuses_is_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises((RuntimeError, TypeError, NotImplementedError), match=message):
        call()
        torch.npu.synchronize()


def test_an_operator_that_is_missing_has_its_name_in_the_error() -> None:
    with pytest.raises(AttributeError, match=r"torch_npu\.npu_unheard_of is not emulated"):
        torch_npu.npu_unheard_of(on_npu(2))
    with pytest.raises(AttributeError, match="npu_unheard_of"):
        torch.ops._C_ascend.npu_unheard_of(on_npu(2))


def test_a_number_of_the_host_is_taken() -> None:
    assert (on_npu(2) * torch.tensor(2.0) + 1).tolist() == [1.0, 3.0]
    assert (torch.ones(2, dtype=torch.float16, device="npu") * 2.5).dtype == torch.float16
    assert on_npu(3)[torch.tensor([2, 0])].tolist() == [2.0, 0.0]


# --- as on a CPU


COMPUTED: dict[str, Callable[[torch.Tensor], object]] = {
    "several results": lambda x: [one.tolist() for one in x.max(1)] + [x.sort(1)[1].tolist()],
    "a mask": lambda x: x[x > 3].tolist(),
    "nonzero": lambda x: x.nonzero().tolist(),
    "lists": lambda x: torch.cat([x, x.flip(0)]).split([1, 3])[1].tolist(),
    "indices": lambda x: x.index_put(
        (torch.zeros(1, dtype=torch.long, device=x.device),), x[1]
    ).tolist(),
    "in place": lambda x: (
        x.clone().masked_fill_(x < 2, -1.0).scatter_(0, x.long()[:1] % 2, 9.0).tolist()
    ),
    "types": lambda x: x.to(torch.bfloat16).float().mean(0, dtype=torch.float64).tolist(),
    "composed": lambda x: torch.nn.functional.softmax(x @ x.t(), -1).sum(-1).round().tolist(),
    "numbers": lambda x: (x.sum().item(), bool((x == x).all()), torch.equal(x, x + 1)),
    "unique": lambda x: [one.tolist() for one in (x % 2).unique(return_counts=True)],
    "repeated": lambda x: x.repeat_interleave(torch.tensor([1, 2], device=x.device), 0).tolist(),
    "complex": lambda x: torch.view_as_real(torch.polar(x, x)).round(decimals=3).tolist(),
    "empty": lambda x: (x[:0] @ x.t()).shape,
}


@pytest.mark.parametrize("name", COMPUTED)
def test_operators_of_torch_give_what_a_cpu_gives(name: str) -> None:
    assert COMPUTED[name](on_npu(2, 3)) == COMPUTED[name](torch.arange(6.0).view(2, 3))


def test_a_kernels_body_gets_the_values_of_the_call_and_the_memory_of_its_run() -> None:
    seen = []

    def body(page: torch.Tensor, lengths: torch.Tensor, names: list[str]) -> torch.Tensor:
        seen.append((lengths.tolist(), names))
        return page[: int(lengths.sum())] * 2

    launch = kernel("npu_y", body, lambda call: [((3,), call.page.dtype)], on_host=["lengths"])
    page = on_npu(4)
    lengths = torch.tensor([1, 2])
    names = ["a"]
    page.add_(1)
    result = launch(page, lengths, names)
    lengths.zero_()
    names.append("b")
    assert result.tolist() == [2.0, 4.0, 6.0]
    assert seen == [([1, 2], ["a"])]


def test_a_kernel_that_returns_other_shapes_than_it_said_is_an_error() -> None:
    launch = kernel("npu_z", lambda x: x[:1], lambda call: [((2,), call.x.dtype)])
    with pytest.raises(RuntimeError, match="npu_z"):
        launch(on_npu(2))
        torch.npu.synchronize()


def test_a_default_device_of_the_thread_that_waits_does_not_matter() -> None:
    launch = kernel("npu_w", lambda x: torch.arange(2.0) + x, like("x"))
    with torch.device("npu"):
        result = launch(on_npu(2))
        assert result.tolist() == [0.0, 2.0]


def test_a_device_is_current_for_a_while() -> None:
    code = """
import torch, torch_npu
assert torch.npu.device_count() == 2
with torch.npu.device(1):
    made = torch.ones(2, device="npu")
assert (made.device.index, torch.npu.current_device()) == (1, 0)
assert (made + 1).device.index == 1
try: made + torch.ones(2, device="npu:0")
except RuntimeError as error: assert "npu:1 and npu:0" in str(error), error
else: raise AssertionError
"""
    environment = {"EMULATED_NPU_DEVICES": "2", "EMULATED_NPU_SEED": "4"}
    subprocess.run([sys.executable, "-I", "-c", code], env=environment, check=True)
