# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Looks into the compiled retention. ``tests/native/inspection`` is compiled at the first use.

It is compiled once for each interpreter and each state of the sources, into ``out/inspection``. It
accepts the package's own objects, so both modules must be compiled with the same nanobind.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from vllm_ascend_kvext.native import native

CHECKOUT = Path(__file__).parents[3]
CSRC = CHECKOUT / "csrc"
NAME = "_kvext_inspection"
FLAGS = ("-std=c++17", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing")


def describe(cache_state: Any) -> list[dict[str, Any]]:
    """All checkpoints of a `RetainedCache`."""
    return _inspection().describe(cache_state)


def num_needs(cache_state: Any, block_id: int) -> int:
    """How often a block is needed: by runs and tails of checkpoints, and by running requests.

    Raises:
        IndexError: The pool has no such block.
    """
    return _inspection().num_needs(cache_state, block_id)


def surplus(cache_state: Any) -> list[int]:
    """The ids of free blocks that nothing needs, in the order of their reallocation."""
    return _inspection().surplus(cache_state)


def clock_pools(cache_state: Any) -> float:
    """How many pools of blocks were cached for checkpoints so far."""
    return _inspection().clock_pools(cache_state)


def held_blocks(request_state: Any) -> list[int]:
    """The ids of blocks that have left a window, but that a coming checkpoint needs."""
    return _inspection().held_blocks(request_state)


def rates_of(cache_state: Any) -> Any:
    """The `UseRates` of a `RetainedCache`: ``csrc/retention/use_rates.h``. Ages are in pools."""
    return _inspection().rates(cache_state)


def new_rates() -> Any:
    """`UseRates` that have not counted anything."""
    return _inspection().UseRates()


@functools.cache
def _inspection() -> ModuleType:
    native()
    library = compiled()
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled() -> Path:
    """The module's file. If there is none for these sources, it is compiled."""
    found = importlib.util.find_spec("nanobind")
    assert found is not None and found.origin is not None, (
        f"The inspection of retention needs nanobind: {sys.executable} -m pip install nanobind, "
        "of the version that the package was built with."
    )
    nanobind = Path(found.origin).parent
    sources = [
        *sorted((CHECKOUT / "tests" / "native" / "inspection").glob("*.cpp")),
        *(path for path in sorted((CSRC / "retention").glob("*.cpp")) if path.stem != "bindings"),
        nanobind / "src" / "nb_combined.cpp",
    ]
    headers = [*sorted(CSRC.rglob("*.h")), *sorted((nanobind / "include").rglob("*.h"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in [*sources, *headers]))
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    folder = CHECKOUT / "out" / "inspection" / f"{digest.hexdigest()[:16]}{suffix}"
    library = folder / f"{NAME}{suffix}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(sources, _include_flags(nanobind), library)
    return library


def _include_flags(nanobind: Path) -> list[str]:
    folders = [
        CSRC,
        nanobind / "include",
        nanobind / "ext" / "robin_map" / "include",
        sysconfig.get_paths()["include"],
    ]
    return [f"-I{folder}" for folder in folders]


def _compile(sources: list[Path], include_flags: list[str], library: Path) -> None:
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or "g++"]

    def to_object(source: Path) -> str:
        target = str(library.with_name(f"{source.stem}.o"))
        _run([*compiler, *FLAGS, *include_flags, "-c", str(source), "-o", target])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as executor:
        objects = list(executor.map(to_object, sources))
    unfinished = library.with_suffix(".unfinished")
    _run([*compiler, "-shared", *objects, "-o", str(unfinished)])
    unfinished.rename(library)


def _run(command: list[str]) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, f"{shlex.join(command)}\n{finished.stderr[-5000:]}"
