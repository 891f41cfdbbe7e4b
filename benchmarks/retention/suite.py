# SPDX-License-Identifier: Apache-2.0
"""Runs many cells in several processes, and keeps what they found.

Knows which process a cell needs, not what happens in it; imports nothing of vLLM.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
INFINITE = "inf"
BENCHMARK_SOURCES = ("benchmarks/retention", "tests/support/scheduler/layouts.py", "tests/ascend")
PACKAGE_SOURCES = ("vllm_ascend_kvext", "patches")
OUTSIDE_OF_CELLS = {"run.py", "report.py", "picture.py", "suite.py"}


@dataclass(frozen=True, slots=True)
class Cell:
    """What to run.

    Attributes:
        layout: A layout's name.
        trace: A trace's name, or the path of a file in Mooncake's format.
        pool: Size of the pool as a share of the dense footprint, or ``inf``.
        variant: A variant's name.
        scale: Factor on the size of the trace.
        limit: Number of requests to take of a file.
    """

    layout: str
    trace: str
    pool: str
    variant: str
    scale: float = 1.0
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A cell with what came out.

    Attributes:
        cell: What was run.
        result: See `retention.cells.run_cell`; or ``error``, a traceback.
        key: Equal for equal cells on equal sources and versions.
    """

    cell: Cell
    result: dict
    key: str


@dataclass(frozen=True, slots=True)
class Batch:
    """All cells of one trace on one layout; the first one's footprint sizes the pools.

    Attributes:
        base: Stock vLLM, dense, in an infinite pool.
        others: In the order of running.
    """

    base: Cell
    others: tuple[Cell, ...]


class WorkerError(Exception):
    """A worker process ended."""


class Worker:
    """A process that runs one cell after the other."""

    def __init__(self, python: str, *arguments: str) -> None:
        # A file, not a pipe: nobody reads it while the process lives.
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("worker.py")), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
        )
        self.versions = self._read()

    def run(self, cell: Cell, num_blocks: int | None) -> dict:
        """The cell's result.

        Raises:
            WorkerError: The process ended.
        """
        assert self._process.stdin is not None
        task = json.dumps({"cell": asdict(cell), "num_blocks": num_blocks})
        try:
            self._process.stdin.write(task + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerError(self._last_words()) from error
        return self._read()

    def close(self) -> None:
        self._process.communicate()
        self._complaints.close()

    def _read(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        code = self._process.wait()
        self._complaints.seek(0)
        complaints = self._complaints.read().decode(errors="replace")[-2000:]
        return f"the process that runs cells ended with code {code}: {complaints}"


class Workers:
    """One worker per kind of process, started when first needed."""

    def __init__(self, python_032: str | None) -> None:
        self._python_032 = python_032
        self._by_command: dict[tuple[str, ...], Worker] = {}

    def for_cell(self, cell: Cell) -> Worker:
        """The worker that can run it.

        Raises:
            WorkerError: It cannot be started.
        """
        command = (self._python_032 or sys.executable,) if is_032(cell) else (sys.executable,)
        if is_ascend(cell):
            command += ("--ascend",)
        if command not in self._by_command:
            self._by_command[command] = Worker(*command)
        return self._by_command[command]

    def close(self) -> None:
        for worker in self._by_command.values():
            worker.close()


def is_032(cell: Cell) -> bool:
    return cell.variant.startswith("v032")


def is_ascend(cell: Cell) -> bool:
    return "ascend" in cell.layout


def is_ours(cell: Cell) -> bool:
    return cell.variant.startswith(("interval", "adaptive"))


def batches(
    layouts: Sequence[str],
    traces: Sequence[str],
    pools: Sequence[str],
    variants: Sequence[str],
    scale: float = 1.0,
    limit: int | None = None,
) -> list[Batch]:
    """All combinations that make sense.

    vLLM 0.32 has no vllm-ascend here. In an infinite pool only dense caching, the ceiling, and
    adaptive retention are of interest, unless no other pool is asked for.
    """
    result = []
    for layout in layouts:
        for trace in traces:
            cells = [
                Cell(layout, trace, pool, variant, scale, limit)
                for pool in pools
                for variant in variants
            ]
            base = Cell(layout, trace, INFINITE, "dense", scale, limit)
            others = [
                cell
                for cell in cells
                if cell != base
                and not (is_032(cell) and is_ascend(cell))
                and (
                    cell.pool != INFINITE
                    or cell.variant.startswith("adaptive")
                    or list(pools) == [INFINITE]
                )
            ]
            result.append(Batch(base, tuple(others)))
    return result


def run_batches(
    work: Sequence[Batch],
    num_jobs: int,
    python_032: str | None,
    known: dict[str, dict],
    on_finished: Callable[[Finished], None],
) -> None:
    """Run everything; ``on_finished`` is called once per cell, one call at a time.

    Args:
        work: In the order of starting.
        num_jobs: Processes that run at the same time.
        python_032: Interpreter with vLLM 0.32, for the ``v032`` variants.
        known: Results by key that need not be found again.
        on_finished: Gets each result as soon as it is there.

    Raises:
        WorkerError: A worker process ended.
    """
    tasks: queue.SimpleQueue[Batch] = queue.SimpleQueue()
    for batch in work:
        tasks.put(batch)
    lock = threading.Lock()
    failures: list[Exception] = []

    def work_off() -> None:
        workers = Workers(python_032)
        try:
            while not failures:
                for finished in run_batch(tasks.get_nowait(), workers, known):
                    with lock:
                        on_finished(finished)
        except queue.Empty:
            pass
        except Exception as error:
            failures.append(error)
        finally:
            workers.close()

    threads = [threading.Thread(target=work_off) for _ in range(num_jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def run_batch(batch: Batch, workers: Workers, known: dict[str, dict]) -> Iterator[Finished]:
    """Run one batch's cells one after the other."""
    base = _run(batch.base, None, workers, known)
    yield base
    footprint_blocks = base.result.get("num_footprint_blocks")
    if footprint_blocks is None:
        return
    for cell in batch.others:
        num_blocks = None if cell.pool == INFINITE else round(float(cell.pool) * footprint_blocks)
        yield _run(cell, num_blocks, workers, known)


def _run(cell: Cell, num_blocks: int | None, workers: Workers, known: dict[str, dict]) -> Finished:
    worker = workers.for_cell(cell)
    key = json.dumps([asdict(cell), num_blocks, worker.versions, sources_digest(cell)])
    result = known.get(key) or worker.run(cell, num_blocks)
    return Finished(cell, result, key)


def sources_digest(cell: Cell) -> str:
    """Of what decides about a cell's result; stock vLLM does not depend on this package."""
    digest = hashlib.sha256()
    names = BENCHMARK_SOURCES + (PACKAGE_SOURCES if is_ours(cell) else ())
    for name in names:
        path = ROOT / name
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        for file in files:
            if file.name not in OUTSIDE_OF_CELLS:
                digest.update(file.read_bytes())
    if os.path.isfile(cell.trace):
        digest.update(Path(cell.trace).read_bytes())
    return digest.hexdigest()[:16]
