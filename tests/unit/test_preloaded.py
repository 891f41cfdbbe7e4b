# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""`tools/preloaded.py` runs a program like a fresh interpreter does."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from support.scenarios import processes

TOOLS = Path(__file__).parents[2] / "tools"
REPORT = """
import json, os, sys
facts = [__name__, sys.argv[1:], dict(os.environ), os.getcwd(), "csv" in sys.modules]
print(json.dumps(facts), flush=True)
print("to the other stream", file=sys.stderr)
sys.exit(3)
"""
SLEEP = """
import multiprocessing, os, time
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    child.start()
    print(os.getpid(), child.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def preloaded() -> Iterator[ModuleType]:
    sys.path.append(str(TOOLS))
    yield importlib.import_module("preloaded")
    sys.path.remove(str(TOOLS))


@pytest.fixture(scope="module")
def socket(preloaded: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("preloaded") / "log.txt"
    with preloaded.served(Path(sys.executable), log, ["csv", "no_such_module"]) as socket:
        yield socket


def program(preloaded: ModuleType, folder: Path, text: str, *arguments: str) -> tuple[str, ...]:
    (folder / "script.py").write_text(text)
    command = [str(folder / "script.py"), *arguments]
    return preloaded.Program(command, {"CHOSEN": "1"}, str(folder), str(folder / "output"))


def test_a_program_has_its_own_environment_and_folder(
    preloaded: ModuleType, socket: str, tmp_path: Path
) -> None:
    assert preloaded.run(socket, program(preloaded, tmp_path, REPORT, "a", "b"), 60) == 3
    report, other = (tmp_path / "output").read_text().splitlines()
    assert json.loads(report) == ["__main__", ["a", "b"], {"CHOSEN": "1"}, str(tmp_path), True]
    assert other == "to the other stream"


def test_programs_hash_alike_where_it_is_asked_for(
    preloaded: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "beside.py").touch()
    text = f"import beside, sys; print(hash('block'), {str(tmp_path)!r} in sys.path[1:])"
    hashes = set()
    for _ in range(2):
        flags = preloaded.HASHED_ALIKE
        with preloaded.served(Path(sys.executable), tmp_path / "log", ["csv"], flags) as socket:
            assert preloaded.run(socket, program(preloaded, tmp_path, text), 60) == 0
        hashes.add((tmp_path / "output").read_text())
    assert len(hashes) == 1 and hashes.pop().endswith("False\n")


def test_an_error_and_a_signal_are_exit_codes(
    preloaded: ModuleType, socket: str, tmp_path: Path
) -> None:
    assert preloaded.run(socket, program(preloaded, tmp_path, "1 / 0"), 60) == 1
    assert "ZeroDivisionError" in (tmp_path / "output").read_text()
    text = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert preloaded.run(socket, program(preloaded, tmp_path, text), 60) == -signal.SIGKILL


def test_a_module_runs_by_its_name(preloaded: ModuleType, socket: str, tmp_path: Path) -> None:
    command = ["-m", "calendar", "2026", "11"]
    chosen = preloaded.Program(command, {}, str(tmp_path), str(tmp_path / "output"))
    assert preloaded.run(socket, chosen, 60) == 0
    assert "November 2026" in (tmp_path / "output").read_text()


def test_what_takes_too_long_is_killed_with_its_processes(
    preloaded: ModuleType, socket: str, tmp_path: Path
) -> None:
    with pytest.raises(TimeoutError):
        preloaded.run(socket, program(preloaded, tmp_path, SLEEP), 3)
    process_ids = [*map(int, (tmp_path / "output").read_text().split())]
    assert len(process_ids) == 2
    wait_until(lambda: not any(map(is_running, process_ids)))


@pytest.mark.parametrize("interrupt", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_of_everything_leaves_no_program(
    interrupt: signal.Signals, preloaded: ModuleType, tmp_path: Path
) -> None:
    """A terminal sends it to all processes of the client's group, and the program has its own."""
    chosen = program(preloaded, tmp_path, SLEEP)
    client = tmp_path / "client.py"
    client.write_text(
        # A shell starts what runs in the background with interrupts ignored.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"import sys; sys.path.insert(0, {str(TOOLS)!r})\n"
        "import preloaded, pathlib\n"
        f"log = pathlib.Path({str(tmp_path / 'log')!r})\n"
        "with preloaded.served(pathlib.Path(sys.executable), log, ['csv']) as socket:\n"
        f"    preloaded.run(socket, preloaded.Program(*{tuple(chosen)!r}), 600)\n"
    )
    with subprocess.Popen([sys.executable, client], start_new_session=True) as running:
        output = tmp_path / "output"
        wait_until(lambda: output.exists() and len(output.read_text().split()) == 2)
        os.killpg(running.pid, interrupt)
    process_ids = [*map(int, output.read_text().split())]
    wait_until(lambda: not any(map(is_running, process_ids)))


@pytest.mark.parametrize("is_preloaded", [True, False])
def test_what_a_script_prints_is_returned(
    is_preloaded: bool,
    preloaded: ModuleType,
    socket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(preloaded.VARIABLE, raising=False)
    if is_preloaded:
        monkeypatch.setenv(preloaded.VARIABLE, socket)
    script = tmp_path / "script.py"
    script.write_text(REPORT)
    ended = processes.run(script, ["a"], {"CHOSEN": "1"})
    assert ended.exit_code == 3
    report, other = ended.log.splitlines()
    assert json.loads(report)[1] == ["a"] and json.loads(report)[2]["CHOSEN"] == "1"
    assert other == "to the other stream"


def test_nobody_who_listens_is_waited_for(
    preloaded: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preloaded, "_MAX_START_S", 0.5)
    with pytest.raises(TimeoutError, match="nobody listens"):
        preloaded.run(str(tmp_path / "socket"), program(preloaded, tmp_path, REPORT), 60)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
