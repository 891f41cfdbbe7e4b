# SPDX-License-Identifier: Apache-2.0
"""Prompts with LMCacheMPConnector, and faults of a server that one engine has for itself.

Options of a plan: ``seeds`` of the prompts; ``own_port``, where the engine is to have a server.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.scenarios import engine as scenarios_engine
from support.scenarios import scenario
from support.scenarios.engine import random_tokens

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from offload import server as lmcache_server

PROMPT_TOKENS = 700
CHUNK_TOKENS = lmcache_server.CHUNK_TOKENS
HIT_TOKENS = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
HEARTBEAT_S = 1.0
_READABLE_S = 2
"""The time until the server makes stored chunks readable."""
_MAX_WAIT_S = 60


class Engine(scenarios_engine.Engine):
    """An engine that may have its own server, which can be killed and started again."""

    reply_tokens = 8
    defaults = {  # noqa: RUF012 (nobody changes it)
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": False,
        "distributed_executor_backend": "uni",
    }

    def __init__(self, plan: dict[str, Any]) -> None:
        self._port = plan.get("own_port")
        self.server: Any = None
        if self._port is not None:
            self.start_server()
        super().__init__(plan)
        self.facts["seconds"] = []

    def start_server(self, chunk_tokens: int = CHUNK_TOKENS) -> None:
        options = ["--port", str(self._port), "--chunk-size", str(chunk_tokens)]
        log = Path("server.log").resolve()
        self.server = lmcache_server.LMCacheServer([*options, "--l1-size-gb", "0.1"], log)

    def restart_server(self, chunk_tokens: int) -> None:
        self.kill_server()
        self.start_server(chunk_tokens)
        end_s = time.monotonic() + _MAX_WAIT_S
        while chunk_tokens == CHUNK_TOKENS and "Registered KV cache" not in self.server.read_log():
            if time.monotonic() > end_s:
                raise TimeoutError("nobody has registered with the server")
            time.sleep(0.1)
        time.sleep(3 * HEARTBEAT_S)  # The scheduler side has its own heartbeats.

    def kill_server(self) -> None:
        self.server.kill()
        time.sleep(3 * HEARTBEAT_S)  # Both sides have noticed that the server is gone.

    def ask_seeds(self, *seeds: int) -> None:
        """The prompt of a seed has the same tokens in every process."""
        for seed in seeds:
            time.sleep(_READABLE_S)
            began_s = time.monotonic()
            self.ask("prompts", [random_tokens(random.Random(seed), PROMPT_TOKENS)])
            self.facts["seconds"].append(time.monotonic() - began_s)
            self.finish()

    def finish(self) -> None:
        """Wait until stores have ended. The blocks of a request are held until then."""
        end_s = time.monotonic() + _MAX_WAIT_S
        while self.scheduler.has_requests() and time.monotonic() < end_s:
            self.llm.llm_engine.step()
            time.sleep(0.01)

    def left(self) -> dict[str, int]:
        return super().left() | {"requests": self.scheduler.has_requests()}

    def shutdown(self) -> None:
        super().shutdown()
        if self.server is not None:
            self.server.stop()


@scenario
def prompts(engine: Engine) -> None:
    seeds: Sequence[int] = engine.plan["seeds"]
    engine.ask_seeds(*seeds)


@scenario
def killed_in_a_load(engine: Engine) -> None:
    """Kill the server when the first load is about to begin."""
    from vllm.distributed import kv_transfer

    adapter = kv_transfer.get_kv_transfer_group().worker_adapter
    load = adapter.submit_retrieve_request

    def kill_and_load(*args: Any, **more: Any) -> None:
        adapter.submit_retrieve_request = load
        engine.server.kill()
        load(*args, **more)

    adapter.submit_retrieve_request = kill_and_load
    engine.ask_seeds(1, 1, 1)
    engine.note("server's log", engine.server.read_log())


@scenario
def restarted(engine: Engine) -> None:
    """Prompts while the server is gone, back, back with other chunks, and back as before."""
    engine.ask_seeds(1, 1)
    engine.kill_server()
    engine.ask_seeds(1)
    for chunk_tokens in (CHUNK_TOKENS, 2 * CHUNK_TOKENS, CHUNK_TOKENS):
        engine.restart_server(chunk_tokens)
        engine.ask_seeds(1, 1)
