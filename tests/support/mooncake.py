# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Runs the servers in Mooncake Store's wheel: a master, and a client with memory."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from vllm_ascend_kvext.shared_tier.mooncake import MooncakeTier

_DEADLINE_S = 20.0
CLIENT_TTL_S = 4
"""The time after which the master forgets the memory of a silent client."""


def require() -> Path:
    """The folder of Mooncake's programs. If they or their libraries are missing, skip the test."""
    with contextlib.suppress(ImportError, OSError):
        # Another module may have the same name.
        from mooncake import store

        return Path(store.__file__).parent
    found = importlib.util.find_spec("mooncake")
    pytest.skip(
        f"Mooncake's wheel is {'installed, but does not load' if found else 'not installed'}"
    )


class Servers:
    """A master and a client with memory. Each can be stopped, killed and started again."""

    def __init__(self, folder: Path, pool: str = "128 MB", *flags: str) -> None:
        self._programs = require()
        self._folder = folder
        self._pool = pool
        self._flags = (f"--client_ttl={CLIENT_TTL_S}", *flags)
        self._master_port, self._metrics_port, self._owner_port = (_free_port() for _ in range(3))
        self._numbers = itertools.count()
        self.url = f"mooncake://127.0.0.1:{self._master_port}"
        self.master = self.start_master()
        self.owner = self.start_owner()

    def start_master(self) -> subprocess.Popen[bytes]:
        ports = (f"--rpc_port={self._master_port}", f"--metrics_port={self._metrics_port}")
        hosts = ("--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1")
        self.master = self._start("mooncake_master", *ports, *hosts, *self._flags)
        self._until_answers()
        return self.master

    def start_owner(self) -> subprocess.Popen[bytes]:
        self.owner = self._start(
            "mooncake_client",
            f"--master_server_address=127.0.0.1:{self._master_port}",
            f"--port={self._owner_port}",
            f"--global_segment_size={self._pool}",
            "--host=127.0.0.1",
            "--metadata_server=P2PHANDSHAKE",
        )
        self.until_there_is_memory()
        return self.owner

    def until_there_is_memory(self) -> None:
        """Wait until the master knows exactly one segment, and none of a client that has ended."""
        deadline_s = time.monotonic() + _DEADLINE_S
        while len(self._ask("get_all_segments").split()) != 1:
            assert time.monotonic() < deadline_s, self.logs()
            time.sleep(0.02)

    def logs(self) -> str:
        return "\n".join(path.read_text()[-1500:] for path in self._folder.glob("*.log"))

    def end(self) -> None:
        for process in (self.owner, self.master):
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()

    def _start(self, program: str, *flags: str) -> subprocess.Popen[bytes]:
        path = self._folder / f"{program}-{next(self._numbers)}.log"
        with path.open("w") as log:
            return subprocess.Popen([self._programs / program, *flags], stdout=log, stderr=log)

    def _until_answers(self) -> None:
        deadline_s = time.monotonic() + _DEADLINE_S
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self._master_port), 1).close()
                self._ask("health")
                return
            assert self.master.poll() is None and time.monotonic() < deadline_s, self.logs()
            time.sleep(0.01)

    def stored_keys(self) -> list[str]:
        return sorted(self._ask("get_all_keys").split())

    def _ask(self, what: str) -> str:
        url = f"http://127.0.0.1:{self._metrics_port}/{what}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())


def raw_client(servers: Servers) -> object:
    """Mooncake's own client. Tests read and damage objects with it."""
    return MooncakeTier(servers.url, 0)._store


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
