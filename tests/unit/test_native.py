# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The compiled module is found, needs only numpy at run time, and moves bytes."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from support.transfer.cases import TransferCase, TransferMemory, assert_same, cases

import vllm_ascend_kvext
from vllm_ascend_kvext.native import native


def test_it_says_what_it_is() -> None:
    described = native().describe()
    assert described["version"] == vllm_ascend_kvext.__version__
    assert described["instruction_sets"][-1] == "memcpy"
    assert described["kernel"] == described["instruction_sets"][0]
    assert described["rotation_kernels"][-1] == "plain"
    assert described["rotation_kernel"] == described["rotation_kernels"][0]


ASKED_FOR = {
    "x86_64": ("flags", {"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"}),
    "aarch64": ("Features", {"asimd", "sve"}),
}
"""By the machine's name: the list in ``/proc/cpuinfo``, and the features that the compiled module
asks for."""


def flags_of_the_cpu(name: str) -> set[str] | None:
    """What the kernel of the system says of the CPU, for programs; None if it does not say it.

    An emulator of user programs shows the file of the machine on which it runs.
    """
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return set(value.split())
    return None


@pytest.mark.skipif(platform.machine() not in ASKED_FOR, reason="the list of flags is not known")
def test_it_uses_what_the_cpu_can_do() -> None:
    """A compiler without a library for the CPU's features once lost all fast paths in silence."""
    name, asked_for = ASKED_FOR[platform.machine()]
    flags = flags_of_the_cpu(name)
    if flags is None:
        pytest.skip(f"/proc/cpuinfo has no {name}")
    described = native().describe()
    assert set(described["cpu_features"]) == flags & asked_for
    copies, rotations = ["memcpy"], ["plain"]
    if "avx2" in flags:
        copies = ["avx2", "avx2, longer turns", *copies]
        if "fma" in flags:
            rotations = ["avx2", *rotations]
    if {"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
        rotations = ["avx512", *rotations]
    assert sorted(described["instruction_sets"]) == sorted(copies)
    assert described["rotation_kernels"] == rotations


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(cases(max_page_bytes=2000))
def test_it_moves_bytes(case: TransferCase) -> None:
    memory = TransferMemory.random(case)
    expected = memory.after(case)
    native().page_transfer(*memory.descriptors(case))
    assert_same(memory.snapshot(), expected)


def test_without_numpy_the_descriptors_say_so() -> None:
    script = """
import sys
sys.modules["numpy"] = None
import vllm_ascend_kvext.transfer
from vllm_ascend_kvext import _native
_native.describe()
import vllm_ascend_kvext.transfer.schema
"""
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert finished.stderr.count("line 7, in <module>") == 1  # All lines before it succeeded.
    assert "import of numpy halted" in finished.stderr.splitlines()[-1]
