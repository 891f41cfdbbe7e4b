# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A process that ends while its threads copy ends well.

Users of ``LLM`` rarely shut the engine down. A thread that leaves compiled code after CPython has
begun to end would abort the process (``PyThread_exit_thread`` unwinds the thread's stack, and the
bindings do not let it through).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COPIES = """
import threading
import numpy
from vllm_ascend_kvext.native import native

source, destination = numpy.zeros((2, 1 << 25), numpy.uint8)
has_begun = threading.Event()


def copy_once():
    native().copy(destination.ctypes.data, source.ctypes.data, source.nbytes, 1, 0, [], 0)


def copy():
    print("begun", flush=True)
    has_begun.set()
    while threading.main_thread().is_alive():
        copy_once()
    for _ in range(20):
        copy_once()
    print("ended", flush=True)
"""

TRANSFER = """
from vllm_ascend_kvext.connector.common.messages import StoreJob
from vllm_ascend_kvext.connector.worker.job_runner import Moved
from vllm_ascend_kvext.connector.worker.transfer_thread import TransferThread


def run(job, recorded):
    copy()
    return Moved(0, 0.0)


jobs = TransferThread(run)
jobs.submit([StoreJob(1, (), ()), StoreJob(2, (), ())], None)
"""

TIER_CALL = """
from vllm_ascend_kvext.shared_tier.backend import TierThread

calls = TierThread("calls")
calls.submit(copy)
calls.submit(copy)
"""


@pytest.mark.parametrize("start", [TRANSFER, TIER_CALL], ids=["transfer", "tier call"])
def test_the_running_copy_ends_and_no_other_begins(start: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(COPIES + start + "has_begun.wait()")
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.split() == ["begun", "ended"]
