# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Ratios of one run: against one plain copy, against vLLM's OffloadingConnector, and of steps.

    python tests/gpu/measure.py --device cuda --what copies|engines [--quick] ROWS

The engines of `engines` have a model of the size of 1B parameters with random weights. They take
turns, so that other load of the machine affects them equally. The benchmarks of a CPU do the rest.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

# ``tests`` replaces this folder on the path.
_HERE = Path(__file__).resolve().parent
ROOT = _HERE.parents[1]
sys.path[:] = [*(path for path in sys.path if path != str(_HERE)), str(_HERE.parent)]
# The benchmark writes this folder over the first entry of the path, which would be PYTHONPATH with
# vLLM.
sys.path.insert(0, str(ROOT / "benchmarks"))

from common.models import BenchModel, write_qwen3  # noqa: E402
from gpu.sections import LEFT_OUT, MEASURED, WRONG, Rows  # noqa: E402
from offload.contenders import ALONE, OURS, Contender, kvext_contender  # noqa: E402
from offload.report import percentile  # noqa: E402
from offload.run import ENGINE_ENVIRON, EngineProcess  # noqa: E402
from offload.workload import (  # noqa: E402
    NUM_DECODERS,
    OFFLOADED_TOKENS,
    Prompt,
    Step,
    Visit,
    decode_steps,
)

OFFLOADING = "vLLM's OffloadingConnector"
BLOCK_TOKENS = 16
GOAL_P99_RATIO = 1.05
MIN_STEPS = 200
"""The least number of steps for a 99th percentile of which one says that it meets a goal."""

# A model like Llama-3.2-1B: 16 layers of 8 heads of keys.
NUM_LAYERS = 16
ROW_BYTES = 2 * 8 * 128 * 2
LONG_TOKENS = 16_384
NUM_BLOCKS = 2200
"""Blocks for two long prompts, of which a store may hold one."""
NUM_VISITORS = {"cuda": 12, "cpu": 4}
"""More long prompts than the pool holds, by device."""
MAX_ENGINES_S = {"cuda": 165.0, "cpu": 1650.0}
"""The time after which no further round of steps may end, by device. `run.py` cuts the section off
a little later, and steps are reported when all rounds have ended."""
HOST_GIB = 3.99
"""The host memory of each engine, a little under a power of two, to which torch rounds it up."""


# Copies.


def measure_copies(device_name: str, rows: Rows, *, is_quick: bool) -> None:
    """The transfer op against one plain copy of the same bytes."""
    from gpu.accelerator import device_of
    from support.transfer.cases import uniform_case

    device = device_of(device_name)
    num_tokens = 256 if is_quick else 4096
    num_rounds = 3 if is_quick else 15
    for page_bytes, num_layers in ((64 << 10, 16), (32 << 10, 32), (16 << 10, 16), (4 << 10, 16)):
        num_pages = num_tokens // BLOCK_TOKENS
        for is_scattered in (True, False):
            pages = range(1, num_pages * (2 if is_scattered else 1) + 1, 2 if is_scattered else 1)
            case = uniform_case(
                row_bytes=page_bytes, rows_per_page=1, pages=tuple(pages), num_planes=num_layers
            )
            where = "every second page" if is_scattered else "pages in a row"
            what = f"{num_pages * num_layers:,} pages of {page_bytes >> 10} KiB, {where}"
            _measure_case(device, rows, case, what, num_rounds)


