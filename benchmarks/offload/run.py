# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Measures KV to host memory and back: KvextConnector, LMCache's server, and the limit.

    python benchmarks/offload/run.py [--quick] [--model M] [--contender C] [--out FOLDER]

--model and --contender may be repeated. Without one of them, all of its values are measured. Every
contender has an engine in its own process, with the model on one CPU. All engines run at the same
time and take turns, prompt by prompt, so that other load of the machine affects them equally. A
ratio is the median over the rounds. A prompt is sent cold, and sent again when only host memory has
its KV. Then other requests decode while long prompts come one after the other. The KV of a long
prompt is on the device, in host memory, or nowhere.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Modules are found by their full names below benchmarks/, not by short names in this folder.
sys.path[0] = str(ROOT / "benchmarks")

from common.cpu_engine import ENVIRON  # noqa: E402
from common.models import MODELS, BenchModel  # noqa: E402
from common.processes import processes  # noqa: E402
from common.report import parser, write  # noqa: E402

from offload.contenders import ALONE, BESIDE_COPIES, Contender, contenders  # noqa: E402
from offload.engine import cold_and_warm, start, visited  # noqa: E402
from offload.limit import StreamingCopy  # noqa: E402
from offload.report import Measured, lines  # noqa: E402
from offload.server import LMCacheServer, failures, free_ports  # noqa: E402
from offload.workload import (  # noqa: E402
    NUM_DECODERS,
    OFFLOADED_TOKENS,
    PROMPT_TOKENS,
    Prompt,
    Visit,
)

_BLOCK_TOKENS = 128
"""The default block size of vLLM's CPU platform."""

_DECODER_BLOCKS = 4
_SPARE_BLOCKS = 44
STORED_VISITORS = 6
"""The number of visitors whose KV is in host memory. Before a visitor comes again, others have
taken its blocks on the device."""

NEW_SEED = 1_000_000


ENGINE_ENVIRON = {**ENVIRON, "LMCACHE_TRACK_USAGE": "false", "HF_HUB_OFFLINE": "1"}


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__, "bench-offload")
    names = [contender.name for contender in contenders(1, (1, 2), "")]
    options.add_argument("--model", action="append", choices=MODELS)
    options.add_argument("--contender", action="append", choices=names)
    options.add_argument("--prompts", type=int, default=9, help="rounds of prompts, at least 5")
    options.add_argument("--rounds", type=int, default=4, help="rounds of decoding")
    options.add_argument("--visits", type=int, default=20, help="in one round of decoding")
    options.add_argument("--host-gib", type=float, default=3, help="host memory of each contender")
    found = options.parse_args()
    if found.quick:
        found.prompts = 5
        found.rounds = 1
        found.visits = 10
    return found


