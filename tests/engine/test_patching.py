# SPDX-License-Identifier: Apache-2.0
"""The patching machinery on the real vLLM: revert restores, whatever the order.

Each test is a process of its own: patches and imports stay for a process's life.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from vllm_ascend_kvext.settings import RETENTION_INTERVAL_VARIABLE

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

ANY_ORDER = (
    SLOTS
    + """
import random
from vllm_ascend_kvext.patching.install import BOOK
from vllm_ascend_kvext.settings import Mode, Settings

survey = activation.survey(Settings(mode=Mode.STRICT))
plans = {plan.feature: plan for plan in survey.plans if plan.fits}
wrapped = {patch.id for patch in PATCHES if patch.wrapper is not None}
rng = random.Random(0)
for _ in range(30):
    applied = rng.sample(list(plans), k=len(plans))
    reverted = rng.sample(applied, k=len(applied))
    installed = [id for feature in applied for id in BOOK.apply(plans[feature])]
    unchanged = wrapped & {*installed} & {*same(stock, slots())}
    assert not unchanged, (applied, unchanged)
    assert not [id for feature in applied for id in BOOK.apply(plans[feature])]
    for feature in reverted:
        BOOK.revert(feature)
    differing = set(stock) - set(same(stock, slots()))
    assert not differing, (applied, reverted, differing)
"""
)


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**own, **variables},
    )


def test_nothing_is_left_whatever_the_order() -> None:
    completed = run("-c", ANY_ORDER)
    assert completed.returncode == 0, completed.stderr


def test_status_of_the_real_vllm_with_retention_requested() -> None:
    variables = {RETENTION_INTERVAL_VARIABLE: "0"}
    completed = run("-m", "vllm_ascend_kvext", "status", "--json", **variables)
    assert completed.returncode == 0, completed.stderr
    rows = json.loads(completed.stdout)["patches"]
    assert {row["state"] for row in rows} <= {"applied", "waiting", "skipped_version"}
    assert "applied" in {row["state"] for row in rows}
