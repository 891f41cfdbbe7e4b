# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Replaced methods of single objects, compared with plain lists of the replacements."""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import wrapt
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.patching.instance_methods import InstanceMethods

NUM_PATCHES = 3
NUM_OWNERS = 3
METHODS = ("schedule", "free")


class Owner:
    """An object whose methods return the calls that were made, the outermost call first."""

    def schedule(self, *passed: Any) -> list[Any]:
        return ["upstream", *passed]

    def free(self, *passed: Any) -> list[Any]:
        return ["upstream", *passed]


def replacement(method: str, label: object) -> Callable[..., list[Any]]:
    def replacing(wrapped: Callable[..., list[Any]], *passed: Any) -> list[Any]:
        return [label, *wrapped(*passed)]

    replacing.__name__ = method
    return replacing


def owners() -> list[Owner]:
    """Objects of which the last has a method in its ``__dict__`` before any replacement."""
    made = [Owner() for _ in range(NUM_OWNERS)]
    made[-1].schedule = lambda *passed: ["local", *passed]  # type: ignore[method-assign]
    return made


replacing = st.tuples(
    st.integers(0, NUM_PATCHES - 1), st.integers(0, NUM_OWNERS - 1), st.sampled_from(METHODS)
)
taking_back = st.integers(0, NUM_PATCHES - 1)
taking_one_back = st.floats(0, 1, exclude_max=True)
"""The position of the removed replacement among those in effect."""


@given(
    st.lists(replacing | taking_back | taking_one_back, max_size=20),
    st.permutations(range(NUM_PATCHES)),
)
def test_calls_go_through_what_has_not_been_taken_back(
    steps: list[tuple[int, int, str] | int | float], last_order: list[int]
) -> None:
    objects = owners()
    indices = range(NUM_OWNERS)
    before = [dict(vars(each)) for each in objects]
    patches = [InstanceMethods() for _ in range(NUM_PATCHES)]
    # The patch, owner and method of each replacement in effect, the oldest first.
    model: list[tuple[int, int, str]] = []
    # The functions that take these replacements back.
    give_back: list[Callable[[], None]] = []
    for step in [*steps, *last_order]:
        if isinstance(step, int):
            patches[step].take_back()
            give_back = [each for each, of in zip(give_back, model, strict=True) if of[0] != step]
            model = [each for each in model if each[0] != step]
        elif isinstance(step, float):
            if model:
                number = int(step * len(model))
                del model[number]
                give_back.pop(number)()
        else:
            patch, owner, method = step
            taken = patches[patch].replace(objects[owner], replacement(method, patch))
            model.append(step)
            give_back.append(taken)
        for index, each in enumerate(objects):
            for method in METHODS:
                bottom = "local" if method in before[index] else "upstream"
                mine = [patch for patch, owner, name in model if (owner, name) == (index, method)]
                assert getattr(each, method)(1, 2) == [*reversed(mine), bottom, 1, 2]
        for patch, methods in enumerate(patches):
            expected = [(patch, index) in {each[:2] for each in model} for index in indices]
            assert [methods.has_any_of(each) for each in objects] == expected
    assert [vars(each) for each in objects] == before


def partial_around(call: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Wrap a call in a partial. ``partial`` unwraps another partial that has no attributes."""
    return functools.partial(call, "theirs")


def function_around(call: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Wrap a call in a function with the same attributes."""
    return functools.wraps(call)(lambda *passed: call("theirs", *passed))


@pytest.mark.parametrize("around", [partial_around, function_around])
def test_what_somebody_else_has_put_over_it_stays_and_gets_straight_through(around: Any) -> None:
    owner = Owner()
    ours = InstanceMethods()
    ours.replace(owner, replacement("schedule", "ours"))
    theirs = owner.schedule = around(owner.schedule)  # type: ignore[method-assign]
    assert owner.schedule() == ["ours", "upstream", "theirs"]
    ours.take_back()
    assert vars(owner) == {"schedule": theirs}
    assert owner.schedule() == ["upstream", "theirs"]


def test_objects_are_not_kept_alive() -> None:
    owner = Owner()
    ours = InstanceMethods()
    ours.replace(owner, replacement("schedule", owner))
    ended = weakref.ref(owner)
    del owner
    gc.collect()
    assert ended() is None
    ours.take_back()


def has_dict(owner: Owner) -> bool:
    """Whether CPython keeps an object's attributes in a dict of its own."""
    return any(type(each) is dict and "number" in each for each in gc.get_referents(owner))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="objects always have a dict")
def test_access_to_other_attributes_takes_no_longer_than_before() -> None:
    wrapped = wrapt.FunctionWrapper(Owner.free, lambda wrapped, _, args, kwargs: wrapped(*args))
    for of_class, method in itertools.product(({}, {"free": wrapped}), METHODS):
        # CPython gives a dict to objects of a class that has had many: each time a new class.
        owner = type("Fresh", (Owner,), of_class)()
        owner.number = 1
        assert not has_dict(owner)
        take_back = InstanceMethods().replace(owner, replacement(method, "ours"))
        assert getattr(owner, method)() == ["ours", "upstream"]
        assert not has_dict(owner)
        take_back()
        assert getattr(owner, method)() == ["upstream"]
        assert vars(owner) == {"number": 1}
    assert has_dict(owner), "the control: vars() has made a dict"


def test_a_method_of_another_object_is_an_attribute_like_any_other() -> None:
    one, other = Owner(), Owner()
    other.schedule = one.schedule  # type: ignore[method-assign]
    InstanceMethods().replace(other, replacement("schedule", "ours"))()
    assert vars(other)["schedule"].__self__ is one
