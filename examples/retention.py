# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Shows what sparse retention does for chats on a hybrid model, on the real vLLM engine.

Several conversations share a system prompt, and take turns on an engine whose KV cache is too small
for all their blocks. Stock vLLM keeps every sliding-window block anyway, and so evicts blocks that
the next turn needs. With ``VLLM_PREFIX_CACHE_RETENTION_INTERVAL``, the blocks that a later request
is likely to hit are evicted last. With ``VLLM_ASCEND_KVEXT_RETENTION=adaptive``, users need not
choose an interval. The model is a tiny Gemma 3 with random weights, so neither an accelerator nor a
download is needed:

    pip install "vllm-ascend-kvext[demo]"
    python examples/retention.py

Each run is a new process that executes ``serve`` below. That function uses vLLM in the ordinary
way, and has no line about the plugin. Environment variables alone control the plugin.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from engine_log import engine_log

WINDOW_TOKENS = 64
BLOCK_TOKENS = 16
POOL_BLOCKS = 2600
VOCABULARY_TOKENS = 512
NUM_LAYERS = 6

CONVERSATIONS = 8
TURNS = 5
SYSTEM_PROMPT_TOKENS = 512
USER_TOKENS = (400, 800)
REPLY_TOKENS = 64

CHECKPOINT_TOKENS = 512
LOGPROB_TOLERANCE = 1e-3
PICTURE = Path("out/retention.png")
LOG = Path("out/retention.log")
COLORS = {"dense": "0.3", "interval 0": "tab:orange", "adaptive": "tab:green"}

INTERVAL = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"
PLUGIN_OFF = {"VLLM_ASCEND_KVEXT_MODE": "off"}
REFERENCE = "no prefix caching"
UNLIMITED = "a cache without limit"
# vLLM 0.23.0 reads the variable, too. So it also runs with the same settings and without the
# plugin.
RUNS: dict[str, dict[str, str]] = {
    REFERENCE: PLUGIN_OFF,
    "vLLM, dense": PLUGIN_OFF,
    "vLLM, interval 0": {**PLUGIN_OFF, INTERVAL: "0"},
    "kvext, interval 0": {INTERVAL: "0"},
    f"vLLM, interval {CHECKPOINT_TOKENS}": {**PLUGIN_OFF, INTERVAL: str(CHECKPOINT_TOKENS)},
    f"kvext, interval {CHECKPOINT_TOKENS}": {INTERVAL: str(CHECKPOINT_TOKENS)},
    "kvext, adaptive": {"VLLM_ASCEND_KVEXT_RETENTION": "adaptive"},
}
ENGINE_ENVIRON = {
    "OMP_NUM_THREADS": "1",  # In such a small model, threads would wait for each other.
    "TORCHDYNAMO_DISABLE": "1",  # Compiling would not pay, and would need a C++ compiler.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # So that `serve` can look into the block pool.
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def write_model(
    folder: Path, window_tokens: int = WINDOW_TOKENS, num_window_layers: int = 5
) -> None:
    """Write a Gemma 3 of six layers with random weights. Layers with sliding windows come first."""
    import torch
    from safetensors.torch import save_file
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        vocab_size=VOCABULARY_TOKENS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        layer_types=["sliding_attention"] * num_window_layers
        + ["full_attention"] * (NUM_LAYERS - num_window_layers),
        # If all layers are of one kind, vLLM uses this value for all of them.
        sliding_window=window_tokens if num_window_layers else None,
        max_position_embeddings=8192,
        query_pre_attn_scalar=8,  # Sharp attention, so that each cached token matters.
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.2)
    config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


