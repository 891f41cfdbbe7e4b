# SPDX-License-Identifier: Apache-2.0
"""The same random workloads in several worlds: fresh processes that differ in what is patched.

``python -m support.scheduler.worlds WORLD`` runs all workloads of a world and prints one JSON line
for each; `run_world` and `explain_difference` do so from a test.
"""

from __future__ import annotations

import argparse
import enum
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from vllm_ascend_kvext.features import DEFAULTS, FEATURES
from vllm_ascend_kvext.settings import DISABLE_VARIABLE, Mode, Settings

INTERVAL_VARIABLE = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"
_TESTS = Path(__file__).parents[2]


class World(enum.Enum):
    """What a process has of us."""

    STOCK = "stock"
    """vLLM loads no plugin."""

    DISABLED = "disabled"
    """vLLM loads the plugin; what is on by default is switched off, nothing configured."""

    DEFAULT = "default"
    """vLLM loads the plugin; nothing is configured."""

    INSTALLED = "installed"
    """The same, and the patches of all features are in place; no interval is set."""

    INTERVAL_0 = "interval-0"
    """The same with interval 0: the perturbation that a comparison must see."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All workloads of one world.

    Attributes:
        digests: ``Transcript.digest`` per workload.
        defects: Per workload, the defects that it ran into; watched in the stock world only.
        counts: What the workloads exercised, in total.
        patches: Ids of the patches in effect.
        plugin_loaded: Whether vLLM has called the plugin.
    """

    digests: dict[str, str]
    defects: dict[str, frozenset[str]]
    counts: Counter[str]
    patches: tuple[str, ...]
    plugin_loaded: bool


def run_world(world: World, num_seeds: int) -> Outcome:
    """Run every workload of ``num_seeds`` seeds in a fresh process."""
    lines = _spawn(world, "--seeds", str(num_seeds)).splitlines()
    header, *workloads = map(json.loads, filter(lambda line: line.startswith("{"), lines))
    counts: Counter[str] = Counter()
    for workload in workloads:
        counts.update(workload["counts"])
    return Outcome(
        digests={workload["name"]: workload["digest"] for workload in workloads},
        defects={workload["name"]: frozenset(workload["defects"]) for workload in workloads},
        counts=counts,
        patches=tuple(header["patches"]),
        plugin_loaded=header["plugin_loaded"],
    )


def explain_difference(workload: str, one: World, other: World) -> str:
    """Run one workload in two worlds again and name the first decision that differs."""
    from .transcript import first_difference

    transcripts = []
    with tempfile.TemporaryDirectory() as folder:
        for world in (one, other):
            path = Path(folder) / world.value
            _spawn(world, "--workload", workload, "--dump", str(path))
            transcripts.append(pickle.loads(path.read_bytes()))
    difference = first_difference(*transcripts)
    return f"{workload}, {one.value} against {other.value}: {difference}"


def _spawn(world: World, *arguments: str) -> str:
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("VLLM_ASCEND_KVEXT_") and name != INTERVAL_VARIABLE
    }
    environ |= {
        "PYTHONPATH": str(_TESTS),
        "PYTHONHASHSEED": "0",  # vLLM derives its block hashes from it
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_PLUGINS": "" if world is World.STOCK else "ascend_kvext",
    }
    if world is World.DISABLED:
        environ[DISABLE_VARIABLE] = ",".join(feature.name for feature in DEFAULTS)
    if world is World.INTERVAL_0:
        environ[INTERVAL_VARIABLE] = "0"
    command = [sys.executable, "-m", "support.scheduler.worlds", world.value, *arguments]
    process = subprocess.run(command, env=environ, cwd=_TESTS, capture_output=True, text=True)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{process.stderr[-4000:]}")
    return process.stdout


def _enter(world: World) -> dict[str, object]:
    """Make this process the world it is to be, and say what that has come to."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if world in (World.INSTALLED, World.INTERVAL_0):
        from vllm_ascend_kvext.activation import apply_feature

        for feature in FEATURES:
            apply_feature(feature.name)
    plugin_loaded = "vllm_ascend_kvext.activation" in sys.modules
    return {
        "plugin_loaded": plugin_loaded,
        "patches": _patches_in_effect() if plugin_loaded else [],
    }


def _patches_in_effect() -> list[str]:
    from vllm_ascend_kvext.activation import current_findings, survey

    findings = current_findings(survey(Settings(mode=Mode.STRICT)))
    return [finding.patch.id for finding in findings if finding.state.value == "applied"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("world", type=World)
    parser.add_argument("--seeds", type=int, default=1, help="workloads per layout")
    parser.add_argument("--workload", help="run this one only")
    parser.add_argument("--dump", type=Path, help="pickle the last transcript to this file")
    arguments = parser.parse_args()
    print(json.dumps(_enter(arguments.world)))

    from .defects import observed_defects
    from .random_workloads import random_workloads, workload_of
    from .run import run
    from .transcript import Transcript

    chosen = (
        [workload_of(arguments.workload)]
        if arguments.workload
        else random_workloads(range(arguments.seeds))
    )
    observe = observed_defects if arguments.world is World.STOCK else nullcontext
    for workload in chosen:
        with observe() as defects:
            try:
                transcript = run(workload).transcript
            except (AssertionError, RuntimeError) as error:
                # What a defect has come to: the schedule is no longer one that can be executed.
                transcript, digest, counts = Transcript(), f"{type(error).__name__}: {error}", {}
            else:
                digest, counts = transcript.digest(), dict(transcript.counts)
        line = {
            "name": workload.name,
            "defects": sorted(defects or ()),
            "digest": digest,
            "counts": counts,
        }
        print(json.dumps(line))
    if arguments.dump:
        arguments.dump.write_bytes(pickle.dumps(transcript))


if __name__ == "__main__":
    main()
