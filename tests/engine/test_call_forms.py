# SPDX-License-Identifier: Apache-2.0
"""A patch function takes what upstream's function takes, by position and by name."""

from __future__ import annotations

import inspect
import sys

import pytest
import vllm

from vllm_ascend_kvext.compat import version_in
from vllm_ascend_kvext.patches import PATCHES
from vllm_ascend_kvext.patching.declaration import Patch
from vllm_ascend_kvext.patching.instance_methods import InstanceMethods
from vllm_ascend_kvext.patching.target import resolve, wrapper_chain

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
        theirs = theirs[1:]  # self or cls
    ours = parameters_of(patch.wrapper)[2:]  # wrapped, instance
    named = [parameter for parameter in ours if parameter.kind not in ANY]
    # The same names in the same places, as far as they go in this version ...
    for one, other in zip(named, theirs, strict=False):
        assert (one.name, one.kind) == (other.name, other.kind)
        assert (one.default is one.empty) == (other.default is other.empty), one.name
    for parameter in named[len(theirs) :]:
        assert parameter.default is not parameter.empty, f"{parameter.name} is not upstream's"
    # ... and whatever follows is handed on.
    rest = theirs[len(named) :]
    kinds = {parameter.kind for parameter in ours if parameter.kind in ANY}
    assert not rest or inspect.Parameter.VAR_KEYWORD in kinds
    if any(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in rest):
        assert inspect.Parameter.VAR_POSITIONAL in kinds


def test_whatever_replaces_methods_of_objects_is_undone_with_its_patch() -> None:
    undone = {id(getattr(patch.undo, "__self__", None)) for patch in PATCHES}
    replacing = {
        name: value
        for name, module in list(sys.modules.items())
        if name.startswith("vllm_ascend_kvext.patches.")
        for value in vars(module).values()
        if isinstance(value, InstanceMethods)
    }
    assert len(replacing) >= 3
    assert all(id(value) in undone for value in replacing.values())
