# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Send prompts with the same beginnings to a model with states; compare with no prefix caching.

    python state_hits.py REPORT MODEL LINE [--connector NAME] [--prompts 200] [--at-once 4]

A prompt may hit KV of full attention that another prompt has cached where no state was kept.
`LINES` has the schedulers that take such a hit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from emulated_plans import IS_0_23, connector
from support.connector.stand_ins import MODULE
from support.scenarios.answers import Answer, logprob_error
from support.scenarios.engine import COMMON, Prompt, Tokens, answer_of, random_tokens, sampling_of

LINES: dict[str, dict[str, Any]] = {
    "vLLM's": {},
    "balance": {"additional_config": {"enable_balance_scheduling": True}},
    "recompute": {
        "additional_config": {"recompute_scheduler_enable": True}
        if IS_0_23
        else {"scheduler_config": {"recompute_scheduler_enable": True}}
    },
    # Upstream starts this scheduler only with several ranks. They do not matter for hits.
    "load-balancing": {
        "scheduler_cls": "vllm_ascend.core.dyntra_lb_scheduler.AsyncDyntraLBScheduler"
    },
}
"""Arguments of the engine, by name of the scheduler."""
DECODE_NODES = ("recompute", "load-balancing")
REPLY_TOKENS = 4
WRONG = 1e-3
"""A difference of a log-probability that is an error. Rounding in float32 makes 1e-5."""
NUM_BRANCHES = 4


def prompts(number: int) -> list[Tokens]:
    """Prompts in families. Each prompt begins like another one of its family."""
    rng = random.Random(4)
    found: list[Tokens] = []
    while len(found) < number:
        family = [random_tokens(rng, rng.randrange(300, 900))]
        for _ in range(NUM_BRANCHES - 1):
            parent = rng.choice(family)
            shared_tokens = rng.randrange(129, len(parent))
            family.append(parent[:shared_tokens] + random_tokens(rng, rng.randrange(20, 400)))
        found += family
    return found[:number]


def engine_of(line: str, connector_name: str) -> dict[str, Any]:
    role = "kv_consumer" if line in DECODE_NODES else "kv_both"
    own = connector(store_policy="never")["kv_transfer_config"]
    if connector_name == "NullConnector":
        transfer = {"kv_connector": connector_name, "kv_connector_module_path": MODULE}
    elif role == "kv_both":
        transfer = own
    else:
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {"connectors": [own]},
        }
    return COMMON | {
        **LINES[line],
        "block_size": 128,
        "num_gpu_blocks_override": 400,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "kv_transfer_config": {**transfer, "kv_role": role},
    }


def ask(llm: Any, asked: Sequence[Tokens]) -> list[Answer]:
    named = [Prompt(each) for each in asked]
    outputs = llm.generate(
        [each.inputs for each in named], sampling_of(REPLY_TOKENS), use_tqdm=False
    )
    return [Answer(**answer_of(*both)) for both in zip(named, outputs, strict=True)]


def batches(asked: Sequence[Tokens], size: int) -> Iterable[Sequence[Tokens]]:
    return (asked[first : first + size] for first in range(0, len(asked), size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("model")
    parser.add_argument("line", choices=LINES)
    parser.add_argument("--connector", choices=("NullConnector", "KvextConnector"), required=True)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--at-once", type=int, default=1)
    options = parser.parse_args()

    from vllm import LLM

    llm = LLM(options.model, **engine_of(options.line, options.connector))
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    asked = prompts(options.prompts)
    found = [each for batch in batches(asked, options.at_once) for each in ask(llm, batch)]
    errors = []
    for prompt, answer in zip(asked, found, strict=True):
        llm.reset_prefix_cache()
        (expected,) = ask(llm, [prompt])
        assert not expected.hit_tokens
        errors.append(logprob_error(answer, expected))
    report = {
        "schedulers": [each.__name__ for each in type(scheduler).__mro__],
        "hit_tokens": [answer.hit_tokens for answer in found],
        "errors": errors,
        "wrong": sum(error > WRONG for error in errors),
    }
    print(f"{options.line}, {options.connector}: {report['wrong']} of {len(asked)} wrong, largest")
    print(f"error {max(errors):.2e}, {sum(report['hit_tokens'])} hit tokens", flush=True)
    options.report.write_text(json.dumps(report))
    os._exit(0)


if __name__ == "__main__":
    main()
