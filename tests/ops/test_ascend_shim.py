# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The shim stops what the hardware does not allow: what the kernel is checked against."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
from support.transfer.ascend_shim import Shim, compile_shim

MISUSES = {
    1: "InitBuffer of 196608 bytes with 196096",
    2: "InitBuffer of 33 bytes, not a multiple of 32",
    3: "AllocTensor with all 2 buffers in use",
    4: "DeQue of an empty queue",
    5: "ends with a tensor in use",
    6: "DataCopyPad on a tensor that is not the queue's to drain",
    7: "DataCopyPad on a tensor that is not the queue's to fill",
    8: "DataCopyPad on a tensor that is not the queue's to drain",
    9: "begins at byte 16, not on a data block",
    10: "33 bytes at byte 224 of a tensor of 256",
    11: "257 bytes at byte 0 of a tensor of 256",
    12: "byte 8 of a tensor is written out, but nothing was read into it",
    13: "blockLen 0, expected 1 to 2097151",
    14: "the shim knows single blocks only",
    15: "blockLen 2097152, expected 1 to 2097151",
    16: "read of 240 bytes at .* is not inside a registered region",
    17: "only reads",
    18: "written twice",
    19: "8 bytes of a tensor of 7",
    20: "scalar read at .*, not a multiple of 8",
    21: "no padding",
    22: "EnQue on a tensor that is not the queue's to fill",
}


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    kernel = Path(__file__).with_name("ascend_misuse.cpp")
    return Shim.load(compile_shim(tmp_path_factory.mktemp("misuse"), kernel=kernel))


@pytest.mark.parametrize("which", MISUSES)
def test_misuse_ends_the_run_with_a_message(shim: Shim, which: int) -> None:
    # Aligned, so that the misaligned scalar read is the one at fault.
    source, destination = np.zeros(25, np.int64).view(np.uint8), np.zeros(200, np.uint8)
    table = np.array([which, source.ctypes.data, destination.ctypes.data], np.int64)
    shim.library.kvext_shim_reset(1)
    shim.register(table.ctypes.data, table.nbytes)
    shim.register(source.ctypes.data, source.nbytes)
    shim.register(destination.ctypes.data, destination.nbytes, is_writable=True)
    assert shim.library.kvext_ascend_page_transfer(1, None, ctypes.c_void_p(table.ctypes.data))
    assert re.search(MISUSES[which], shim.violation), shim.violation
