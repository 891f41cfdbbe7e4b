# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Runs LMCache's server as a process, and finds failed transfers in its log."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

CHUNK_TOKENS = 256
_START_LIMIT_S = 90
_STOP_LIMIT_S = 20

_FAILED = re.compile(
    r"Failed to (batched )?allocate|Cannot store keys|skipping the store|Some keys not found"
    r"|No handler registered|Traceback"
)
_DONE = re.compile(r"(Stored|Retrieved) (\d+) tokens in")


def failures(log: str) -> list[str]:
    """The lines about stores and loads that did not happen.

    A store without room is only logged, and is reported to the engine as done at once. Without this
    check it would count as the fastest store.
    """
    return [line for line in log.splitlines() if _FAILED.search(line)]


def tokens_moved(log: str) -> dict[str, int]:
    """The tokens that the server's log reports as ``Stored`` and ``Retrieved``."""
    moved = {"Stored": 0, "Retrieved": 0}
    for verb, tokens in _DONE.findall(log):
        moved[verb] += int(tokens)
    return moved


def free_ports(count: int) -> list[int]:
    """Different free ports of this machine."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


class LMCacheServer:
    """The server process. It runs from the construction to `stop`."""

    def __init__(self, options: Sequence[str], log: Path) -> None:
        """Start the server, and wait until it answers.

        Raises:
            SystemExit: The server has ended, or did not answer.
        """
        self.log = log
        port = int(options[options.index("--port") + 1])
        http_port, prometheus_port = free_ports(2)
        command = [
            str(Path(sys.executable).with_name("lmcache")),
            "server",
            "--host",
            "127.0.0.1",
            "--http-host",
            "127.0.0.1",
            "--http-port",
            str(http_port),
            "--prometheus-port",
            str(prometheus_port),
            "--chunk-size",
            str(CHUNK_TOKENS),
            *("--eviction-policy", "LRU", *options),
        ]
        with log.open("w") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self._wait_for(port)

    def _wait_for(self, port: int) -> None:
        limit_s = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < limit_s and self._process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.2)
        self.stop()
        raise SystemExit(f"{self.read_log()[-3000:]}\nLMCache's server did not start; see above.")

    @property
    def process_id(self) -> int:
        return self._process.pid

    def read_log(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """Kill the server."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