def _measure_case(device: Any, rows: Rows, case: Any, what: str, num_rounds: int) -> None:
    from vllm_ascend_kvext.transfer.page_transfer import page_transfer
    from vllm_ascend_kvext.transfer.pools import Pools
    from vllm_ascend_kvext.transfer.schema import Direction

    pools = [device.empty(num_bytes).fill_(1) for num_bytes in case.pool_bytes]
    num_bytes = int(case.runs.shape[0] * case.planes[:, 5].sum())
    plain = device.empty(num_bytes).fill_(1)
    host = device.host(case.host_bytes).fill_(1)
    registered = Pools(pools)
    for direction in Direction:
        is_store = direction is Direction.PAGES_TO_HOST

        def copy(direction: Direction = direction) -> None:
            page_transfer(registered, host, case.planes, case.runs, direction)

        def copy_plain(is_store: bool = is_store) -> None:
            one, other = (host[:num_bytes], plain) if is_store else (plain, host[:num_bytes])
            one.copy_(other, non_blocking=True)

        with device.own_stream():
            ours_s, plain_s, calls_s = [], [], []
            for _ in range(num_rounds + 2):  # The first rounds do not count.
                plain_s.append(device.seconds(copy_plain))
                began_s = time.perf_counter()
                ours_s.append(device.seconds(copy))
                calls_s.append(time.perf_counter() - began_s)
        ratio = median(one / other for one, other in zip(ours_s[2:], plain_s[2:], strict=True))
        rows.add(
            f"{'store' if is_store else 'load'}, {what}",
            MEASURED,
            f"{num_bytes / median(ours_s[2:]) / 1e9:.1f} GB/s, one plain copy "
            f"{num_bytes / median(plain_s[2:]) / 1e9:.1f} GB/s: {ratio:.2f} x its time; "
            f"{median(calls_s[2:]) * 1e3:.2f} ms with the call",
            ours_s=ours_s,
            plain_s=plain_s,
        )


# Engines.


def contenders(device_name: str) -> list[Contender]:
    ours: dict[str, Any] = {"host_memory_gib": HOST_GIB, "load_if_slower": True}
    if device_name == "cuda":
        ours["allow_cuda"] = True
    else:
        ours["host_memory_gib"] = 1.5
    found = [
        kvext_contender(ours),
        Contender(ALONE, "none"),
    ]
    if device_name == "cuda":
        theirs = {"cpu_bytes_to_use": int(HOST_GIB * 2**30)}
        found.insert(
            1,
            Contender(
                OFFLOADING,
                "offloading",
                {
                    "kv_connector": "OffloadingConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": theirs,
                },
            ),
        )
    return found


def write_1b(folder: Path) -> None:
    """Write the configuration of a model of 1B parameters. vLLM makes random weights."""
    from transformers import Qwen3Config

    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=32_768,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
        dtype="bfloat16",
    ).save_pretrained(folder)


def engine_options(device_name: str) -> dict[str, Any]:
    if device_name != "cuda":
        return {}
    return {
        "load_format": "dummy",
        "block_size": BLOCK_TOKENS,
        "max_model_len": LONG_TOKENS + 1024,
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 4 << 30,
        # Steps that decode are graphs. Without a compiler, engines start in a few seconds.
        "enforce_eager": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    }


def measure_engines(device_name: str, rows: Rows, *, is_quick: bool) -> None:
    is_gpu = device_name == "cuda"
    model = BenchModel("1B", NUM_LAYERS, ROW_BYTES, 1, write_1b if is_gpu else write_qwen3)
    chosen = contenders(device_name)
    # On a CPU this is the pool of the benchmark there, of blocks of 128 tokens.
    num_blocks = NUM_BLOCKS if is_gpu else 94
    cpus = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.write(folder)
        began_s = time.monotonic()

        def start(number: int) -> EngineProcess:
            return EngineProcess(
                chosen[number],
                folder,
                num_blocks,
                cpus[-1 - number % len(cpus)],
                folder / f"engine-{number}.log",
                engine_options(device_name),
            )

        engines: list[EngineProcess] = []
        with ThreadPoolExecutor(len(chosen)) as threads:
            for number, future in enumerate(
                [*(threads.submit(start, n) for n in range(len(chosen)))]
            ):
                try:
                    engines.append(future.result())
                except Exception as error:
                    log = folder / f"engine-{number}.log"
                    tail = log.read_text(errors="replace")[-700:] if log.exists() else ""
                    rows.add(f"{chosen[number].name} starts", WRONG, f"{error!r} {tail}")
        rows.add("engines have started", MEASURED, f"{time.monotonic() - began_s:.0f} s")
        try:
            if engines:
                sizes = (OFFLOADED_TOKENS, LONG_TOKENS) if is_gpu else (OFFLOADED_TOKENS,)
                for offloaded_tokens in sizes:
                    measure_prompts(rows, engines, model, offloaded_tokens, 1 if is_quick else 7)
                num_visitors = NUM_VISITORS[device_name]
                num_rounds, num_visits = (1, 2 * num_visitors) if is_quick else (6, 48)
                end_s = began_s + MAX_ENGINES_S[device_name]
                measure_steps(rows, engines, num_rounds, num_visits, num_visitors, end_s)
        finally:
            for engine in engines:
                engine.stop()


