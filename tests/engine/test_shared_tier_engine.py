# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A shared tier between real engines, which run one after the other, or side by side.

Log-probabilities equal those of an engine without this package. Controls show that wrong bytes
would change them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.connector.shared_objects import forge, objects
from support.sample import IS_LONG
from support.scenarios import processes
from support.scenarios.answers import LOGPROB_TOLERANCE, Served
from support.scenarios.connector import SHARED_LENGTHS, SHARED_TOKENS
from support.scenarios.processes import CPU, NO_PREFIX_CACHING, PLUGIN_OFF, Plan, preloaded

from vllm_ascend_kvext.shared_tier.backend import SEAL_BYTES

SEED = {"PYTHONHASHSEED": "0"}
LABELS = ("shared", "shared, again", "shared, parting", "shared, salted")
MODELS = ("full", "one window")


def floor(num_tokens: int) -> int:
    return num_tokens // CPU.block_tokens * CPU.block_tokens


HITS = [floor(length - 1) for length in SHARED_LENGTHS]


class Sharing:
    """Engines of one model that share a folder, or another tier by its URL."""

    def __init__(self, model: Path, folders: pytest.TempPathFactory, url: str = "") -> None:
        self.model, self._folders = model, folders
        self.folder = folders.mktemp("tier")
        self.url = url or f"file://{self.folder}"

    def plan(self, scenario: str = "shared", model: Path | None = None, **engine: Any) -> Plan:
        options = {"shared_tier": self.url, "store_policy": "all"}
        # In this process, the device's own prefix cache would hide what is got from the tier.
        return Plan(
            model or self.model,
            (scenario,),
            engine=processes.connector(**options) | NO_PREFIX_CACHING | engine,
        )

    def serve(self, environ: Mapping[str, str] = SEED, **plan: Any) -> Served:
        """Start an engine, let it answer, and end it."""
        return processes.serve(self._folders, {"engine": self.plan(**plan)}, environ)["engine"]

    def reference(self) -> Served:
        plan = Plan(self.model, ("shared",), engine=NO_PREFIX_CACHING)
        return processes.serve(self._folders, {"reference": plan}, PLUGIN_OFF)["reference"]

    @contextmanager
    def running(self, scenario: str) -> Iterator[subprocess.Popen[bytes]]:
        """An engine that answers until it is killed. This happens when the block ends."""
        engine = self._start(scenario)
        try:
            yield engine
        finally:
            engine.kill()
            engine.wait()

    def _start(self, scenario: str) -> subprocess.Popen[bytes]:
        work = self._folders.mktemp("engine")
        (work / "plans.json").write_text(json.dumps({"engine": self.plan(scenario).on(CPU)}))
        serve = Path(processes.__file__).with_name("serve.py")
        with (work / "log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, *CPU.flags, serve, work / "report.json", work / "plans.json"],
                env={**os.environ, **CPU.environ, **SEED},
                stdout=log,
                stderr=log,
            )


@pytest.fixture(scope="module", params=MODELS)
def sharing(
    request: pytest.FixtureRequest,
    model_folder: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Sharing]:
    yield Sharing(model_folder(request.param), tmp_path_factory)


@pytest.fixture(scope="module")
def reference(sharing: Sharing) -> Served:
    return sharing.reference()


@pytest.fixture(scope="module")
def first(sharing: Sharing) -> Served:
    """The engine that fills the folder."""
    return sharing.serve()


@pytest.fixture(scope="module")
def second(first: Served, sharing: Sharing) -> Served:
    """Another process, which finds the objects of the first process."""
    return sharing.serve()


def own(served: Served, name: str) -> float:
    return float(served.report["own"][name])


def check(served: Served, reference: Served) -> None:
    served.check_equal(reference, LABELS, LOGPROB_TOLERANCE)
    served.check_nothing_is_left()


def test_the_second_engine_hits_what_the_first_has_stored(
    first: Served, second: Served, reference: Served
) -> None:
    check(first, reference)
    check(second, reference)
    assert first.hit_tokens("shared") == [0] * len(HITS)
    assert second.hit_tokens("shared") == HITS
    assert second.hit_tokens("shared, again") == HITS
    assert second.hit_tokens("shared, parting")[0] >= floor(SHARED_TOKENS)
    assert second.hit_tokens("shared, salted") == [HITS[0]], (
        "the first engine has put this salt's KV"
    )
    assert own(second, "shared_requests.found") == len(HITS) + 2
    assert own(second, "transfer_bytes.get") > 0
    for reason in ("get_absent", "get_broken", "get_unreachable", "put_unreachable"):
        assert own(second, f"shared_failures.{reason}") == 0


