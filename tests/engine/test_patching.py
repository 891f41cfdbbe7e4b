# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The patching machinery on the real vLLM: revert restores, whatever the order.

Patches take the arguments of upstream's functions, by position and by name. The patches are
installed in a process of their own, because patches and imports last as long as a process.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys

import pytest
import vllm

from vllm_ascend_kvext.compat import version_in
from vllm_ascend_kvext.patches import PATCHES
from vllm_ascend_kvext.patches.segments.scheduler import extend_schedulers
from vllm_ascend_kvext.patching.declaration import Patch
from vllm_ascend_kvext.patching.instance_methods import InstanceMethods
from vllm_ascend_kvext.patching.target import resolve, wrapper_chain
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


WRAPPING = [
    patch
    for patch in PATCHES
    if patch.wrapper is not None
    and not patch.is_for_vllm_ascend
    and any(version_in(vllm.__version__, versions) for versions in patch.vllm)
]
ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def parameters_of(function: object) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())  # type: ignore[arg-type]


@pytest.mark.parametrize("patch", WRAPPING, ids=lambda patch: patch.id)
def test_takes_upstreams_arguments(patch: Patch) -> None:
    target = resolve(patch.target)
    found = wrapper_chain(target.found)[-1]
    theirs = parameters_of(getattr(found, "__func__", found))
    if isinstance(target.parent, type):
        theirs = theirs[1:]  # The first argument is self or cls.
    ours = parameters_of(patch.wrapper)[2:]  # The first arguments are wrapped and instance.
    named = [parameter for parameter in ours if parameter.kind not in ANY]
    # As far as this version has our names, they stand in the same places ...
    for one, other in zip(named, theirs, strict=False):
        assert (one.name, one.kind) == (other.name, other.kind)
        assert (one.default is one.empty) == (other.default is other.empty), one.name
    for parameter in named[len(theirs) :]:
        assert parameter.default is not parameter.empty, f"{parameter.name} is not upstream's"
    # ... and all further arguments are passed on.
    rest = theirs[len(named) :]
    kinds = {parameter.kind for parameter in ours if parameter.kind in ANY}
    assert not rest or inspect.Parameter.VAR_KEYWORD in kinds
    if any(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in rest):
        assert inspect.Parameter.VAR_POSITIONAL in kinds


def test_whatever_replaces_methods_of_objects_is_undone_with_its_patch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    undone = {id(getattr(patch.undo, "__self__", None)) for patch in PATCHES}
    taken_back: set[int] = set()
    with monkeypatch.context() as context:
        context.setattr(InstanceMethods, "take_back", lambda methods: taken_back.add(id(methods)))
        extend_schedulers()()  # The hook returns a function. The function undoes the hook.
    assert len(taken_back) == 1
    undone |= taken_back
    replacing = {
        name: value
        for name, module in list(sys.modules.items())
        if name.startswith("vllm_ascend_kvext.patches.")
        for value in vars(module).values()
        if isinstance(value, InstanceMethods)
    }
    assert len(replacing) >= 3
    assert all(id(value) in undone for value in replacing.values())
