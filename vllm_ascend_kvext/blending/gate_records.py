# SPDX-License-Identifier: Apache-2.0
"""What is remembered of models that were checked: a file for each, in vLLM's cache folder.

A record is found by a fingerprint of everything that the check depends on. One that cannot be read
is as good as none.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

_FOLDER = Path("kvext", "model_checks")
_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".py"})
"""Of weights, and of what says how to compute with them."""


@dataclass(frozen=True, slots=True)
class GateRecord:
    """A check that was made.

    Attributes:
        model: Its name or folder.
        passed: Whether its segments may be reused.
        message: The numbers behind it.
        checked_at: UTC, as ISO 8601.
    """

    model: str
    passed: bool
    message: str
    checked_at: str


def record_key(facts: Mapping[str, object]) -> str:
    """The fingerprint of what a check depends on.

    Args:
        facts: What JSON can hold.
    """
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def files_of_model(model: str) -> list[list[object]]:
    """Name, size and time of change of each file of a local model; empty for other names."""
    folder = Path(model)
    if not folder.is_dir():
        return []
    found = []
    for path in sorted(folder.iterdir()):
        if path.suffix in _SUFFIXES and path.is_file():
            state = path.stat()
            found.append([path.name, state.st_size, state.st_mtime_ns])
    return found


def read_record(cache_root: str, key: str) -> GateRecord | None:
    """What is remembered; None if that is nothing."""
    return _read(_folder(cache_root) / f"{key}.json")


def write_record(cache_root: str, key: str, record: GateRecord) -> None:
    """Remember a check, in one step: other engines may read and write at the same time.

    Raises:
        OSError: The folder cannot be written to.
    """
    folder = _folder(cache_root)
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(record), file)
        os.replace(name, folder / f"{key}.json")
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def all_records(cache_root: str) -> list[GateRecord]:
    """Everything that is remembered, the latest first."""
    found = _readable(_folder(cache_root).glob("*.json"))
    return sorted(found, key=lambda record: record.checked_at, reverse=True)


def _readable(paths: Iterable[Path]) -> Iterable[GateRecord]:
    for path in paths:
        record = _read(path)
        if record is not None:
            yield record


def _read(path: Path) -> GateRecord | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        record = GateRecord(**found)
    except (OSError, ValueError, TypeError):
        return None
    is_whole = isinstance(record.passed, bool) and all(
        isinstance(each, str) for each in (record.model, record.message, record.checked_at)
    )
    return record if is_whole else None


def _folder(cache_root: str) -> Path:
    return Path(cache_root) / _FOLDER
