# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Mooncake's transfer engine over TCP, whose reads can wait, fail, or bring zeros.

vLLM-Ascend asks Mooncake for the protocol ``ascend``, which needs the network of a device. Memory
of the emulated NPU is memory of the process, so TCP can read it.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import Any

FAILED = -1
"""Mooncake's answer if it could not read."""


class Fault(Enum):
    """What happens to a read."""

    NONE = "none"
    FAILS = "fails"
    """Nothing is read, and the answer says so."""
    HALF = "half"
    """The first half of the pieces is read, and the answer says that the read failed."""
    ZEROS = "zeros"
    """Zeros are written where the bytes belong, and the answer is that all went well."""


class TransferEngine:
    """One process's engine. It has the calls that vLLM-Ascend's connectors make.

    Attributes:
        fault: What happens to each read from now on.
        counted: ``reads``, ``bytes``, and ``failed`` reads.
        num_waiting: Reads that wait for `let_go`.
    """

    def __init__(self, host: str) -> None:
        from mooncake.engine import TransferEngine as Mooncake

        self._mooncake = Mooncake()
        if self._mooncake.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("Mooncake's engine does not start")
        self._may_read = threading.Event()
        self._may_read.set()
        self._lock = threading.Lock()
        self.fault = Fault.NONE
        self.counted: Counter[str] = Counter()
        self.num_waiting = 0

    def get_rpc_port(self) -> int:
        return int(self._mooncake.get_rpc_port())

    def register_memory(self, address: int, num_bytes: int) -> int:
        return int(self._mooncake.register_memory(address, num_bytes))

    def hold(self) -> None:
        """Let reads wait from now on."""
        self._may_read.clear()

    def let_go(self) -> None:
        """Let all reads go on."""
        self._may_read.set()

    def batch_transfer_sync_read(
        self, session: str, to: Sequence[int], origin: Sequence[int], num_bytes: Sequence[int]
    ) -> int:
        """Read pieces of another process's memory. Returns a negative number if that failed."""
        with self._lock:
            self.num_waiting += 1
        self._may_read.wait()
        with self._lock:
            self.num_waiting -= 1
            self.counted["reads"] += 1
            fault = self.fault
        if fault is Fault.FAILS:
            answer = FAILED
        else:
            end = len(to) // 2 if fault is Fault.HALF else len(to)
            lists = [list(each[:end]) for each in (to, origin, num_bytes)]
            answer = int(self._mooncake.batch_transfer_sync_read(session, *lists)) if end else 0
            if fault is Fault.HALF:
                answer = FAILED
        if fault is Fault.ZEROS:
            for address, size in zip(to, num_bytes, strict=True):
                ctypes.memset(address, 0, size)
        with self._lock:
            self.counted["failed"] += answer < 0
            self.counted["bytes"] += sum(num_bytes) if answer >= 0 else 0
        return answer


def engine_of_process() -> Any:
    """The engine of this process, which vLLM-Ascend's connectors use. It is made when first asked
    for."""
    from vllm.utils.network_utils import get_ip
    from vllm_ascend.distributed.kv_transfer.utils.mooncake_transfer_engine import global_te

    if not isinstance(global_te.transfer_engine, TransferEngine):
        engine: Any = TransferEngine(get_ip())
        global_te.transfer_engine = engine
    return global_te.transfer_engine