def measure_prompts(
    rows: Rows,
    engines: Sequence[EngineProcess],
    model: BenchModel,
    offloaded_tokens: int,
    num_rounds: int,
) -> None:
    """First tokens cold and warm, and the speed of stores and loads."""
    found: dict[str, list[Prompt]] = {engine.contender.name: [] for engine in engines}
    for seed in range(num_rounds + 1):  # The first round does not count.
        first = seed % len(engines)
        for engine in (*engines[first:], *engines[:first]):
            prompt = engine.prompt(100_000 * offloaded_tokens + seed, offloaded_tokens)
            if seed:
                found[engine.contender.name].append(prompt)
    num_bytes = model.kv_bytes(offloaded_tokens)
    for name, prompts in found.items():
        cold_s = median(prompt.cold_s for prompt in prompts)
        what = f"{name}, {offloaded_tokens:,} tokens ({num_bytes / 1e6:.0f} MB)"
        if name == ALONE:
            rows.add(what, MEASURED, f"first token {cold_s * 1e3:.1f} ms cold")
            continue
        good = [prompt for prompt in prompts if prompt.why_not is None]
        if not good:
            rows.add(what, WRONG, f"no valid prompt: {prompts[0].why_not}", prompts=prompts)
            continue
        warm_s = median(prompt.warm_s for prompt in good)
        speeds = {
            way: median(
                moved.num_bytes / moved.copy_seconds / 1e9
                for moved in (getattr(prompt, way) for prompt in good)
                if moved.copy_seconds
            )
            for way in ("store", "load")
        }
        rows.add(
            what,
            MEASURED,
            f"first token {cold_s * 1e3:.1f} ms cold, {warm_s * 1e3:.1f} ms from host memory "
            f"({warm_s / cold_s:.2f} x); copies: store {speeds['store']:.1f} GB/s, load "
            f"{speeds['load']:.1f} GB/s; {len(good)} of {len(prompts)} prompts valid",
            prompts=prompts,
        )
    _compare_loads(rows, found, offloaded_tokens)


def _compare_loads(
    rows: Rows, found: Mapping[str, Sequence[Prompt]], offloaded_tokens: int
) -> None:
    if OFFLOADING not in found or OURS not in found:
        rows.add(f"{OURS} against {OFFLOADING}", LEFT_OUT, "it needs a GPU")
        return
    pairs = [
        (one, other)
        for one, other in zip(found[OURS], found[OFFLOADING], strict=True)
        if one.why_not is None and other.why_not is None
    ]
    if not pairs:
        rows.add(f"{OURS} against {OFFLOADING}", WRONG, "no round in which both are valid")
        return
    warm = median(one.warm_s / other.warm_s for one, other in pairs)
    cold = median(one.cold_s / other.cold_s for one, other in pairs)
    copies = {
        way: median(
            getattr(one, way).copy_seconds / getattr(other, way).copy_seconds
            for one, other in pairs
        )
        for way in ("store", "load")
    }
    rows.add(
        f"{OURS} against {OFFLOADING}, {offloaded_tokens:,} tokens",
        MEASURED,
        f"{warm:.2f} x its time to a first token from host memory, {cold:.2f} x cold; copies "
        f"take {copies['store']:.2f} x its time in stores, {copies['load']:.2f} x in loads; "
        f"{len(pairs)} rounds",
    )


