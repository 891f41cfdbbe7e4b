# SPDX-License-Identifier: Apache-2.0
"""Engines with LMCacheMPConnector, one after the other; write what they answered.

    python lmcache_workload.py REPORT PLANS

``PLANS`` is JSON: by name, what to start and ask: ``model`` is a folder, ``engine`` holds arguments
of ``LLM``, ``prompts`` are seeds. A text among them is a pause: the file ``TEXT.reached`` appears
in the working folder, and the next prompt is asked when ``TEXT.passed`` is there. A number with a
point is a pause of so many seconds: the server makes readable what is stored a moment after it has
said so. ``kills``, if it is there, is the process id of the server, which ends when the first load
is about to begin.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 700
REPLY_TOKENS = 8
_TRANSFERS_LIMIT_S = 30
_PAUSE_LIMIT_S = 150


def serve(plan: dict[str, Any]) -> dict[str, Any]:
    """Start one engine, ask it, and end it."""
    from support.scenarios.engine import COMMON
    from vllm import LLM
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    started_s = time.monotonic()
    common = COMMON | {
        "block_size": 16,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": False,
        "distributed_executor_backend": UniProcExecutor,
    }
    llm = None
    try:
        llm = LLM(plan["model"], **common | plan["engine"])
        core = llm.llm_engine.engine_core.engine_core
        if "kills" in plan:
            _kill_at_the_first_load(plan["kills"])
        answers, seconds = [], []
        for seed in plan["prompts"]:
            if isinstance(seed, str):
                _pause(Path(seed))
                continue
            if isinstance(seed, float):
                time.sleep(seed)
                continue
            began_s = time.monotonic()
            answers.append(_ask(llm, seed))
            seconds.append(time.monotonic() - began_s)
            limit_s = time.monotonic() + _TRANSFERS_LIMIT_S
            while core.scheduler.has_requests() and time.monotonic() < limit_s:
                llm.llm_engine.step()  # A request's blocks are held until its stores have ended.
                time.sleep(0.01)
        return {
            "asked": {"prompts": {"answers": answers}},
            "seconds": seconds,
            "num_groups": len(core.scheduler.kv_cache_config.kv_cache_groups),
            "has_requests": core.scheduler.has_requests(),
        }
    except Exception:
        return {"error": traceback.format_exc(), "error_s": time.monotonic() - started_s}
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()


def _pause(name: Path) -> None:
    name.with_suffix(".reached").touch()
    limit_s = time.monotonic() + _PAUSE_LIMIT_S
    while not name.with_suffix(".passed").exists():
        if time.monotonic() > limit_s:
            raise TimeoutError(f"nobody ended the pause {name}")
        time.sleep(0.05)


def _kill_at_the_first_load(process_id: int) -> None:
    from vllm.distributed import kv_transfer

    adapter = kv_transfer.get_kv_transfer_group().worker_adapter
    load = adapter.submit_retrieve_request

    def kill_and_load(*args: Any, **more: Any) -> None:
        adapter.submit_retrieve_request = load
        os.kill(process_id, signal.SIGKILL)
        load(*args, **more)

    adapter.submit_retrieve_request = kill_and_load


def _ask(llm: Any, seed: int) -> dict[str, Any]:
    """The prompt of a seed has the same tokens in every process."""
    from support.scenarios.engine import Prompt, answer_of, random_tokens, sampling_of

    prompt = Prompt(random_tokens(random.Random(seed), PROMPT_TOKENS))
    (output,) = llm.generate([prompt.inputs], sampling_of(REPLY_TOKENS), use_tqdm=False)
    return answer_of(prompt, output)


def main() -> None:
    report, plans = sys.argv[1:]
    reports = {name: serve(plan) for name, plan in json.loads(plans).items()}
    Path(report).write_text(json.dumps(reports))


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
    main()
