# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A shared tier fails while a real engine serves. All answers come, and equal a cold engine's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.connector import bad_folders
from support.connector.shared_objects import objects
from support.sample import IS_LONG
from support.scenarios import processes
from support.scenarios.answers import LOGPROB_TOLERANCE, Served
from support.scenarios.processes import CPU, NO_PREFIX_CACHING, PLUGIN_OFF, Plan
from support.scenarios.shared_faults import FAULTS, HITTING, PROMPT_TOKENS

pytestmark = pytest.mark.main_version
SEED = {"PYTHONHASHSEED": "0"}
HITS = [(length - 1) // CPU.block_tokens * CPU.block_tokens for length in PROMPT_TOKENS]


class Folder:
    """A model and a folder."""

    def __init__(self, model: Path, folders: pytest.TempPathFactory) -> None:
        self.model, self.folders = model, folders
        self.path = folders.mktemp("tier")

    def plan(self, scenario: str, is_shared: bool = True, **options: Any) -> Plan:
        tier = {"shared_tier": f"file://{self.path}", "store_policy": "all"}
        engine = NO_PREFIX_CACHING | (processes.connector(**tier) if is_shared else {})
        options = {"folder": str(self.path), **options}
        return Plan(self.model, (scenario,), "shared_faults", engine, options)

    def serve(self, scenario: str, **options: Any) -> Served:
        plans = {"engine": self.plan(scenario, **options)}
        return processes.serve(self.folders, plans, SEED)["engine"]


@pytest.fixture(scope="module")
def folder(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A folder in which an engine has stored the prompts that are sent during the faults."""
    found = Folder(model_folder("full"), tmp_path_factory)
    found.serve("store").check_nothing_is_left()
    return found


@pytest.fixture(scope="module")
def reference(folder: Folder) -> Served:
    plan = folder.plan("store", is_shared=False)
    return processes.serve(folder.folders, {"reference": plan}, PLUGIN_OFF)["reference"]


@pytest.fixture(scope="module")
def served(folder: Folder) -> Served:
    if not bad_folders.can_mount(folder.folders.mktemp("mount")):
        pytest.skip("needs root, and the permission to mount FUSE and tmpfs")
    measured = os.environ.get("KVEXT_FAULTS")
    found = folder.serve("faults", measures=bool(measured))
    if measured:  # This writes how long requests and the scheduler waited.
        Path(measured).write_text(json.dumps(found.report["facts"], indent=1))
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_answers_are_a_cold_engines(served: Served, reference: Served, fault: str) -> None:
    served.check_equal(reference, [fault], LOGPROB_TOLERANCE)
    hits = served.hit_tokens(fault)
    assert hits == (HITS if fault in HITTING else [0] * len(HITS)), served.report["facts"][fault]


def test_nothing_is_left_behind_faults(served: Served) -> None:
    served.check_nothing_is_left()


SEEN = {
    "flipped": "get_broken",
    "cut": "get_broken",
    "longer": "get_broken",
    "another's": "get_broken",
    "removed before gets": "get_absent",
    "evicted before gets": "get_absent",
    "no permission": "put_unreachable",
    "disk full": "put_unreachable",
}


def test_faults_are_counted(served: Served) -> None:
    for fault, reason in SEEN.items():
        counted = served.report["facts"][fault]["counted"]
        assert counted[f"shared_failures.{reason}"] > 0, fault
    facts = served.report["facts"]
    assert facts["lookups hang"]["counted"]["shared_requests.late"] == 1
    assert facts["gets hang"]["counted"]["shared_requests.given_up"] == 1


@pytest.mark.parametrize(
    "fault", ["notes have changed places", "folders in places", "pipes in places"]
)
def test_what_is_wrong_in_a_place_is_no_fault_of_the_tier(served: Served, fault: str) -> None:
    counted = served.report["facts"][fault]["counted"]
    assert counted["shared_requests.paused"] == 0 and counted["shared_requests.absent"] > 0
    assert not any(value for key, value in counted.items() if "shared_failures" in key)


@pytest.mark.skipif(not IS_LONG, reason="only `make test-long` starts two more engines")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
@pytest.mark.parametrize("call", ["get", "lookup"])
def test_an_engine_that_dies_or_stops_in_a_get_or_a_lookup_harms_nobody(
    call: str, how: signal.Signals, folder: Folder, reference: Served
) -> None:
    work = folder.folders.mktemp("stuck")
    plan = folder.plan("stuck", call=call, mark=str(work / "mark")).on(CPU)
    (work / "plans.json").write_text(json.dumps({"engine": plan}))
    files = objects(folder.path)
    serve = Path(processes.__file__).with_name("serve.py")
    with (work / "log").open("w") as log:
        engine = subprocess.Popen(
            [sys.executable, *CPU.flags, serve, work / "report.json", work / "plans.json"],
            env={**os.environ, **CPU.environ, **SEED},
            stdout=log,
            stderr=log,
        )
    try:
        deadline_s = time.monotonic() + 60
        while not (work / "mark").exists():
            assert engine.poll() is None, (work / "log").read_text()[-3000:]
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        engine.send_signal(how)
        served = folder.serve("store")
    finally:
        engine.kill()
        engine.wait()
    served.check_equal(reference, FAULTS, LOGPROB_TOLERANCE)
    served.check_nothing_is_left()
    assert all(served.hit_tokens(fault) == HITS for fault in FAULTS)
    assert {path.name for path in files} <= {path.name for path in objects(folder.path)}
