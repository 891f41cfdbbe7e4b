# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Memory that CANN pins: what is asked of it, and what happens if it refuses."""

from __future__ import annotations

import platform
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_kvext.transfer.ascend.host_registration import is_registered, pin_host
from vllm_ascend_kvext.transfer.errors import BackendError

FIRST, NUM_BYTES = 1 << 20, 1 << 16


def memory(first: int = FIRST, num_bytes: int = NUM_BYTES) -> Any:
    return SimpleNamespace(data_ptr=lambda: first, numel=lambda: num_bytes)


class Runtime:
    """Stands for ``acl.rt``."""

    def __init__(self, code: int = 0) -> None:
        self._code = code
        self.calls: list[tuple[Any, ...]] = []

    def host_register_v2(self, *arguments: int) -> int:
        self.calls.append(("register", *arguments))
        return self._code

    def host_unregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return set_runtime(monkeypatch, Runtime())


def set_runtime(monkeypatch: pytest.MonkeyPatch, runtime: Any, release: str = "5.15.0-25") -> Any:
    monkeypatch.setitem(sys.modules, "acl", SimpleNamespace(rt=runtime))
    monkeypatch.setattr(platform, "release", lambda: release)
    return runtime


def test_memory_is_mapped_and_pinned_until_it_is_given_back(runtime: Runtime) -> None:
    assert not is_registered(memory())
    unpin = pin_host(memory())
    # ACL_HOST_REG_MAPPED and ACL_HOST_REG_PINNED of CANN's header.
    assert runtime.calls == [("register", FIRST, NUM_BYTES, 0x2 | 0x10000000)]
    assert is_registered(memory()) and is_registered(memory(FIRST + 64, NUM_BYTES - 64))
    assert not is_registered(memory(FIRST - 64)) and not is_registered(memory(FIRST + 64))
    unpin()
    assert runtime.calls[1:] == [("unregister", FIRST)]
    assert not is_registered(memory())


def test_another_thread_may_pin_memory_meanwhile(runtime: Runtime) -> None:
    """Segments get their staging memory in the thread of transfers. Stores ask in another one."""
    unpin = []

    class Address(int):
        """The address of memory that is looked up while other memory is being pinned."""

        def __ge__(self, other: int) -> bool:
            unpin.append(pin_host(memory(FIRST << len(unpin) + 1)))
            return int(self) >= other

    unpin.append(pin_host(memory()))
    try:
        assert not is_registered(memory(Address(FIRST // 2)))
        assert len(unpin) > 1
    finally:
        for each in unpin:
            each()


def test_a_refusal_is_an_error_and_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    set_runtime(monkeypatch, Runtime(107000))
    with pytest.raises(BackendError, match=r"error code 107000 .* for 65536 bytes"):
        pin_host(memory())
    assert not is_registered(memory())


@pytest.mark.parametrize("release", ["5.10.0-182.oe2203", "4.19.90", "unknown"])
def test_linux_that_pins_memory_of_cann_alone_is_refused(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = set_runtime(monkeypatch, Runtime(), release)
    with pytest.raises(BackendError, match=r"expected linux 5\.11 or later"):
        pin_host(memory())
    assert not runtime.calls


def test_cann_without_the_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_runtime(monkeypatch, SimpleNamespace())
    with pytest.raises(BackendError, match=r"CANN 8\.5 and later"):
        pin_host(memory())
    monkeypatch.setitem(sys.modules, "acl", None)
    with pytest.raises(BackendError, match="CANN's module acl"):
        pin_host(memory())