def serve(model: Path, enable_prefix_caching: bool) -> Iterator[dict[str, Any]]:
    """Hold the conversations. Yields a record per request, and a last one about the cache."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=8192,
        max_num_batched_tokens=1024,
        num_gpu_blocks_override=POOL_BLOCKS,
        enable_prefix_caching=enable_prefix_caching,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    evicted = record_evictions(scheduler)
    sampling = SamplingParams(
        temperature=0, max_tokens=REPLY_TOKENS, ignore_eos=True, logprobs=5, detokenize=False
    )

    rng = random.Random(0)
    system_prompt = rng.choices(range(VOCABULARY_TOKENS), k=SYSTEM_PROMPT_TOKENS)
    conversations = [list(system_prompt) for _ in range(CONVERSATIONS)]
    for _ in range(TURNS):
        for history in rng.sample(conversations, k=CONVERSATIONS):
            history += rng.choices(range(VOCABULARY_TOKENS), k=rng.randint(*USER_TOKENS))
            (output,) = llm.generate({"prompt_token_ids": history}, sampling, use_tqdm=False)
            (reply,) = output.outputs
            yield {
                "prompt": list(history),
                "reply": list(reply.token_ids),
                "hit_tokens": output.num_cached_tokens or 0,
                "logprobs": [
                    {token: entry.logprob for token, entry in step.items()}
                    for step in reply.logprobs
                ],
            }
            history += reply.token_ids
    yield {"kept_blocks": count_kept_blocks(scheduler), "evictions": len(evicted)}


def record_evictions(scheduler: Any) -> list[int]:
    """Return a list to which the id of every evicted block will be added."""
    queue = scheduler.kv_cache_manager.block_pool.free_block_queue
    take = queue.popleft_n
    evicted: list[int] = []

    def recording_take(num_blocks: int) -> list[Any]:
        blocks = take(num_blocks)
        evicted.extend(block.block_id for block in blocks if block.block_hash is not None)
        return blocks

    queue.popleft_n = recording_take
    return evicted


def count_kept_blocks(scheduler: Any) -> list[int]:
    """The number of blocks of each KV cache group in the prefix cache, full attention first."""
    from vllm.v1.core.kv_cache_utils import get_group_id

    blocks = scheduler.kv_cache_manager.block_pool.blocks
    kept = Counter(get_group_id(block.block_hash) for block in blocks if block.block_hash)
    groups = scheduler.kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    return [kept[index] for index in sorted(range(len(kinds)), key=kinds.__getitem__)]


@dataclass(frozen=True)
class Record:
    """The records of one run."""

    requests: Sequence[dict[str, Any]]
    kept_blocks: Sequence[int]
    evictions: int

    @property
    def prompt_tokens(self) -> list[int]:
        return [len(request["prompt"]) for request in self.requests]

    @property
    def hit_tokens(self) -> list[int]:
        return [request["hit_tokens"] for request in self.requests]

    def has_outputs_of(self, other: Record) -> bool:
        """Whether each reply and its top log-probabilities are equal to those of ``other``."""
        return all(
            mine["prompt"] == theirs["prompt"]
            and mine["reply"] == theirs["reply"]
            and all(
                # The order of the least likely tokens may differ.
                abs(logprob - expected.get(token, min(expected.values()))) <= LOGPROB_TOLERANCE
                for step, expected in zip(mine["logprobs"], theirs["logprobs"], strict=True)
                for token, logprob in step.items()
            )
            for mine, theirs in zip(self.requests, other.requests, strict=True)
        )

    def max_hit_tokens(self) -> list[int]:
        """The tokens that each request would hit in a cache that never evicts a block."""
        seen: set[tuple[int, ...]] = set()
        hits = []
        for request in self.requests:
            tokens = request["prompt"] + request["reply"]
            limit = len(request["prompt"]) - 1
            ends = range(BLOCK_TOKENS, len(tokens), BLOCK_TOKENS)
            hits.append(
                max((e for e in ends if e <= limit and tuple(tokens[:e]) in seen), default=0)
            )
            seen.update(tuple(tokens[:end]) for end in ends)
        return hits


def execute(model: Path, name: str, progress: Any) -> Record:
    """Run ``serve`` in its own process."""
    inherited = {key: os.environ[key] for key in os.environ.keys() - {INTERVAL, *PLUGIN_OFF}}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), "--model", str(model), "--serve", name],
        # vLLM inspects models in a process that imports from this folder, so it is not the
        # checkout.
        cwd=model,
        env={**inherited, **ENGINE_ENVIRON, **RUNS[name]},
        stdout=subprocess.PIPE,
        text=True,
    )
    records = []
    for line in process.stdout:
        if line.startswith("{"):
            records.append(json.loads(line))
            progress.update("reply" in records[-1])
        else:
            print(line, end="")
    if process.wait():
        raise SystemExit(f"The run '{name}' failed.")
    return Record(records[:-1], **records[-1])


def print_table(records: dict[str, Record]) -> None:
    """Print one row per run, and what no cache can exceed.

    The column `each window` lists the sliding-window groups.
    """
    head = ("run", "prompt", "hit", "computed", "full", "each window", "evictions", "identical")
    rows = [("", "tokens", "", "", "blocks kept", "", "", "outputs"), head]
    for name, record in records.items():
        prompt = sum(record.prompt_tokens)
        hit = sum(record.hit_tokens)
        full, *windows = record.kept_blocks
        outputs = "yes" if record.has_outputs_of(records[REFERENCE]) else "NO"
        row = (name, prompt, hit, prompt - hit, full, "/".join(map(str, windows)))
        rows.append((*map(str, row), str(record.evictions), outputs))
    prompt = sum(records[REFERENCE].prompt_tokens)
    hit = sum(records[REFERENCE].max_hit_tokens())
    rows.append((UNLIMITED, str(prompt), str(hit), str(prompt - hit), "", "", "", ""))
    print_aligned(rows)


def print_aligned(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells. The first column is aligned to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        aligned = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        print(name.ljust(widths[0]), *aligned, sep="  ")


def draw(records: dict[str, Record], path: Path) -> None:
    """Draw the tokens hit over time: vLLM is dashed, kvext is solid, each setting has a color."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")

    def plot(name: str, hits: Sequence[int], **style: Any) -> None:
        axes.plot([0, *accumulate(hits)], label=f"{name}: {sum(hits):,} tokens", **style)

    plot(UNLIMITED, records[REFERENCE].max_hit_tokens(), color="0.85", lw=7)
    for name, record in records.items():
        owner, _, setting = name.partition(", ")
        color = COLORS.get(setting, "tab:blue")
        if name != REFERENCE:
            plot(name, record.hit_tokens, color=color, ls="-" if owner == "kvext" else "--", lw=2)
    axes.set(
        title=f"{CONVERSATIONS} chats on {POOL_BLOCKS:,} KV cache blocks",
        xlabel="requests served",
        ylabel="prompt tokens found in the cache, in total",
        xlim=(0, CONVERSATIONS * TURNS),
        ylim=(0, None),
    )
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.93")
    axes.legend(frameon=False, loc="upper left")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--serve", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        for record in serve(options.model, options.serve != REFERENCE):
            print(json.dumps(record), flush=True)
        return

    from tqdm import tqdm

    print(
        f"{CONVERSATIONS} chats of {TURNS} turns on {POOL_BLOCKS} KV cache blocks of "
        f"{BLOCK_TOKENS} tokens; sliding window {WINDOW_TOKENS} tokens."
    )
    records: dict[str, Record] = {}
    with tempfile.TemporaryDirectory() as model, engine_log(LOG) as terminal:
        write_model(Path(model))
        with tqdm(
            total=len(RUNS) * CONVERSATIONS * TURNS,
            unit=" requests",
            file=terminal,
            mininterval=0.1 if terminal.isatty() else 10,
        ) as progress:
            for name in RUNS:
                progress.set_description(name)
                records[name] = execute(Path(model), name, progress)
    print_table(records)
    draw(records, PICTURE)
    print(f"\nTokens hit over time: {PICTURE.resolve()}")
    if not all(record.has_outputs_of(records[REFERENCE]) for record in records.values()):
        raise SystemExit("Some outputs differ from those without prefix caching.")


if __name__ == "__main__":
    main()