@pytest.mark.main_version
@pytest.mark.parametrize("damage", ["zeroed", "swapped"])
def test_wrong_bytes_would_change_answers(
    first: Served, sharing: Sharing, reference: Served, damage: str
) -> None:
    """The control: the seals of the objects fit other bytes."""
    kept = {path: path.read_bytes() for path in objects(sharing.folder)}
    by_size: dict[int, list[Path]] = {}
    for path in kept:
        by_size.setdefault(len(kept[path]), []).append(path)
    for paths in by_size.values():
        for path, other in zip(paths, [*paths[1:], paths[0]], strict=True):
            content = kept[other][:-SEAL_BYTES]
            forge(sharing.folder, path, content if damage == "swapped" else bytes(len(content)))
    try:
        served = sharing.serve()
        assert served.hit_tokens("shared") == HITS
        assert served.logprob_error("shared", reference) > 100 * LOGPROB_TOLERANCE
    finally:
        for path, content in kept.items():
            path.write_bytes(content)


@pytest.mark.main_version
@pytest.mark.parametrize("damage", ["flipped", "cut", "another's"])
def test_unreadable_objects_are_computed(
    first: Served, sharing: Sharing, reference: Served, damage: str
) -> None:
    kept = {path: path.read_bytes() for path in objects(sharing.folder)}
    contents = list(kept.values())
    for number, path in enumerate(kept):
        if damage == "flipped":
            data = bytearray(kept[path])
            data[number * 97 % len(data)] ^= 1 << number % 8
            path.write_bytes(data)
        elif damage == "cut":
            os.truncate(path, len(kept[path]) // 2)
        else:
            path.write_bytes(contents[number - 1])
    try:
        served = sharing.serve()
        check(served, reference)
        assert served.hit_tokens("shared") == [0] * len(HITS)
        assert own(served, "shared_failures.get_broken") > 0
    finally:
        for path, content in kept.items():
            path.write_bytes(content)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "other seed": ({"environ": {"PYTHONHASHSEED": "1"}}, "block hashes"),
    "other dtype": ({"dtype": "bfloat16"}, "dtypes"),
}


@pytest.mark.main_version
@pytest.mark.parametrize("other", OTHERS)
def test_engines_that_differ_do_not_meet(first: Served, sharing: Sharing, other: str) -> None:
    arguments, said = OTHERS[other]
    served = sharing.serve(**arguments)
    assert served.hit_tokens("shared") == [0] * len(HITS)
    assert own(served, "transfer_bytes.get") == 0
    assert f"differs in: {said}" in served.log.replace("groups; ", "")


OTHER_PYTHON = Path(sys.prefix).with_name("vllm-0.30.0") / "bin" / "python"


@pytest.mark.main_version
@pytest.mark.skipif(not IS_LONG, reason="only `make test-long` starts three more engines")
@pytest.mark.skipif(not OTHER_PYTHON.exists(), reason="there is no environment with vLLM 0.30.0")
def test_another_vllm_does_not_meet(
    model_folder: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Everything else is equal, even the block size.

    Each engine finds KV of its own version only.
    """
    sharing = Sharing(model_folder("full"), tmp_path_factory)
    hits = [(length - 1) // 32 * 32 for length in SHARED_LENGTHS]
    monkeypatch.delenv(preloaded.VARIABLE, raising=False)
    for python, expected, said in (
        (sys.executable, [0] * len(hits), ""),
        (
            str(OTHER_PYTHON),
            [0] * len(hits),
            'versions (["0.30.0", null] here, ["0.23.0", null] there)',
        ),
        (sys.executable, hits, ""),
        (str(OTHER_PYTHON), hits, ""),
    ):
        monkeypatch.setattr(sys, "executable", python)
        served = sharing.serve(block_size=32)
        assert served.hit_tokens("shared") == expected
        lines = [line for line in served.log.splitlines() if "differs in" in line]
        print(python, served.hit_tokens("shared"), *lines)
        assert len(lines) == bool(said) and all(said in line for line in lines), lines


# Engines that are killed, or stop, while others run.


def until(condition: Callable[[], bool], engine: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + 300
    while not condition():
        assert engine.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.mark.main_version
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_an_engine_that_dies_or_stops_in_a_put_harms_nobody(
    how: signal.Signals,
    model_folder: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The engine has put some of the objects that the other engine asks for. It is putting more."""
    sharing = Sharing(model_folder("full"), tmp_path_factory)
    reference = sharing.reference()
    with sharing.running("shared_for_long") as engine:
        # This number is larger than that of `shared`, so the engine is putting the rest.
        until(lambda: len(objects(sharing.folder)) > 40, engine)
        # A file does not have its final name yet, so the engine is in a put.
        until(lambda: any("." in path.name for path in objects(sharing.folder)), engine)
        engine.send_signal(how)
        served = sharing.serve()
        assert engine.poll() is None or how is signal.SIGKILL
    check(served, reference)
    assert served.hit_tokens("shared") == HITS
    assert own(served, "shared_failures.get_broken") == 0


@pytest.mark.main_version
def test_engines_share_at_the_same_time(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    sharing = Sharing(model_folder("one window"), tmp_path_factory)
    reference = sharing.reference()
    with sharing.running("shared_for_long") as engine:
        until(lambda: len(objects(sharing.folder)) > 40, engine)
        served = sharing.serve()
        assert engine.poll() is None
    check(served, reference)
    assert served.hit_tokens("shared") == HITS
