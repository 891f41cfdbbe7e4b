# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Starts nodes, and speaks with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from support.scenarios.processes import NPU, Plan

DEADLINE_S = 480.0
"""The longest time of a start and of an answer. Machines of tests are slow."""
UNASKED_S = 8
"""The time after which a prefill node frees KV that no decode node has asked for."""


@dataclass(frozen=True)
class Reply:
    """The result of a message, or the traceback of its failure."""

    value: Any
    error: str = ""


@dataclass(frozen=True)
class Output:
    """A request's first token, or its end. Then there is the answer."""

    request_id: str
    answer: dict[str, Any] | None


class NodeProcess:
    """One node. Its outputs queue in ``outputs``.

    Args:
        folder: For the socket, the plan and the log.
        environ: Variables in addition to those of the emulated NPU.
    """

    def __init__(
        self, name: str, folder: Path, plan: Plan, environ: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.plan = plan
        self.outputs: deque[Output] = deque()
        self._log_path = folder / f"{name}.log"
        plan_path = folder / f"{name}.json"
        plan_path.write_text(json.dumps({"name": name, **plan.on(NPU)}))
        socket = str(folder / f"{name}.socket")
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("VLLM_ASCEND_KVEXT_", "VLLM_PREFIX_CACHE_"))
        }
        own = {
            "EMULATED_NPU_DEVICES": str(plan.num_devices),
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(UNASKED_S),
        }
        program = [sys.executable, str(Path(__file__).with_name("node.py")), socket, str(plan_path)]
        self._listener = Listener(socket, "AF_UNIX")
        with self._log_path.open("w") as log:
            self.process = subprocess.Popen(
                program,
                env={**inherited, **NPU.environ, **own, **(environ or {})},
                stdout=log,
                stderr=log,
            )
        self._connection: Connection | None = None

    def wait_until_ready(self) -> None:
        """Wait for the engine's start. Nodes that start together start sooner."""
        if self._connection is None:
            socket = self._listener._listener._socket  # type: ignore[attr-defined]
            socket.settimeout(1)
            deadline_s = time.monotonic() + DEADLINE_S
            while self._connection is None:
                try:
                    self._connection = self._listener.accept()
                except TimeoutError:
                    self._check(time.monotonic() < deadline_s, "does not connect")
            self._read_reply()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of `node.Node`, and return its result. Outputs meanwhile are queued."""
        self.wait_until_ready()
        assert self._connection is not None
        self._connection.send((method, arguments))
        return self._read_reply()

    def read(self, timeout_s: float) -> None:
        """Queue the outputs that are there."""
        assert self._connection is not None
        while wait([self._connection], timeout_s):
            message = self._receive()
            assert isinstance(message, Output), message
            self.outputs.append(message)
            timeout_s = 0

    def _read_reply(self) -> Any:
        assert self._connection is not None
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            has_message = wait([self._connection], max(0, deadline_s - time.monotonic()))
            self._check(bool(has_message), "does not answer")
            message = self._receive()
            if isinstance(message, Reply):
                self._check(not message.error, message.error)
                return message.value
            self.outputs.append(message)

    def _receive(self) -> Any:
        assert self._connection is not None
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.wait(10)
            self._check(False, f"has ended with {self.process.returncode}")

    def _check(self, is_well: bool, what: str) -> None:
        if not is_well:
            raise AssertionError(f"{self.name} {what}\n{self.log()[-4000:]}")

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    @property
    def connection(self) -> Connection:
        assert self._connection is not None
        return self._connection

    def kill(self) -> None:
        """End the process at once, as ``kill -9``."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """End the process in any case."""
        if self.process.poll() is None and self._connection is not None:
            try:
                self._connection.send(("end", ()))
                self.process.wait(20)
            except (OSError, subprocess.TimeoutExpired):
                pass
        self.kill()
        self._listener.close()
