# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""vLLM-Ascend serves a hybrid model with this package on an emulated NPU, without any hardware.

Questions about documents are asked in several rounds. The device and the host memory are too small
for all documents. The unmodified vLLM-Ascend serves two models twice: without this package, and
with adaptive retention, ``KvextConnector`` and holes. Worker, model runner and attention are
vLLM-Ascend's own. ``torch_npu`` and the operators come from ``tests/emulated_npu``. One model is
the tiny Gemma 3 of `retention.py`, whose windows end inside a block. The other one is the model of
`holes.py`, whose layers all have full attention; host memory loses the middle of its prompts. Start
the example with

    make demo-ascend

The example counts the tokens that an NPU would have to compute and to load. It prints no seconds,
because they would say nothing about an NPU.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from engine_log import engine_log
from holes import COMPUTED, CONNECTOR, LOADED, ON_DEVICE, Answer, Question, SpanObserver, answer
from offload_hybrid import LOGPROB_TOLERANCE, random_tokens, start_engine
from retention import ENGINE_ENVIRON, PLUGIN_OFF, print_aligned, write_model

NOTICE = "The NPU is emulated on this CPU. No hardware was used, and times would mean nothing."
BLOCK_TOKENS = 128
"""The block size; vLLM-Ascend supports no other for this model."""

WINDOW_TOKENS = 200
"""The sliding window; it ends inside a block."""

NUM_DOCUMENTS = 4
NUM_ROUNDS = 5
INSTRUCTION_TOKENS = 256
DOCUMENT_TOKENS = (1200, 2200)
QUESTION_TOKENS = (140, 260)
HOST_MEMORY_GIB = 0.006
"""The host memory, with room for about half of the documents."""

LOG = Path("out/ascend_emulated.log")


class Model(NamedTuple):
    """A model, and the device that serves it.

    Attributes:
        name: The kind of its layers.
        num_window_layers: The number of layers with windows, of six layers.
        device_blocks: The blocks of the device, with room for little more than one prompt.
    """

    name: str
    num_window_layers: int
    device_blocks: int


MODELS = (Model("windows", 5, 150), Model("full attention", 0, 25))


class Run(NamedTuple):
    """How an engine is started.

    Attributes:
        environ: Environment variables, in addition to those of all examples.
        engine: Arguments of the engine.
    """

    environ: Mapping[str, str]
    engine: Mapping[str, Any]


HOST_TIER = {
    "host_memory_gib": HOST_MEMORY_GIB,
    "chunk_tokens": BLOCK_TOKENS,
    "store_policy": "all",
    # A model of this size computes a chunk about as fast as it loads one. It is to load anyway.
    "load_if_slower": True,
}
WITHOUT = Run(PLUGIN_OFF, {})
WITH = Run(
    {"VLLM_ASCEND_KVEXT_RETENTION": "adaptive"},
    {"kv_transfer_config": {**CONNECTOR, "kv_connector_extra_config": HOST_TIER}},
)


def write_rounds() -> list[list[Question]]:
    """The questions of all rounds. Each round asks about every document once, in random order."""
    rng = random.Random(0)
    instructions = random_tokens(rng, INSTRUCTION_TOKENS)
    documents = {
        chr(ord("A") + number): instructions + random_tokens(rng, rng.randint(*DOCUMENT_TOKENS))
        for number in range(NUM_DOCUMENTS)
    }
    return [
        [
            Question(name, documents[name] + random_tokens(rng, rng.randint(*QUESTION_TOKENS)))
            for name in rng.sample(sorted(documents), k=NUM_DOCUMENTS)
        ]
        for _ in range(NUM_ROUNDS)
    ]


def serve(
    folder: Path, model: Model, rounds: Sequence[Sequence[Question]], run: Run
) -> list[list[Answer]]:
    """Answer the questions, one after the other, on a new engine. Runs in its own process."""
    os.environ.update(run.environ)
    from vllm.platforms import current_platform

    if current_platform.device_type != "npu":
        raise SystemExit("This Python has no vLLM-Ascend on an emulated NPU: make demo-ascend")
    llm = start_engine(
        folder,
        block_size=BLOCK_TOKENS,
        max_model_len=3072,
        num_gpu_blocks_override=model.device_blocks,
        enable_prefix_caching=True,
        disable_hybrid_kv_cache_manager=False,
        **run.engine,
    )
    observer = SpanObserver(llm.llm_engine.engine_core.engine_core.scheduler)
    answers = [[answer(llm, observer, question) for question in asked] for asked in rounds]
    llm.llm_engine.engine_core.shutdown()
    return answers


Served = Sequence[Sequence[Answer]]
"""Answers of an engine, by round."""


def print_table(served: Mapping[str, tuple[Served, Served]]) -> None:
    """Print where the tokens of prompts came from: one row per round, and one per model.

    Args:
        served: By the name of the model, the answers without this package and with it.
    """
    rows = [
        ("", "prompt", "on the", "from host", "", "of these", "computed without"),
        ("", "tokens", "device", "memory", "computed", "in holes", "this package"),
    ]
    for name, (without, found) in served.items():
        for number, (plain, ours) in enumerate(zip(without, found, strict=True), 1):
            rows.append(row(f"{name}, round {number}", plain, ours))
        rows.append(row(f"{name}, all", [*chain(*without)], [*chain(*found)]))
    print_aligned(rows)


def row(name: str, plain: Sequence[Answer], ours: Sequence[Answer]) -> tuple[str, ...]:
    signs = "".join(each.signs for each in ours)
    counts = (
        len(signs),
        *map(signs.count, (ON_DEVICE, LOADED, COMPUTED)),
        sum(each.hole_tokens for each in ours),
        sum(each.signs.count(COMPUTED) for each in plain),
    )
    return (name, *(f"{count:,}" for count in counts))


def main() -> None:
    from tqdm import tqdm

    os.environ.update(ENGINE_ENVIRON)
    print(NOTICE, end="\n\n", flush=True)
    rounds = write_rounds()
    served: dict[str, tuple[Served, Served]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        engine_log(LOG) as terminal,
        ProcessPoolExecutor(
            1, get_context("spawn"), max_tasks_per_child=1, initializer=os.chdir, initargs=(folder,)
        ) as process,
        tqdm(total=2 * len(MODELS), unit=" engines", file=terminal) as progress,
    ):
        for model in MODELS:
            write_model(Path(folder), WINDOW_TOKENS, model.num_window_layers)
            answers = []
            for run in (WITHOUT, WITH):
                answers.append(process.submit(serve, Path(folder), model, rounds, run).result())
                progress.update()
            served[model.name] = answers[0], answers[1]
    print(
        f"{NUM_ROUNDS} rounds of questions about {NUM_DOCUMENTS} documents, answered by "
        f"vLLM-Ascend with {HOST_MEMORY_GIB * 1024:.0f} MiB of host memory.\n"
        f"windows: five layers have windows of {WINDOW_TOKENS} tokens, one has full attention; "
        f"{MODELS[0].device_blocks} blocks of {BLOCK_TOKENS} tokens.\n"
        f"full attention: all layers have it; {MODELS[1].device_blocks} blocks.\n"
    )
    print_table(served)
    if not all(
        mine.round.is_equal(theirs.round)
        for without, found in served.values()
        for ours, plain in zip(found, without, strict=True)
        for mine, theirs in zip(ours, plain, strict=True)
    ):
        raise SystemExit("Some outputs differ from those without this package.")
    print(
        f"\nAll outputs are identical to those without this package, log-probabilities to within "
        f"{LOGPROB_TOLERANCE}.\n{NOTICE}"
    )


if __name__ == "__main__":
    main()
