# SPDX-License-Identifier: Apache-2.0
"""The compiled module is found, needs only numpy at run time, and moves bytes."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import HealthCheck, given, settings
from support.transfer.cases import TransferCase, TransferMemory, assert_same, cases

import vllm_ascend_kvext
from vllm_ascend_kvext.native import native


def test_it_says_what_it_is() -> None:
    described = native().describe()
    assert described["version"] == vllm_ascend_kvext.__version__
    assert described["instruction_sets"][-1] == "memcpy"
    assert described["kernel"] == described["instruction_sets"][0]


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
