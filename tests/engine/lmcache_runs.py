# SPDX-License-Identifier: Apache-2.0
"""Engines with LMCacheMPConnector in processes of their own, and what is done to their server."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from lmcache_workload import PROMPT_TOKENS
from support.scenarios import processes
from support.scenarios.answers import Served

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from offload.server import CHUNK_TOKENS, LMCacheServer

HIT_TOKENS = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
_ENVIRON = {"LMCACHE_TRACK_USAGE": "false", "HF_HUB_OFFLINE": "1"}
_REACHED_LIMIT_S = 150

needs_lmcache = pytest.mark.skipif(
    find_spec("lmcache") is None,
    reason="LMCache is not installed here: `make test-lmcache` has an environment with it",
)

Plans = Mapping[str, Mapping[str, Any]]
Actions = Mapping[str, Callable[[], None]]
"""By pause, what is done while an engine waits."""

Run = Callable[..., dict[str, Served]]
"""What the fixture ``run_lmcache`` is."""


def serve(
    models: Mapping[str, Path],
    folder: Path,
    plans: Plans,
    environ: Mapping[str, str] | None = None,
    actions: Actions | None = None,
) -> dict[str, Served]:
    """Serve plans, one engine after the other, in one fresh process; see ``lmcache_workload``."""
    full = {
        name: {"prompts": [1, 2], "engine": {}, **plan, "model": str(models[plan["model"]])}
        for name, plan in plans.items()
    }
    with conducted(folder, actions or {}) as errors:
        ended = processes.run(
            Path(__file__).with_name("lmcache_workload.py"),
            [str(folder / "report.json"), json.dumps(full)],
            {**_ENVIRON, **(environ or {})},
            working_folder=folder,
        )
    if ended.exit_code or errors:
        pytest.fail(f"exit code {ended.exit_code}, {errors} with {plans}:\n{ended.log[-6000:]}")
    reports = json.loads((folder / "report.json").read_text())
    return {name: Served(report, ended.log) for name, report in reports.items()}


def connected(port: int, **options: Any) -> dict[str, Any]:
    """What a user sets: where the server is."""
    address = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    return {
        "kv_transfer_config": {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {**address, **options},
        }
    }


@contextmanager
def conducted(folder: Path, actions: Actions) -> Iterator[list[str]]:
    """Do what is to be done in the pauses of an engine elsewhere; what went wrong is listed."""
    errors: list[str] = []

    def conduct() -> None:
        for name, action in actions.items():
            limit_s = time.monotonic() + _REACHED_LIMIT_S
            while not (folder / f"{name}.reached").exists():
                if time.monotonic() > limit_s:
                    return  # The engine has ended; its process says why.
                time.sleep(0.05)
            try:
                action()
            except (Exception, SystemExit) as error:
                errors.append(f"{name}: {error}")
            (folder / f"{name}.passed").touch()

    thread = threading.Thread(target=conduct, daemon=True)
    thread.start()
    yield errors
    thread.join(5.0)


class Restarted:
    """A server that is killed and started again, at the same address."""

    def __init__(self, port: int, folder: Path, *options: str) -> None:
        self._port, self._folder, self._options = port, folder, options
        self._started = ExitStack()
        self._num_starts = 0

    @property
    def process_id(self) -> int:
        return self._server.process_id

    def read_log(self) -> str:
        """Of the server that runs."""
        return self._server.read_log()

    def start(self, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self._num_starts += 1
        options = ["--port", str(self._port), *self._options, "--chunk-size", str(chunk_tokens)]
        log = self._folder / f"server-{self._num_starts}.log"
        self._server = LMCacheServer(options, log)
        self._started.callback(self._server.stop)

    def kill(self) -> None:
        """At once, as a machine that fails."""
        self._server.kill()

    def wait_for(self, text: str, limit_s: float = 60.0) -> None:
        """Until the log of the server that runs has a text."""
        end_s = time.monotonic() + limit_s
        while text not in self.read_log():
            if time.monotonic() > end_s:
                raise TimeoutError(f"{text!r} is not in the log of the server")
            time.sleep(0.1)

    def __enter__(self) -> Restarted:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._started.close()
