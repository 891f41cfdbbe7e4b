# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Prompts with LMCacheMPConnector, and faults of a server that only one engine uses.

Options of a plan: ``seeds`` of the prompts. ``own_port`` is set if the engine is to have a server.
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
HIT_TOKENS = PROMPT_TOKENS // lmcache_server.CHUNK_TOKENS * lmcache_server.CHUNK_TOKENS
_READABLE_S = 2
"""The time until the server makes stored chunks readable."""
_MAX_WAIT_S = 60


class Engine(scenarios_engine.Engine):
    """An engine that may have its own server. A scenario kills the server."""

    reply_tokens = 8
    defaults = {  # noqa: RUF012 (nobody changes it)
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": False,
        "distributed_executor_backend": "uni",
    }

    def __init__(self, plan: dict[str, Any]) -> None:
        self.server: Any = None
        if (port := plan.get("own_port")) is not None:
            options = ["--port", str(port), "--l1-size-gb", "0.1"]
            self.server = lmcache_server.LMCacheServer(options, Path("server.log").resolve())
        super().__init__(plan)

    def ask_seeds(self, *seeds: int) -> None:
        """Ask the prompts of these seeds. In every process, a seed has the same tokens."""
        for seed in seeds:
            time.sleep(_READABLE_S)
            self.ask("prompts", [random_tokens(random.Random(seed), PROMPT_TOKENS)])
            self.finish()

    def finish(self) -> None:
        """Wait until stores have ended. Until then, the blocks of requests are held."""
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
    """Kill the server right before the first load begins."""
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
