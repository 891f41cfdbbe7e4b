# SPDX-License-Identifier: Apache-2.0
"""The patching machinery on the real vLLM: drift is refused, revert restores.

Each test is a process of its own: patches and imports stay for a process's life.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ascend_kvext.compat import package_folder
from vllm_ascend_kvext.settings import MODE_VARIABLE, RETENTION_INTERVAL_VARIABLE

EDITED = Path("v1", "core", "block_pool.py")

SLOTS = '''
from vllm_ascend_kvext import activation
from vllm_ascend_kvext.patches import PATCHES
from vllm_ascend_kvext.patching.target import MissingTargetError, resolve

def slots():
    found = {}
    for patch in PATCHES:
        try:
            target = resolve(patch.target)
        except MissingTargetError:
            continue
        # A hook changes what its target holds: copy that.
        value = target.current
        found[patch.id] = dict(value) if isinstance(value, dict) else value
    return found

def same(before, after):
    """The ids whose attribute is the same object; a wrapper is equal to what it wraps."""
    return [
        patch_id
        for patch_id, value in before.items()
        if after[patch_id] is value or (isinstance(value, dict) and after[patch_id] == value)
    ]

stock = slots()
'''

APPLY_REVERT_APPLY = f"""{SLOTS}
first = activation.apply_feature("retention")
applied = slots()
assert first
assert set(same(stock, applied)).isdisjoint(first), same(stock, applied)
assert activation.apply_feature("retention") == ()
assert list(activation.revert_feature("retention")) == list(reversed(first))
assert len(same(stock, slots())) == len(stock)
assert activation.apply_feature("retention") == first
activation.revert_feature("retention")
assert len(same(stock, slots())) == len(stock)
"""

ANY_ORDER = f"""{SLOTS}
import random
from vllm_ascend_kvext.patching.install import BOOK
from vllm_ascend_kvext.settings import Mode, Settings

survey = activation.survey(Settings(mode=Mode.STRICT))
plans = {{plan.feature: plan for plan in survey.plans if plan.fits}}
rng = random.Random(0)
for _ in range(30):
    applied = rng.sample(list(plans), k=len(plans))
    reverted = rng.sample(applied, k=len(applied))
    for feature in applied:
        BOOK.apply(plans[feature])
    for feature in reverted:
        BOOK.revert(feature)
    differing = set(stock) - set(same(stock, slots()))
    assert not differing, (applied, reverted, differing)
"""

REFUSES_DRIFT = f"""
import os
from vllm.v1.core.block_pool import BlockPool
from vllm_ascend_kvext import register
from vllm_ascend_kvext.errors import PatchError

stock = dict(vars(BlockPool))
register()  # safe, nothing requested
for name, value in (({MODE_VARIABLE!r}, "strict"), ({RETENTION_INTERVAL_VARIABLE!r}, "0")):
    os.environ[name] = value
    try:
        register()
    except PatchError as error:
        assert "KVX-102 DRIFTED" in str(error), error
        assert "block_pool.py" in str(error), error
    else:
        raise AssertionError(name)
    del os.environ[name]
assert dict(vars(BlockPool)) == stock
"""


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**own, **variables},
    )


@pytest.fixture
def edited_vllm(tmp_path: Path) -> Path:
    """The folder of a vLLM in which ``BlockPool.free_blocks`` has one statement more."""
    folder = package_folder("vllm")
    assert folder is not None
    _link_all_but(folder, tmp_path / "vllm", EDITED)
    source = (folder / EDITED).read_text(encoding="utf-8")
    signature = source.index("def free_blocks(")
    body = source.index(") -> None:\n", signature) + len(") -> None:\n")
    edited = f"{source[:body]}        ordered_blocks = list(ordered_blocks)\n{source[body:]}"
    (tmp_path / "vllm" / EDITED).write_text(edited, encoding="utf-8")
    return tmp_path


def _link_all_but(original: Path, copy: Path, path: Path) -> None:
    """Make `copy` a folder of links to the entries of `original`, except `path` below it."""
    copy.mkdir()
    first, *rest = path.parts
    for entry in original.iterdir():
        if entry.name != first:
            (copy / entry.name).symlink_to(entry)
        elif rest:
            _link_all_but(entry, copy / first, Path(*rest))


def test_apply_revert_apply_restores_the_very_attributes() -> None:
    completed = run("-c", APPLY_REVERT_APPLY)
    assert completed.returncode == 0, completed.stderr


def test_nothing_is_left_whatever_the_order() -> None:
    completed = run("-c", ANY_ORDER)
    assert completed.returncode == 0, completed.stderr


def test_an_edited_function_is_refused(edited_vllm: Path) -> None:
    completed = run("-c", REFUSES_DRIFT, PYTHONPATH=str(edited_vllm))
    assert completed.returncode == 0, completed.stderr


def test_status_of_an_edited_vllm(edited_vllm: Path) -> None:
    completed = run("-m", "vllm_ascend_kvext", "status", "--json", PYTHONPATH=str(edited_vllm))
    assert completed.returncode == 1, completed.stderr
    states = {row["id"]: row["state"] for row in json.loads(completed.stdout)["patches"]}
    assert states["KVX-102"] == "drifted"
    assert "inert" in states.values()


def test_status_of_the_real_vllm_with_retention_requested() -> None:
    variables = {RETENTION_INTERVAL_VARIABLE: "0"}
    completed = run("-m", "vllm_ascend_kvext", "status", "--json", **variables)
    assert completed.returncode == 0, completed.stderr
    rows = json.loads(completed.stdout)["patches"]
    assert {row["state"] for row in rows} <= {"applied", "skipped_version"}
    assert "applied" in {row["state"] for row in rows}
