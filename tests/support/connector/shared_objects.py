# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Reads and damages the objects of a shared tier in a folder."""

from __future__ import annotations

from pathlib import Path

from vllm_ascend_kvext.shared_tier.backend import Answer, SharedObject
from vllm_ascend_kvext.shared_tier.files import FilesTier


def objects(folder: Path) -> list[Path]:
    return sorted(folder.glob("kvext4/*/r*/objects/*/*"))


def forge(folder: Path, path: Path, content: bytes) -> None:
    """Give an object other bytes, and the right seal for these bytes."""
    namespace = path.parts[-5]
    rank = int(path.parts[-4][1:])
    path.unlink()
    tier = FilesTier(f"file://{folder}", None, rank)
    tier.register(memoryview(bytearray(content)))
    what = SharedObject(0, f"{namespace}/{path.name}", 0, len(content))
    assert tier.put(what) is Answer.WHOLE
