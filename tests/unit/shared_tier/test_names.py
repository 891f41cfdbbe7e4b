# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Name spaces of identities, messages about their differences, and the output of ``status``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_kvext.__main__ import main
from vllm_ascend_kvext.shared_tier.backend import Answer, SharedObject
from vllm_ascend_kvext.shared_tier.files import FilesTier
from vllm_ascend_kvext.shared_tier.names import (
    differences,
    namespace_of,
    object_name,
    piece_of,
)
from vllm_ascend_kvext.store.entries import Piece

IDENTITY: dict[str, Any] = {"weights": ["a" * 64], "dtype": "bf16", "groups": [1, [2, 3]]}


def test_each_part_of_an_identity_makes_a_name_space() -> None:
    names = {namespace_of(IDENTITY)}
    for part in IDENTITY:
        names.add(namespace_of({**IDENTITY, part: "other"}))
        names.add(namespace_of({each: IDENTITY[each] for each in IDENTITY if each != part}))
    assert len(names) == 1 + 2 * len(IDENTITY)
    assert namespace_of(dict(reversed(IDENTITY.items()))) == namespace_of(IDENTITY)


def test_differences_name_what_differs() -> None:
    other = {**IDENTITY, "dtype": "fp16", "weights": ["b" * 64], "new": 1}
    assert differences(IDENTITY, other) == [
        'dtype ("bf16" here, "fp16" there)',
        "new (null here, 1 there)",
        "weights",
    ]
    assert differences(IDENTITY, json.loads(json.dumps(IDENTITY))) == []


def test_names_are_read_back() -> None:
    for piece in (Piece.rows(0, 1024), Piece.rows(64, 128), Piece.tails(256)):
        assert piece_of(object_name(piece, b"\1" * 32)) == piece


def test_status_shows_a_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tier"
    tier = FilesTier(f"file://{folder}", None, 0)
    tier.register(memoryview(bytearray(1 << 20)))
    for identity in (IDENTITY, {**IDENTITY, "dtype": "fp16"}):
        namespace = namespace_of(identity)
        tier.introduce(namespace, identity)
        num_bytes = 1 << 20 if identity is IDENTITY else 1 << 10
        what = SharedObject(0, f"{namespace}/R0-64-{'a' * 32}", 0, num_bytes)
        assert tier.put(what) is Answer.WHOLE
    before = sorted(folder.rglob("*-*"))
    assert main(["status", "--shared-tier", f"file://{folder}"]) == 0
    text = capsys.readouterr().out
    assert "format 4: works" in text and "holds 0.001 GB" in text
    assert f"name space {namespace_of(IDENTITY)}: 1 objects, 0.001 GB" in text
    assert 'do not meet: dtype ("bf16" here, "fp16" there)' in text
    assert sorted(folder.rglob("*-*")) == [*before, folder / "kvext4" / "status-check"]
    assert len(tier.engines()) == 2


def test_status_of_a_tier_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--shared-tier", f"file://{tmp_path}/absent"]) == 2
    assert "expected a folder" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
