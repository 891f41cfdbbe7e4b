# SPDX-License-Identifier: Apache-2.0
"""The byte checks for a GPU run on a CPU, and can fail there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
