# SPDX-License-Identifier: Apache-2.0
"""Start engines that reuse segments, one after the other, and report how their models were checked.

    python model_check_workload.py REPORT PLANS

``PLANS`` is JSON: by name, ``model`` is a folder, ``cache`` one in which checks are remembered,
``engine`` holds arguments of ``LLM``, ``blending`` options of the connector, ``failed_loads`` is
vLLM's policy for them, and ``fault`` names a function below.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from blending_workload import shut_down

BLOCK_TOKENS = 16
DOCUMENT_TOKENS = 64


@contextmanager
def none() -> Iterator[None]:
    yield


@contextmanager
def loads_other_rows() -> Iterator[None]:
    """Load what is one token further on."""
    from vllm_ascend_kvext.connector import load_jobs

    rows_to_load = load_jobs.rows_to_load

    def shifted(placed: Any) -> Any:
        rows = rows_to_load(placed)
        return rows._replace(first_row=max(0, rows.first_row - 1))

    load_jobs.rows_to_load = shifted
    yield
    load_jobs.rows_to_load = rows_to_load


@contextmanager
def leaves_holes() -> Iterator[None]:
    """Let one part between the reused ones not be computed."""
    from vllm_ascend_kvext.patches.connector import scheduler

    add_rows = scheduler.add_rows
    scheduler.add_rows = lambda of, output, rows: add_rows(of, output, rows[:-1])
    yield
    scheduler.add_rows = add_rows


@contextmanager
def turns_keys_further() -> Iterator[None]:
    """Let keys be expected to be turned by twice the angles of the model."""
    from vllm_ascend_kvext.blending import key_check

    turn = key_check.turn
    key_check.turn = lambda keys, signature, shifts: turn(keys, signature, 2 * shifts)
    yield
    key_check.turn = turn


@contextmanager
def fails_loads() -> Iterator[None]:
    """Let no load of a segment succeed."""
    from vllm_ascend_kvext.blending.errors import SegmentError
    from vllm_ascend_kvext.blending.segment_mover import SegmentMover

    def fail(mover: Any, rows: Any, block_ids: Any) -> int:
        raise SegmentError("a load that fails")

    load = SegmentMover.load
    SegmentMover.load = fail
    yield
    SegmentMover.load = load


FAULTS = {
    fault.__name__: fault
    for fault in (none, loads_other_rows, leaves_holes, turns_keys_further, fails_loads)
}


def run(plan: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM
    from vllm.envs import disable_envs_cache
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    extra = {"host_memory_gib": 0.125, "blending": True, **plan["blending"]}
    common = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "max_model_len": 1024,
        "num_gpu_blocks_override": 1000,
        "disable_hybrid_kv_cache_manager": False,
        "distributed_executor_backend": UniProcExecutor,
        "kv_transfer_config": {
            "kv_connector": "KvextConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": plan["failed_loads"],
            "kv_connector_extra_config": extra,
        },
    }
    os.environ["VLLM_CACHE_ROOT"] = plan["cache"]
    disable_envs_cache()
    asked = count_questions()
    with FAULTS[plan["fault"]]():
        llm = LLM(plan["model"], **common | plan["engine"])
    try:
        return serve(llm, len(asked))
    finally:
        shut_down(llm)


def serve(llm: Any, num_asked: int) -> dict[str, Any]:
    """Store a document, ask about it, and report what came of it."""
    from vllm import SamplingParams

    from vllm_ascend_kvext.connector.counters import is_gauge

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    side = scheduler.connector.scheduler_side
    pool = scheduler.kv_cache_manager.block_pool
    tier = side._parts.tier
    report = {
        "asked": num_asked,
        "why_no_reuse": side.blending.why_no_reuse if side.blending is not None else "off",
        "left": {
            "requests": len(scheduler.requests),
            "used blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "cached blocks": len(pool.cached_block_hash_to_block),
            "entries": tier.counters.entries_held,
            "references": side.num_references,
            "counted": sum(
                abs(value) for key, value in side.take_report().items() if not is_gauge(key)
            ),
            "prescribed": len(side.blending.requests._prescribed),
        },
    }
    token_ids = list(range(300, 300 + DOCUMENT_TOKENS))
    stores = SamplingParams(max_tokens=1, extra_args={"kvext_store_segment": True})
    reuses = SamplingParams(
        temperature=0.0,
        max_tokens=4,
        logprobs=5,
        extra_args={"kvext_segments": [[20, 20 + DOCUMENT_TOKENS]]},
    )
    llm.generate({"prompt_token_ids": token_ids}, stores, use_tqdm=False)
    while side.has_transfers:
        llm.llm_engine.step()
    prompt = [*range(100, 120), *token_ids, *range(120, 140)]
    (output,) = llm.generate({"prompt_token_ids": prompt}, reuses, use_tqdm=False)
    report["params"] = output.kv_transfer_params
    report["answer"] = [
        {token: entry.logprob for token, entry in step.items()}
        for step in output.outputs[0].logprobs
    ]
    return report


def count_questions() -> list[Any]:
    """What engines are asked from now on."""
    from vllm_ascend_kvext.patches.connector import model_check

    asked: list[Any] = []
    original = getattr(model_check._Engine, "kvext_original", model_check._Engine.ask)

    def ask(self: Any, questions: Any) -> Any:
        asked.extend(questions)
        return original(self, questions)

    model_check._Engine.kvext_original = original
    model_check._Engine.ask = ask
    return asked


def main() -> None:
    report_path, plans_path = map(Path, sys.argv[1:3])
    reports: dict[str, Any] = {}
    for name, plan in json.loads(plans_path.read_text()).items():
        try:
            reports[name] = run(plan)
        except Exception:
            reports[name] = {"error": traceback.format_exc()}
    report_path.write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
