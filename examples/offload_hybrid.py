# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Stores KV of a hybrid model in host memory and loads it again, on the real vLLM engine.

The engine answers prompts, and the prefix cache of the device is emptied. Then the same prompts are
sent again, and then the next turns of the conversations. Without a connector, everything is
computed again. With ``KvextConnector``, it is loaded from host memory: keys and values of the
full-attention layer, and the windows of the five sliding-window layers. The model is a tiny Gemma 3
with random weights, so neither an accelerator nor a download is needed:

    pip install "vllm-ascend-kvext[demo]"
    python examples/offload_hybrid.py

Only ``kv_transfer_config`` is about the connector. On the command line it is
``--kv-transfer-config``, see ``serve_offload.md``.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_log import engine_log
from retention import ENGINE_ENVIRON, VOCABULARY_TOKENS, print_aligned, write_model

PROMPT_LENGTHS = (1500, 2345, 3000, 3777)
REPLY_TOKENS = 32
USER_TOKENS = 200
BLOCK_TOKENS = 32
LOGPROB_TOLERANCE = 1e-3
LOG = Path("out/offload_hybrid.log")

CONNECTOR = {
    "kv_connector": "KvextConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"host_memory_gib": 0.25},
}

Tokens = list[int]


@dataclass(frozen=True)
class Round:
    """The outputs for one list of prompts.

    Attributes:
        name: The name of the list.
        prompt_tokens: The tokens of all prompts together.
        hit_tokens: The tokens that were not computed.
        seconds: The time from the first prompt to the last answer.
        replies: The reply to each prompt.
        logprobs: For each prompt and each token of its reply, the five most likely tokens.
    """

    name: str
    prompt_tokens: int
    hit_tokens: int
    seconds: float
    replies: Sequence[Tokens]
    logprobs: Sequence[Sequence[dict[int, float]]]

    def is_equal(self, other: Round) -> bool:
        """Whether the replies and the log-probabilities behind them are the same."""
        return self.replies == other.replies and all(
            # The order of the least likely tokens may differ.
            abs(logprob - theirs.get(token, min(theirs.values()))) <= LOGPROB_TOLERANCE
            for mine, expected in zip(self.logprobs, other.logprobs, strict=True)
            for step, theirs in zip(mine, expected, strict=True)
            for token, logprob in step.items()
        )


def start_engine(model: Path, block_size: int = BLOCK_TOKENS, **engine: Any) -> Any:
    """Start vLLM in this process."""
    from vllm import LLM

    return LLM(
        str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=block_size,
        max_num_batched_tokens=1024,
        **engine,
    )


def serve(model: Path, **engine: Any) -> list[Round]:
    """Answer the prompts twice, and then the next turn of each conversation."""
    llm = start_engine(model, max_model_len=8192, num_gpu_blocks_override=1300, **engine)
    rng = random.Random(0)
    prompts = [random_tokens(rng, length) for length in PROMPT_LENGTHS]
    ask(llm, "warm-up", [random_tokens(rng, 1000)])
    first = ask(llm, "first time", prompts)
    llm.reset_prefix_cache()
    again = ask(llm, "after a reset", prompts)
    llm.reset_prefix_cache()
    turns = [
        prompt + reply + random_tokens(rng, USER_TOKENS)
        for prompt, reply in zip(prompts, first.replies, strict=True)
    ]
    rounds = [first, again, ask(llm, "next turn", turns)]
    llm.llm_engine.engine_core.shutdown()
    return rounds


def random_tokens(rng: random.Random, num_tokens: int) -> Tokens:
    return rng.choices(range(VOCABULARY_TOKENS), k=num_tokens)


def ask(llm: Any, name: str, prompts: Sequence[Tokens]) -> Round:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=REPLY_TOKENS, ignore_eos=True, logprobs=5, detokenize=False
    )
    began_s = time.monotonic()
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
    )
    seconds = time.monotonic() - began_s
    replies = [output.outputs[0] for output in outputs]
    return Round(
        name,
        sum(map(len, prompts)),
        sum(output.num_cached_tokens or 0 for output in outputs),
        seconds,
        [list(reply.token_ids) for reply in replies],
        [
            [{token: entry.logprob for token, entry in step.items()} for step in reply.logprobs]
            for reply in replies
        ],
    )


def print_table(without: Sequence[Round], with_connector: Sequence[Round]) -> None:
    """Print the seconds of both engines and the loaded tokens: one row per round."""
    rows = [
        ("", "prompt", "from host", "", "seconds, without", "seconds, with", "identical"),
        ("prompts sent", "tokens", "memory", "computed", "connector", "connector", "outputs"),
    ]
    for plain, offloaded in zip(without, with_connector, strict=True):
        rows.append(
            (
                offloaded.name,
                f"{offloaded.prompt_tokens:,}",
                f"{offloaded.hit_tokens:,}",
                f"{offloaded.prompt_tokens - offloaded.hit_tokens:,}",
                f"{plain.seconds:.2f}",
                f"{offloaded.seconds:.2f}",
                "yes" if offloaded.is_equal(plain) else "NO",
            )
        )
    print_aligned(rows)


def main() -> None:
    from tqdm import tqdm

    os.environ.update(ENGINE_ENVIRON)
    with (
        tempfile.TemporaryDirectory() as folder,
        engine_log(LOG) as terminal,
        tqdm(total=2, unit=" engines", file=terminal) as progress,
    ):
        write_model(Path(folder))
        without = serve(Path(folder), enable_prefix_caching=False)
        progress.update()
        with_connector = serve(
            Path(folder), enable_prefix_caching=True, kv_transfer_config=CONNECTOR
        )
        progress.update()
    print_table(without, with_connector)
    if not all(
        offloaded.is_equal(plain) for offloaded, plain in zip(with_connector, without, strict=True)
    ):
        raise SystemExit("Some outputs differ from those without a connector.")
    print("\nAll outputs are identical to those without a connector.")


if __name__ == "__main__":
    main()
