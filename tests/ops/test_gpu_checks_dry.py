# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The byte checks for a GPU run on a CPU, and can fail there."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gpu import accelerator, check_bytes  # noqa: E402
from gpu.sections import LEFT_OUT, OK, WRONG, Rows  # noqa: E402

from vllm_ascend_kvext.transfer.backend import CpuBackend, Transfer  # noqa: E402

SCRIPT = Path(check_bytes.__file__)


IMPORT_AS_MAIN = """
import runpy, sys
script, folder = sys.argv[1:]
sys.path[:] = [folder, *filter(None, sys.path)]
runpy.run_path(script, run_name="imported")
import brought_along
"""


@pytest.mark.parametrize("name", ["check_bytes", "check_engines", "measure", "rehearse"])
def test_a_script_keeps_the_packages_that_were_brought_along(name: str, tmp_path: Path) -> None:
    """On the machine with a GPU, vLLM and this package are in a folder that PYTHONPATH names."""
    pytest.importorskip("transformers")
    (tmp_path / "brought_along.py").touch()
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    script = SCRIPT.with_name(f"{name}.py")
    ended = subprocess.run(
        [sys.executable, "-c", IMPORT_AS_MAIN, str(script), str(script.parent)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_all_byte_checks_run_on_a_cpu(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows")
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--quick", str(rows.path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = {row.what: row.outcome for row in rows.read()}
    assert set(found.values()) == {OK, LEFT_OUT} and len(found) > 15
    left_out = [what for what, outcome in found.items() if outcome == LEFT_OUT]
    assert all("without a fence" in what for what in left_out)


@pytest.mark.parametrize("fault", ["a run is left out", "a byte too many", "nothing"])
def test_a_wrong_backend_is_seen(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = CpuBackend.run

    def wrong(backend: CpuBackend, transfer: Transfer) -> None:
        if fault == "a run is left out":
            transfer = transfer._replace(runs=transfer.runs[:-1])
        run(backend, transfer)
        if fault == "a byte too many":
            written = transfer.host_tensor if not transfer.direction else transfer.pool_tensors[0]
            written[-1] ^= 255

    monkeypatch.setattr(CpuBackend, "run", wrong)
    rows = Rows(tmp_path / "rows")
    check_bytes.check_transfers(accelerator.HostOnly(), rows, 5)
    outcomes = {row.outcome for row in rows.read() if not row.what.startswith("control")}
    assert outcomes == ({OK} if fault == "nothing" else {WRONG})


def test_rotation_by_another_angle_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turned = check_bytes._turned
    monkeypatch.setattr(
        check_bytes, "_turned", lambda keys, angles, style: turned(keys, -angles, style)
    )
    rows = Rows(tmp_path / "rows")
    check_bytes.check_token_rows(accelerator.HostOnly(), rows)
    wrong = [row.what for row in rows.read() if row.outcome == WRONG]
    assert len(wrong) == 4


@pytest.mark.parametrize(("round_s", "num_rounds"), [(10.0, 6), (40.0, 4), (1000.0, 1)])
def test_steps_are_reported_before_their_section_is_cut_off(
    round_s: float, num_rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    measure = importlib.import_module("gpu.measure")
    clock = SimpleNamespace(now_s=5000.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(measure, "time", clock)
    num_visits = []

    def visits(seeds: Sequence[int]) -> list[Any]:
        num_visits.append(len(seeds))
        clock.now_s += round_s
        return []

    engine = SimpleNamespace(contender=SimpleNamespace(name=measure.OURS), visits=visits)
    rows = Rows(tmp_path / "rows")
    measure.measure_steps(rows, [engine], 6, 8, 4, clock.now_s + 165.0)
    assert num_visits == [10] * num_rounds
    found = {row.what: row.found for row in rows.read()}
    assert f"{measure.OURS}: decode steps beside loads" in found
    left_out = found.get("further rounds of decode steps", "")
    assert left_out.startswith(f"no time was left after {num_rounds}") is (num_rounds < 6)


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize("device", ["cuda", "npu", "cpu"])
def test_sections_name_what_there_is_and_fit_into_the_time(
    device: str, is_quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "path", [*sys.path])
    run, engines = (importlib.import_module(f"gpu.{name}") for name in ("run", "check_engines"))
    assert set(run.ENGINE_CASES) == set(engines.CASES)
    sections = list(run.sections(device, is_quick=is_quick))
    assert all(Path(each.command[1]).is_file() for each in sections)
    options = [[*each.command[2:]] for each in sections]
    cases = [of[of.index("--case") + 1] for of in options if "--case" in of]
    assert cases and set(cases) <= set(engines.CASES)
    max_s = {each.stage: each.max_s for each in sections}
    assert device != "cuda" or sum(max_s.values()) <= run.BUDGET_S
