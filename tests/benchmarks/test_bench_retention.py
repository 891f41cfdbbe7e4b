# SPDX-License-Identifier: Apache-2.0
"""The retention benchmark on the installed vLLM: tiny cells, and its loop against a plain cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from vllm import envs
from vllm.v1.core.block_pool import BlockPool

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from retention.cells import run_cell  # noqa: E402
from retention.engine import Engine, RecordingTable  # noqa: E402
from retention.layouts import get_layout  # noqa: E402
from retention.serving import DoesNotFitError, Serving  # noqa: E402
from retention.suite import Cell  # noqa: E402
from retention.texts import Library  # noqa: E402
from retention.traces import Trace, TracedRequest  # noqa: E402

LAYOUTS = ("gptoss", "gemma", "dsv4", "mamba")


def cell(layout: str, variant: str = "dense", trace: str = "chat") -> Cell:
    return Cell(layout, trace, "inf", variant, scale=0.1)


def serve(layout: str, trace: Trace, num_blocks: int):
    bench_layout = get_layout(layout)
    return Serving(bench_layout, Engine(bench_layout, num_blocks, None), trace).run()


@pytest.mark.parametrize("layout", LAYOUTS)
class TestCell:
    def test_accounts_for_every_token(self, layout):
        whole = run_cell(cell(layout), None)
        small = run_cell(cell(layout), whole["num_footprint_blocks"] // 2)
        for result in (whole, small):
            assert 0 < result["hit_tokens"] < result["prompt_tokens"]
            assert result["computed_tokens"] >= result["prompt_tokens"] - result["hit_tokens"]
            assert min(result["losses"].values()) >= 0
        assert whole["losses"]["evicted"] == whole["num_evictions"] == 0
        assert whole["num_preemptions"] == 0
        assert whole["computed_tokens"] == whole["prompt_tokens"] - whole["hit_tokens"]

    def test_is_exact(self, layout):
        one, other = (run_cell(cell(layout), None) for _ in range(2))
        times = {"scheduler_s", "cell_s"}
        assert {k: v for k, v in one.items() if k not in times} == {
            k: v for k, v in other.items() if k not in times
        }


@pytest.mark.parametrize("layout", ["gptoss", "gemma", "dsv4"])
def test_a_dense_infinite_cache_loses_to_granularity_only(layout):
    for trace in ("chat", "documents", "edited", "lognormal"):
        losses = run_cell(cell(layout, trace=trace), None)["losses"]
        assert losses["never_kept"] == losses["look_ahead"] == losses["evicted"] == 0


@pytest.mark.skipif(
    "VLLM_PREFIX_CACHE_RETENTION_INTERVAL" not in envs.environment_variables,
    reason="this vLLM has no retention of its own",
)
def test_stock_interval_zero_never_keeps_what_documents_share():
    result = run_cell(cell("gptoss", "stock:0", trace="documents"), None)
    assert result["losses"]["never_kept"] > result["prompt_tokens"] / 2
    assert result["losses"]["evicted"] == 0


@pytest.mark.parametrize("variant", ["interval:0", "adaptive"])
def test_what_the_package_evicts_or_never_kept_adds_up(variant):
    """Its caching is recorded, whichever way it takes into the pool's table."""
    whole = run_cell(cell("gptoss"), None)
    result = run_cell(cell("gptoss", variant), whole["num_footprint_blocks"] // 3)
    lost_tokens = whole["hit_tokens"] - result["hit_tokens"]
    losses = result["losses"]
    assert result["num_evictions"] > 0
    assert losses["granularity"] == whole["losses"]["granularity"]
    assert losses["never_kept"] + losses["evicted"] == lost_tokens


def test_a_small_pool_evicts():
    whole = run_cell(cell("gptoss"), None)
    small = run_cell(cell("gptoss"), whole["num_footprint_blocks"] // 3)
    assert small["losses"]["evicted"] > 0 and small["num_evictions"] > 0
    assert small["losses"]["never_kept"] == 0
    assert small["hit_tokens"] < whole["hit_tokens"]
    # Every layer's blocks are in the pool at some time, whatever its size.
    assert small["num_footprint_blocks"] == whole["num_footprint_blocks"]


def test_a_pool_can_be_too_small():
    assert run_cell(cell("gptoss"), 50).get("does_not_fit")
    text = Library("one").write(16000)
    trace = Trace("one", (TracedRequest(text.cut(7000), text, 0),))
    with pytest.raises(DoesNotFitError):  # the prompt fits, the answer does not
        serve("gptoss", trace, 2 * 7000 // 16 + 20)


def test_requests_that_decode_preempt_each_other():
    texts = [Library(f"text {number}").write(4000) for number in range(6)]
    trace = Trace("long answers", tuple(TracedRequest(t.cut(1000), t, 0) for t in texts))
    outcome = serve("gptoss", trace, 900)
    assert outcome.num_preemptions > 0
    assert outcome.readmission_tokens > 6000
    assert outcome.prompt_tokens == 6000 and outcome.hit_tokens == 0
    assert serve("gptoss", trace, 9000).computed_tokens == 6000


def test_the_table_counts_what_a_pool_does():
    """Against the pool's own methods: duplicates of a block, and dropping them one by one."""
    pool = BlockPool(num_gpu_blocks=10, enable_caching=True, hash_block_size=16)
    table = RecordingTable()
    pool.cached_block_hash_to_block._cache = table
    key = bytes(32) + (3).to_bytes(4, "big")
    blocks = pool.get_new_blocks(3)
    for block in blocks:
        pool.cached_block_hash_to_block.insert(key, block)
    assert table.num_cached_by_group() == {3: 3}
    for dropped, block in enumerate(blocks, 1):
        pool.cached_block_hash_to_block.pop(key, block.block_id)
        assert table.num_dropped == dropped
        assert table.num_cached_by_group().total() == 3 - dropped
    assert table.ever_cached == {key}


def test_runs_as_a_command(tmp_path):
    arguments = ["--layout", "gptoss", "--trace", "chat", "--pool", "0.3", "--scale", "0.05"]
    arguments += ["--variant", "dense", "--variant", "interval:0", "--out", str(tmp_path)]
    command = [sys.executable, str(ROOT / "benchmarks/retention/run.py"), *arguments, "--resume"]
    first, second = (
        subprocess.run(command, cwd=tmp_path, check=True, text=True, stdout=subprocess.PIPE).stdout
        for _ in range(2)
    )
    assert first.count("hit ") == 3
    # The second run takes over what the first one found, times included.
    assert [line for line in first.splitlines() if "hit " in line] == [
        line for line in second.splitlines() if "hit " in line
    ]
    cells = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert [c["cell"]["variant"] for c in cells] == ["dense", "dense", "interval:0"]
    assert "| chat | 30% |" in (tmp_path / "table.md").read_text()