class EngineProcess:
    """The engine of a contender in its own process, with the model on one CPU."""

    def __init__(
        self,
        contender: Contender,
        model: Path,
        num_blocks: int,
        cpu: int,
        log: Path,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the engine. ``options`` are further arguments of ``LLM``."""
        self.contender = contender
        binding = {"VLLM_CPU_OMP_THREADS_BIND": str(cpu), "OMP_NUM_THREADS": "1"}
        self._process = processes(1, {**ENGINE_ENVIRON, **binding, **contender.environ})
        self._process_id = self._process.submit(os.getpid).result()
        self._process.submit(start, contender, str(model), num_blocks, log, options or {}).result()

    def prompt(self, seed: int, offloaded_tokens: int = OFFLOADED_TOKENS) -> Prompt:
        """Ask a prompt cold, and then warm."""
        return self._process.submit(cold_and_warm, seed, offloaded_tokens).result()

    def visits(self, seeds: Sequence[int]) -> list[Visit]:
        """Ask visitors one after the other, while other requests decode."""
        return self._process.submit(visited, seeds).result()

    def stop(self) -> None:
        """Kill the process. LMCache then leaves its pages in /dev/shm, which are deleted."""
        os.kill(self._process_id, signal.SIGKILL)
        self._process.shutdown()
        for segment in Path("/dev/shm").glob(f"lmcache_kv_{self._process_id}_*"):
            segment.unlink(missing_ok=True)


def blocks_of(model: BenchModel) -> int:
    """The blocks for the decoding requests and one prompt, the null block, and spare blocks.

    With the spare blocks, a connector holds less than half of all blocks for a store.
    """
    prompt_blocks = -(-PROMPT_TOKENS // _BLOCK_TOKENS)
    of_group = prompt_blocks + NUM_DECODERS * _DECODER_BLOCKS + _SPARE_BLOCKS
    return 1 + model.num_groups * of_group


@contextlib.contextmanager
def running(
    chosen: Sequence[Contender], model: BenchModel, folder: Path, logs: Path
) -> Iterator[tuple[list[EngineProcess], dict[str, LMCacheServer]]]:
    """Start the engines, and the servers by the name of their contender."""
    servers: dict[str, LMCacheServer] = {}
    engines: list[EngineProcess] = []
    # The last CPU is used, because a machine's own work mostly runs on the first CPU.
    cpu = max(os.sched_getaffinity(0))
    try:
        for number, contender in enumerate(chosen):
            if contender.server_options is not None:
                log = logs / f"server-{number}.log"
                servers[contender.name] = LMCacheServer(contender.server_options, log)
            started_s = time.monotonic()
            log = logs / f"engine-{number}.log"
            engines.append(EngineProcess(contender, folder, blocks_of(model), cpu, log))
            print(f"[{time.monotonic() - started_s:.0f} s] {contender.name}", flush=True)
        yield engines, servers
    finally:
        for engine in engines:
            engine.stop()
        for server in servers.values():
            server.stop()


def measure(
    model: BenchModel, chosen: Sequence[Contender], arguments: argparse.Namespace
) -> Measured:
    """Measure everything for one model."""
    print(f"\n{model.name}: {blocks_of(model)} blocks", flush=True)
    measured = Measured.of(model)
    served = [each for each in chosen if each.serves_groups or model.num_groups == 1]
    for contender in chosen:
        if contender not in served:
            measured.notes.append(f"{contender.name} does not serve several KV cache groups")
    copy = StreamingCopy(measured.kv_bytes)
    with tempfile.TemporaryDirectory() as folder:
        model.write(Path(folder))
        with running(served, model, Path(folder), arguments.out) as (engines, servers):
            measure_prompts(measured, engines, copy, arguments.prompts)
            for round_number in range(arguments.rounds):
                print(f"decoding, load average {os.getloadavg()[0]:.1f}", flush=True)
                # The order alternates, because the first engine may find a quieter machine.
                turn = engines[:: -1 if round_number % 2 else 1]
                for engine in turn:
                    measure_decoding(measured, engine, copy, round_number, arguments.visits)
            for name, server in servers.items():
                failed = failures(server.read_log())
                measured.notes += [f"{name}, server: {line}" for line in failed]
    return measured


def measure_prompts(
    measured: Measured, engines: Sequence[EngineProcess], copy: StreamingCopy, rounds: int
) -> None:
    """Measure prompts. The first round does not count, because it uses much memory first."""
    for seed in range(rounds + 1):
        limit_s = {threads: copy.run_s(threads) for threads in (1, 2)}
        # In each round, another engine comes first.
        first = seed % len(engines)
        turn = [*engines[first:], *engines[:first]]
        found = {engine.contender.name: engine.prompt(seed) for engine in turn}
        print(f"round {seed}, load average {os.getloadavg()[0]:.1f}", flush=True)
        for name in (engine.contender.name for engine in engines):
            prompt = found[name]
            left_out = prompt.why_not if name != ALONE else None
            print(
                f"  {name:<40} cold {prompt.cold_s:6.2f} s  warm {prompt.warm_s:6.3f} s  store "
                f"{prompt.store.seconds:6.3f} s  load {prompt.load.seconds:6.3f} s  "
                f"{f'left out: {left_out}' if left_out else ''}",
                flush=True,
            )
            if seed:
                measured.prompts.setdefault(name, []).append(prompt)
        for threads, seconds in limit_s.items():
            measured.limit_s.setdefault(threads, []).append(seconds)


def measure_decoding(
    measured: Measured,
    engine: EngineProcess,
    copy: StreamingCopy,
    round_number: int,
    num_visits: int,
) -> None:
    """Measure visitors whose KV is in host memory, then on the device, and new visitors."""
    name = engine.contender.name
    num_new = num_visits // 4
    new = [NEW_SEED + round_number * num_new + number for number in range(num_new)]
    if name != ALONE:
        # Each visitor comes twice. The second time, its KV is on the device.
        twice = [number // 2 % STORED_VISITORS for number in range(2 * num_visits)]
        add_visits(measured, name, engine.visits(twice))
    add_visits(measured, name, engine.visits(new))
    if name == ALONE:
        # The first visit computes the prompt on the device.
        local = [0] * (1 + num_visits)
        add_visits(measured, name, engine.visits(local)[1:])
        with copy.repeated(min(os.sched_getaffinity(0))):
            add_visits(measured, BESIDE_COPIES, engine.visits(local)[1:])


def add_visits(measured: Measured, name: str, visits: Sequence[Visit]) -> None:
    """Add visits by their kind."""
    for visit in visits:
        kind = visit.kind
        if kind is None:
            measured.notes.append(
                f"{name}: a visit left out that hit {visit.hit_tokens} tokens, {visit.loads} loads"
            )
        else:
            measured.visits.setdefault(name, {}).setdefault(kind, []).append(visit)


def main() -> None:
    # SIGTERM ends the program like an exit, so that engines and servers are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.out = arguments.out.resolve()
    shm_name = f"kvext_bench_{os.getpid()}"
    everyone = contenders(arguments.host_gib, free_ports(2), shm_name)
    names = arguments.contender or [contender.name for contender in everyone]
    chosen = [contender for contender in everyone if contender.name in names]
    print(
        f"{os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f}; KV of "
        f"{OFFLOADED_TOKENS:,} tokens in bf16, {arguments.host_gib} GiB of host memory each"
    )
    finished = []
    printed = []
    for key in arguments.model or MODELS:
        finished.append(measure(MODELS[key], chosen, arguments))
        printed += lines(finished[-1])
        print(*lines(finished[-1]), sep="\n", flush=True)
    write(arguments.out, printed, finished)


if __name__ == "__main__":
    main()
