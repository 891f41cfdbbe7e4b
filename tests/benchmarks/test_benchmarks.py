# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The parts of each benchmark run once on their smallest input, and print their tables."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import host_memory_index
import key_rotation
import page_transfer
from blending import learned, steady
from blending.engine import serve
from blending.modes import FULL, HEADS_16, behind_context
from blending.prompts import Prompt, Workload
from blending.questions import Kind
from blending.tiny import in_engine
from blending.tiny.model import CHECK_LAYERS, write_folder
from common.cpu_engine import ENVIRON
from common.models import write_qwen3
from common.processes import processes
from holes import admission
from holes.cells import ENDLESS_BYTES, Bench
from holes.results import Variant as HoleVariant
from holes.traces import TRACES, trace_named
from host_tier import results as host_results
from host_tier.cells import run_row
from offload import engine as offload_engine
from offload.contenders import contenders
from offload.workload import PROMPT_TOKENS
from retention.cells import layout_named, run_cell
from retention.engine import Engine
from retention.suite import Cell
from retention.traces import WRITERS, write_trace
from retention.variants import Variant, entered, installed
from shared_tier import contenders as file_contenders
from shared_tier import geometry as files_geometry
from support.upstream_version import IS_SINCE_0_30
from transfer import geometry
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from vllm_ascend_kvext.store.entries import Entry
from vllm_ascend_kvext.store.eviction import EvictionOrder, Priority

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a script as a user does, and return its output."""

    def run_script(script: str, *arguments: str) -> str:
        command = [sys.executable, str(BENCHMARKS / script), *arguments]
        finished = subprocess.run(command, cwd=tmp_path, check=True, text=True, capture_output=True)
        return finished.stdout

    return run_script


def cell(layout: str, variant: str = "dense") -> Cell:
    return Cell(layout, "chat", "inf", variant, scale=0.1)


class TestRetention:
    @pytest.mark.parametrize("layout", ["gptoss", "mamba"])
    def test_a_cell_accounts_for_every_token(self, layout: str) -> None:
        whole = run_cell(cell(layout), None)
        num_blocks = whole["num_footprint_blocks"] // 3
        for variant in ("dense", "adaptive"):
            small = run_cell(cell(layout, variant), num_blocks)
            losses = small["losses"]
            assert small["num_evictions"] > 0
            assert losses["granularity"] == whole["losses"]["granularity"]
            if layout == "gptoss":
                lost_tokens = whole["hit_tokens"] - small["hit_tokens"]
                assert losses["never_kept"] + losses["evicted"] == lost_tokens
        assert whole["num_evictions"] == whole["num_preemptions"] == 0
        assert whole["computed_tokens"] == whole["prompt_tokens"] - whole["hit_tokens"]
        assert run_cell(cell(layout), 50).get("does_not_fit")

    def test_a_chunk_ends_where_retention_asks_for_a_state(self) -> None:
        layout = layout_named("mamba")
        unit_tokens = layout.unit_tokens
        # A request with the same prompt resumes one unit before its end.
        request = Request(
            request_id="request",
            prompt_token_ids=list(range(2 * unit_tokens)),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
        )
        with entered(Variant.parse("adaptive")):
            engine = Engine(layout, 100)
            assert engine.chunk(request, 2 * unit_tokens) == unit_tokens

    def test_runs_as_a_command(self, run: Run, tmp_path: Path) -> None:
        arguments = ["--layout", "gptoss", "--trace", "chat", "--pool", "0.3", "--scale", "0.05"]
        arguments += ["--jobs", "1"]
        printed = run("retention/run.py", *arguments, "--variant", "dense", "--out", str(tmp_path))
        assert printed.count("hit ") == 2
        assert len(json.loads((tmp_path / "results.json").read_text())) == 2
        assert "| chat | 30% |" in (tmp_path / "table.txt").read_text()

    def test_soak(self, run: Run) -> None:
        head, line = run("retention/soak.py", "--case", "siblings", "--requests", "80").splitlines()
        assert head.startswith("case") and line.startswith("siblings") and "%" in line


def test_workers_take_the_host_memory_that_was_asked_for(run: Run, tmp_path: Path) -> None:
    arguments = ["--gib", "0.1", "--workers", "2", "--out", str(tmp_path)]
    printed = run("host_memory_taken.py", *arguments).splitlines()
    assert [line.split()[1] for line in printed] == ["kind", "apart", "shared"]
    for row in json.loads((tmp_path / "cpu.json").read_text()):
        assert 0.98 < row["taken"] < 1.05 and abs(row["left"]) < 0.05


@pytest.mark.parametrize("name", [*WRITERS, *TRACES])
def test_traces_are_the_same_every_time(name: str) -> None:
    def shape(write: Callable) -> list[tuple[object, ...]]:
        requests = write(name, 0.1).requests
        return [(r.answered.tokens(), len(r.prompt), r.delay_steps, r.after) for r in requests]

    write = write_trace if name in WRITERS else trace_named
    assert shape(write) == shape(write)
    assert len(shape(write)) > 10


def test_a_host_tier_brings_hits() -> None:
    row = run_row("gptoss", "chat", 0.1, (0.2, 0.4))
    assert row.is_good, host_results.line(row)
    device, host = (row.results[each].hit_rate for each in list(host_results.Variant)[::2])
    assert host > device + 0.1


def _priority_of_end(_: EvictionOrder, entry: Entry, *__: int) -> Priority:
    end_tokens = entry.piece.end_tokens
    return Priority(False, end_tokens, entry.use, end_tokens, entry.piece.kind, entry.number)


class TestHoles:
    def test_tokens_in_holes_are_computed_and_nothing_else_is(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench = Bench("full", "questions", 0.1, "second_touch")
        # Beginnings of prompts are evicted first. Otherwise there would hardly be a hole.
        monkeypatch.setattr(EvictionOrder, "_is_blocked", lambda *_: False)
        monkeypatch.setattr(
            EvictionOrder, "removable_to", lambda _, entry: entry.piece.first_tokens
        )
        monkeypatch.setattr(EvictionOrder, "priority", _priority_of_end)
        with installed(None):
            endless = bench.serve(HoleVariant.PREFIX, ENDLESS_BYTES)
            prefix, holes = (
                bench.serve(variant, endless.held_bytes // 2)
                for variant in (HoleVariant.PREFIX, HoleVariant.HOLES)
            )
        assert prefix.hole_tokens == 0 < holes.hole_tokens
        assert endless.computed_tokens < holes.computed_tokens < prefix.computed_tokens
        assert not prefix.num_leaks + holes.num_leaks

    def test_admission_is_timed_beside_that_of_stock(self, tmp_path: Path) -> None:
        admission.main(["--quick", "--rounds", "3", "--out", str(tmp_path)])
        rows = json.loads((tmp_path / "admission.json").read_text())
        assert [row["num_holes"] for row in rows] == [0, 0, 0, 2, 2, 7, 7]
        assert rows[0]["ratio"] == 1 and all(row["match_us"] > 0 for row in rows)


@pytest.fixture
def small_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "ARENA_BYTES", 128 << 20)
    monkeypatch.setattr(geometry, "HOST_BYTES", 64 << 20)


@pytest.mark.usefixtures("small_arena")
def test_transfers_are_compared() -> None:
    layout = geometry.LAYOUTS[1]
    memory = geometry.ColdMemory(layout)
    names = (page_transfer.MEMCPY, page_transfer.LIMIT)
    copies = [page_transfer.PlainCopy(name, name is names[1]) for name in names]
    methods = [page_transfer.PageTransfer(page_transfer.OURS), page_transfer.TorchPerPlane()]
    page_transfer.check(memory, methods)
    results = [
        result
        for threads in (1, 2)
        for is_random in (True, False)
        for result in page_transfer.measure(memory, [*copies, *methods], is_random, threads, 2)
    ]
    assert len(list(page_transfer.lines(results, layout))) == 2 + 4
    keys = key_rotation.keys_of(key_rotation.RowDtype.FLOAT32)[0]
    memory = geometry.ColdMemory(keys.layout)
    key_rotation.fill(memory, key_rotation.torch.float32)
    key_rotation.check(memory, keys)
    assert "x the plain copy" in key_rotation.target([*key_rotation.measure(memory, keys, 1, 2)])


def test_files_are_compared(tmp_path: Path) -> None:
    """If vLLM has a file tier, it is compared, too."""
    geometry = files_geometry.Geometry("tiny", (3 << 16, 1 << 16), 1 << 15, 1 << 16, 2)
    host = file_contenders.host_memory(geometry.prompt_bytes * geometry.num_prompts)
    memory = file_contenders.memory_of(host)
    for each in (
        file_contenders.Ours(geometry, host, tmp_path / "ours"),
        file_contenders.PlainFiles(geometry, memory, tmp_path / "plain"),
        file_contenders.Memcpy(geometry, memory),
        *([file_contenders.VllmFiles(geometry, tmp_path / "vllm")] if IS_SINCE_0_30 else []),
    ):
        kept = bytes(memory)
        assert each.move("put", range(2)) > 0
        if each.name == "ours, verified":
            memory[:] = bytes(len(memory))
        assert each.move("get", [1]) > 0 and each.move("get", range(2)) > 0
        assert bytes(memory) == kept
        each.close()


def test_the_index_of_host_memory_has_a_key_for_each_unit() -> None:
    of_16, of_128, *_ = host_memory_index.models()
    rows = [host_memory_index.measure(model, 2_000, 1 << 30) for model in (of_16, of_128)]
    small, large = (row for row in rows if row is not None)
    assert (small.unit_tokens, large.unit_tokens) == (16, 128)
    assert 2 < small.index_bytes_per_gib / large.index_bytes_per_gib < 8
    # The index takes more than its keys alone: 32 bytes for each unit of a GiB of rows.
    keys_per_gib = (1 << 30) / (host_memory_index.MODELS["full"].token_bytes * 36 * 16)
    assert small.index_bytes_per_gib > 32 * keys_per_gib


def test_host_bytes_are_printed(run: Run) -> None:
    assert "MLA, 3 layers" in run("host_bytes.py")


@pytest.mark.main_version
def test_engines_blend_learn_and_offload(tmp_path: Path) -> None:
    """Tiny models on the real engine. The calls of each benchmark are made once."""
    folder = tmp_path / "model"
    write_folder("window", 1, folder)
    document = tuple(range(20, 70))
    prompt = Prompt((0, *document, 5, 6), ((1, 51),), Kind.FACT, 0, "")
    workload = Workload((document,), (prompt,))
    environ = ENVIRON | learned.ONE_THREAD
    with processes(1, environ) as process:
        full = process.submit(serve, FULL, str(folder), workload, None, 512).result()
        heads = process.submit(serve, HEADS_16, str(folder), workload, full, 512).result()
        mode = in_engine.question(4, check_layer=3)
        question = process.submit(in_engine.serve, mode, "window", 1, 24).result()
        of_context = behind_context(in_engine.heads("heads 4", 4))
        leaking = process.submit(in_engine.serve, of_context, "full", 2, 96).result()
        asking = in_engine.default(4, CHECK_LAYERS["full"][2])
        asked = process.submit(in_engine.serve, asking, "full", 2, 96).result()
    # If a context contradicts the prompt, the context may win. The benchmark shows this, and asking
    # the question prevents it.
    assert leaking.of_context > 0.05 and asked.of_context == 0 and asked.right > 0.9
    assert len(heads.answers[0].top) == len(full.answers[0].tokens)
    assert full.answers[0].computed_tokens == len(prompt.tokens)
    # The sink and the question are computed twice, and at most 4 runs of each document.
    assert 6 + 8 * 3 <= question.computed_tokens <= 6 + 8 * 4 and question.right == 1
    write_qwen3(tmp_path / "qwen3", num_layers=2)
    texts = learned.make_texts(6, 3)
    with processes(1, environ) as process:
        process.submit(learned.start, learned.LEARNED, str(tmp_path / "qwen3"), texts).result()
        first, _, third = (
            process.submit(learned.serve, prompts, 1).result() for prompts in texts.rounds
        )
    assert first.hit_share == 0 and third.hit_share > 0.7
    (row,) = steady.measure(steady.make_texts(1, 20), str(tmp_path / "qwen3"), 0.5)
    assert row.rounds[steady.LEARNED].hit_share > row.rounds[steady.PREFIX_CACHING].hit_share
    assert steady.line(row)
    ours = contenders(0.5, (1, 2), "")[0]
    with processes(1, environ) as process:
        arguments = (ours, str(tmp_path / "qwen3"), 200, tmp_path / "log.txt", {})
        process.submit(offload_engine.start, *arguments).result()
        found = process.submit(offload_engine.cold_and_warm, 0).result()
    assert found.why_not is None and found.warm_hit_tokens < PROMPT_TOKENS
