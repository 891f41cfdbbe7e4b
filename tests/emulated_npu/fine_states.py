# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Send prompts to a model whose states have blocks of four units; compare with no hits at all.

    python fine_states.py REPORT MODEL [--prompts 24] [--at-once 3] [--spoil] [--drafts]

Each prompt is asked when nothing is on the device, and when others have left their KV there. Host
memory has what was stored before.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from emulated_plans import IS_0_23, connector
from state_hits import WRONG, ask, batches, prompts
from support.scenarios.answers import Answer, logprob_error
from support.scenarios.engine import COMMON, Tokens
from support.scenarios.states import MTP, NUM_DRAFT_TOKENS

BLOCK_TOKENS = 128 if IS_0_23 else 256
UNIT_TOKENS = BLOCK_TOKENS // 4
"""In blocks of 128 tokens, requests have units of 128. The script sets a smaller one there, because
this model's pages do not fit longer blocks of vLLM-Ascend 0.23."""


def engine(has_drafts: bool) -> dict[str, Any]:
    drafts = {"method": MTP, "num_speculative_tokens": NUM_DRAFT_TOKENS}
    return COMMON | {
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": 200,
        "max_num_batched_tokens": 640,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        **connector(chunk_tokens=BLOCK_TOKENS, host_memory_gib=0.25),
        **({"speculative_config": drafts, "async_scheduling": True} if has_drafts else {}),
    }


def spoil_states(side: Any, worker: Any) -> None:
    """Give each stored state the bytes of the state behind it in host memory."""
    tails = [entry for entry in side.tier._entries.values() if entry.piece.kind.name == "TAILS"]
    host = worker._host.tensor
    places = [slice(e.offset_bytes, e.offset_bytes + e.num_bytes) for e in tails]
    copies = [host[place].clone() for place in places]
    for place, other in zip(places, copies[1:] + copies[:1], strict=True):
        host[place] = other[: place.stop - place.start]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--spoil", action="store_true")
    parser.add_argument("--drafts", action="store_true", help="asynchronous, with MTP")
    options = parser.parse_args()

    from vllm import LLM

    from vllm_ascend_kvext.connector.common import host_layout

    host_layout.MAX_HASH_TOKENS = host_layout.MAX_FINE_TOKENS = UNIT_TOKENS
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    llm = LLM(options.model, **engine(options.drafts))
    core = llm.llm_engine.engine_core.engine_core
    side = core.scheduler.connector.scheduler_side
    asked = prompts(options.prompts)

    def finish() -> None:
        while core.scheduler.has_finished_requests() or side.has_work:
            llm.llm_engine.step()

    def answers(some: list[Tokens], size: int) -> list[Answer]:
        found = []
        for batch in batches(some, size):
            found += ask(llm, batch)
            finish()
        return found

    first = answers(asked, options.at_once)
    llm.reset_prefix_cache()
    if options.spoil:
        spoil_states(side, get_kv_transfer_group().worker_side)
    second = []
    for prompt in asked:
        second += answers([prompt], 1)
        llm.reset_prefix_cache()
    host_tokens = side.counters.hit_tokens
    side.reset_cache()
    expected = []
    for prompt in asked:
        expected += answers([prompt], 1)
        llm.reset_prefix_cache()
        side.reset_cache()
    assert not any(answer.hit_tokens for answer in expected)
    errors = [
        [logprob_error(answer, right) for answer, right in zip(found, expected, strict=True)]
        for found in (first, second)
    ]
    report = {
        "unit_tokens": side.tier.geometry.unit_tokens,
        "lengths": [len(prompt) for prompt in asked],
        "hit_tokens": [[answer.hit_tokens for answer in found] for found in (first, second)],
        "host_tokens": host_tokens,
        "errors": errors,
        "wrong": sum(error > WRONG for each in errors for error in each),
    }
    print(report, flush=True)
    options.report.write_text(json.dumps(report))
    os._exit(0)


if __name__ == "__main__":
    main()
