# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Two engines at once serve 2,000 requests. Their small folder's files are damaged all the time.

One engine is killed and started again. Every answer equals that of an engine without this package.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.connector.shared_objects import objects
from support.sample import IS_LONG
from support.scenarios import processes
from support.scenarios.processes import CPU, NO_PREFIX_CACHING, PLUGIN_OFF, Plan

from vllm_ascend_kvext.shared_tier.files import files_below

pytestmark = [
    pytest.mark.main_version,
    pytest.mark.skipif(not IS_LONG, reason="only `make test-long` takes the minutes for it"),
]
NUM_REQUESTS = int(os.environ.get("KVEXT_SOAK_REQUESTS", "2000"))
CAPACITY_BYTES = 16 << 20


@dataclass
class Damage:
    """Faults of the files of a folder, and the folder's maximum fill."""

    folder: Path
    rng: random.Random = field(default_factory=lambda: random.Random("soak"))
    counts: Counter[str] = field(default_factory=Counter)
    max_bytes: int = 0

    def act(self) -> None:
        found = objects(self.folder)
        self.max_bytes = max(self.max_bytes, self.taken_bytes())
        if not found:
            return
        path, what = self.rng.choice(found), self.rng.choice(("flipped", "cut", "removed", "shard"))
        try:
            if what == "flipped":
                with path.open("r+b") as file:
                    file.seek(self.rng.randrange(path.stat().st_size))
                    byte = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte[0] ^ 1 << self.rng.randrange(8)]))
            elif what == "cut":
                os.truncate(path, path.stat().st_size // 2)
            elif what == "removed":
                path.unlink()
            else:
                shutil.rmtree(path.parent, ignore_errors=True)
            self.counts[what] += 1
        except (OSError, ValueError, IndexError):
            pass  # The file is gone, or empty.

    def taken_bytes(self) -> int:
        return sum(taken for _, taken, _ in files_below(str(self.folder / "kvext4")))


class Engine:
    """An engine in a process of its own. It answers this many requests."""

    def __init__(self, model: Path, work: Path, folder: Path, requests: int) -> None:
        work.mkdir()
        self.work, self.answers_path = work, work / "answers"
        tier = {"shared_tier": f"file://{folder}", "shared_tier_bytes": CAPACITY_BYTES}
        options: dict[str, Any] = {"seed": work.name, "requests": requests}
        connector = processes.connector(**tier, store_policy="all", host_memory_gib=0.01)
        plan = Plan(
            model,
            ("soak",),
            "shared_faults",
            NO_PREFIX_CACHING | connector,
            options | {"answers": str(self.answers_path)},
        )
        (work / "plans.json").write_text(json.dumps({"engine": plan.on(CPU)}))
        serve = Path(processes.__file__).with_name("serve.py")
        with (work / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *CPU.flags, serve, work / "report.json", work / "plans.json"],
                env={**os.environ, **CPU.environ, "PYTHONHASHSEED": "0"},
                stdout=log,
                stderr=log,
            )

    @property
    def answers(self) -> list[tuple[int, list[int], int]]:
        """The prompt's number, the reply, hit tokens. A killed process may cut its last line."""
        if not self.answers_path.exists():
            return []
        lines = self.answers_path.read_text().split("\n")[:-1]
        return [tuple(json.loads(line)) for line in lines]

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.work / "report.json").read_text())["engine"]
        return found


def test_2000_requests_over_two_engines(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    model, work = model_folder("full"), tmp_path_factory.mktemp("soak")
    plan = Plan(model, ("soak_reference",), "shared_faults", NO_PREFIX_CACHING)
    cold = processes.serve(tmp_path_factory, {"cold": plan}, PLUGIN_OFF)["cold"].answers("soak")
    damage = Damage(work / "tier")
    damage.folder.mkdir(0o700)
    half = NUM_REQUESTS // 2
    engines = [Engine(model, work / str(n), damage.folder, half) for n in range(2)]
    try:
        while any(each.process.poll() is None for each in engines):
            time.sleep(0.05)
            damage.act()
            if len(engines) == 2 and len(engines[0].answers) >= half // 2:
                engines[0].process.kill()
                engines[0].process.wait()
                num_left = half - len(engines[0].answers)
                engines.append(Engine(model, work / "2", damage.folder, num_left))
    finally:
        for each in engines:
            each.process.kill()
            each.process.wait()
    answers = [answer for each in engines for answer in each.answers]
    counted: Counter[str] = Counter()
    for each in engines[1:]:
        assert "error" not in each.report, each.report
        assert set(each.report["left"].values()) == {0}, each.report["left"]
        counted.update(each.report["own"])
    wrong = [(number, reply) for number, reply, _ in answers if reply != cold[number].reply]
    summary = {
        "answers": len(answers),
        "hit": sum(hit_tokens > 0 for *_, hit_tokens in answers),
        "hit tokens": sum(hit_tokens for *_, hit_tokens in answers),
        "wrong": len(wrong),
        "most bytes of capacity": round(damage.max_bytes / CAPACITY_BYTES, 4),
        "bytes at the end": round(damage.taken_bytes() / CAPACITY_BYTES, 4),
        **damage.counts,
        **{name: value for name, value in counted.items() if "shared_" in name and value},
        "got bytes": counted["transfer_bytes.get"],
        "put bytes": counted["transfer_bytes.put"],
    }
    print(json.dumps(summary, indent=1))
    assert len(answers) >= NUM_REQUESTS - 4 and not wrong
    assert damage.max_bytes <= CAPACITY_BYTES
    for name in ("broken", "absent"):
        assert counted[f"shared_failures.get_{name}"] > 0, summary
    assert min(damage.counts.values()) > 0 and summary["hit"] > NUM_REQUESTS / 4