def measure_steps(
    rows: Rows,
    engines: Sequence[EngineProcess],
    num_rounds: int,
    num_visits: int,
    num_visitors: int,
    end_s: float,
) -> None:
    """Steps that decode beside stores and loads, against steps beside none.

    A round begins only if it ends before ``end_s`` of the clock, when it is as long as the last.
    """
    visits: dict[str, list[Visit]] = {engine.contender.name: [] for engine in engines}
    round_s = 0.0
    for round_number in range(num_rounds):
        began_s = time.monotonic()
        if began_s + round_s > end_s:
            found = f"no time was left after {round_number} of {num_rounds} rounds"
            rows.add("further rounds of decode steps", LEFT_OUT, found)
            break
        for engine in engines[:: -1 if round_number % 2 else 1]:
            name = engine.contender.name
            if name == ALONE:
                seeds = [1_000_000 + round_number * num_visits + n for n in range(num_visits // 4)]
            else:
                # All of them are stored in the first round, and loaded in the others.
                seeds = [number % num_visitors for number in range(num_visits)]
                seeds += [2_000_000 + round_number * 100 + n for n in range(num_visits // 4)]
            visits[name] += engine.visits(seeds)
        round_s = time.monotonic() - began_s
    alone = decode_steps(visits.get(ALONE, ()), False)
    for name, found in visits.items():
        quiet = decode_steps(found, False)
        for kind, what in (("loaded", "loads"), ("new", "stores")):
            of_kind = [visit for visit in found if visit.kind == kind]
            busy = decode_steps(of_kind, True)
            if name != ALONE:
                _note_steps(rows, f"{name}: decode steps beside {what}", busy, quiet, alone)
        rows.add(
            f"{name}: decode steps beside no transfer",
            MEASURED,
            f"p50 {percentile(quiet, 50) * 1e3:.2f} ms, p99 {percentile(quiet, 99) * 1e3:.2f} ms, "
            f"{len(quiet)} steps of {NUM_DECODERS} requests"
            if quiet
            else "no such step",
        )


def _note_steps(
    rows: Rows, what: str, busy: Sequence[Step], quiet: Sequence[Step], alone: Sequence[Step]
) -> None:
    if not busy or not quiet:
        rows.add(what, LEFT_OUT, f"{len(busy)} steps beside transfers, {len(quiet)} beside none")
        return
    ratios = {share: percentile(busy, share) / percentile(quiet, share) for share in (50, 99)}
    is_met = "met" if ratios[99] <= GOAL_P99_RATIO else "NOT MET"
    verdict = is_met if len(busy) >= MIN_STEPS else "too few steps to judge"
    rows.add(
        what,
        MEASURED,
        f"p50 {percentile(busy, 50) * 1e3:.2f} ms ({ratios[50]:.2f} x), p99 "
        f"{percentile(busy, 99) * 1e3:.2f} ms ({ratios[99]:.2f} x; goal {GOAL_P99_RATIO}: "
        f"{verdict}), {len(busy)} steps{_against(busy, alone)}",
    )


def _against(busy: Sequence[Step], alone: Sequence[Step]) -> str:
    if not alone:
        return ""
    ratios = [percentile(busy, share) / percentile(alone, share) for share in (50, 99)]
    return f"; of an engine without a connector p50 {ratios[0]:.2f} x, p99 {ratios[1]:.2f} x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "npu", "cpu"), required=True)
    parser.add_argument("--what", choices=("copies", "engines"), required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("rows", type=Path)
    options = parser.parse_args()
    measure = measure_copies if options.what == "copies" else measure_engines
    os.environ.update({name: os.environ.get(name, value) for name, value in ENGINE_ENVIRON.items()})
    measure(options.device, Rows(options.rows), is_quick=options.quick)


if __name__ == "__main__":
    main()
