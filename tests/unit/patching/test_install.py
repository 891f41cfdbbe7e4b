# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import wrapt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_upstream import FEATURE, MODULE, PlanPatches, declare, record, record_foreign

from vllm_ascend_kvext.errors import PatchError
from vllm_ascend_kvext.patching.declaration import Kind
from vllm_ascend_kvext.patching.install import PatchBook
from vllm_ascend_kvext.patching.plan import Finding, State

MISSING = object()


@pytest.fixture
def book() -> PatchBook:
    return PatchBook()


def state_of(book: PatchBook, finding: Finding) -> State:
    return book.bring_up_to_date(finding).state


@pytest.fixture
def pool(plan_patches: PlanPatches) -> ModuleType:
    return importlib.import_module(MODULE)


def slots(pool: ModuleType) -> dict[str, Any]:
    """The attributes that the tests patch, as ``vars()`` shows them."""
    return {
        "Pool.free": vars(pool.Pool)["free"],
        "Pool.find": vars(pool.Pool)["find"],
        "Pool.count": vars(pool.Pool)["count"],
        "Pool.size": vars(pool.Pool)["size"],
        "SmallPool.inherited": vars(pool.SmallPool).get("inherited", MISSING),
        "touch": vars(pool)["touch"],
    }


CALLS: dict[str, Callable[[ModuleType], Any]] = {
    "Pool.free": lambda pool: pool.Pool().free([1], prepend=True),
    "Pool.find": lambda pool: (pool.SmallPool.find(3), pool.Pool().find(3)),
    "Pool.count": lambda pool: (pool.Pool.count([1]), pool.Pool().count([1, 2])),
    "Pool.size": lambda pool: pool.Pool().size(),
    "SmallPool.inherited": lambda pool: pool.SmallPool().inherited(3),
    "touch": lambda pool: pool.touch(1, step=2),
}


@pytest.mark.parametrize("target", CALLS)
def test_apply_revert_apply_revert_restores_the_very_attributes(
    plan_patches: PlanPatches, book: PatchBook, pool: ModuleType, target: str
) -> None:
    calls: list[str] = []
    plan = plan_patches(declare(target, wrapper=record(calls)))
    before = slots(pool)
    stock = CALLS[target](pool)
    for _ in range(2):
        assert book.apply(plan) == (f"T-{target}",)
        assert state_of(book, plan.findings[0]) is State.APPLIED
        assert slots(pool)[target] is not before[target]
        assert CALLS[target](pool) == stock
        assert calls, "the wrapper was not called"
        assert book.revert(FEATURE) == {f"T-{target}": State.INERT}
        assert state_of(book, plan.findings[0]) is State.INERT
        after = slots(pool)
        assert all(after[name] is before[name] for name in before)
        calls.clear()
        assert CALLS[target](pool) == stock
        assert not calls


def test_a_wrapper_that_someone_removed_or_replaced_is_shadowed_and_put_back(
    plan_patches: PlanPatches, book: PatchBook, pool: ModuleType
) -> None:
    original = vars(pool.Pool)["free"]
    plan = plan_patches(declare("Pool.free"))
    book.apply(plan)
    for other in (lambda self, blocks: None, original):
        pool.Pool.free = other
        assert state_of(book, plan.findings[0]) is State.SHADOWED
    assert book.apply(plan) == ("T-Pool.free",)
    assert state_of(book, plan.findings[0]) is State.APPLIED
    book.revert(FEATURE)
    assert vars(pool.Pool)["free"] is original


FEATURES = {"one": ("a",), "two": ("b", "c")}
"""The patches of each feature. All have the same target."""

VERBS = ("apply", "revert")
STEPS = ["foreign", "leave", *(f"{verb} {name}" for verb in VERBS for name in FEATURES)]


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from(STEPS), min_size=6, max_size=20))
def test_calls_go_through_what_is_in_effect_in_any_order_of_applying_and_reverting(
    plan_patches: PlanPatches, pool: ModuleType, steps: list[str]
) -> None:
    """The model is a stack of patches, on or off, and of foreign wrappers, innermost first."""
    book = PatchBook()
    cls = pool.Pool
    original = vars(pool.Pool)["free"]
    calls: list[str] = []
    plans = {
        feature: plan_patches(
            *(
                declare("Pool.free", id=id, feature=feature, wrapper=record(calls, id))
                for id in ids
            ),
            feature=feature,
        )
        for feature, ids in FEATURES.items()
    }
    stack: list[str] = []
    off: set[str] = set()
    for step in steps:
        verb, _, feature = step.partition(" ")
        if verb == "foreign":
            cls.free = wrapt.FunctionWrapper(vars(cls)["free"], record_foreign(calls))
            stack.append("foreign")
        elif verb == "leave" and stack[-1:] == ["foreign"]:
            cls.free = vars(cls)["free"].__wrapped__
            stack.pop()
        elif verb == "apply":
            fresh = [id for id in FEATURES[feature] if id not in stack or id in off]
            assert book.apply(plans[feature]) == tuple(fresh)
            stack += [id for id in fresh if id not in stack]
            off -= {*fresh}
        elif verb == "revert":
            expected = {}
            for id in reversed([id for id in stack if id in FEATURES[feature]]):
                expected[id] = State.INERT if stack[-1] == id else State.SHADOWED
                if stack[-1] == id:
                    off.discard(stack.pop())
                else:
                    off.add(id)
            assert list(book.revert(feature).items()) == list(expected.items())
            while stack and stack[-1] in off:  # Foreign wrappers are around these patches.
                off.discard(stack.pop())
        calls.clear()
        assert cls().free([1]) == ([1], False)
        assert calls == [id for id in reversed(stack) if id not in off]
        for finding in (finding for plan in plans.values() for finding in plan.findings):
            id = finding.patch.id
            in_effect = State.SHADOWED if id in off else State.APPLIED
            assert state_of(book, finding) is (in_effect if id in stack else State.INERT)
        assert stack or vars(cls)["free"] is original
    cls.free = original


class TestAtomicity:
    def test_if_one_fails_those_before_it_are_taken_back(
        self, plan_patches: PlanPatches, book: PatchBook, pool: ModuleType
    ) -> None:
        before = slots(pool)
        install = mock.Mock(side_effect=OSError("no such hook"))
        plan = plan_patches(
            declare("Pool.free"),
            declare("SmallPool.inherited"),
            declare("calls", id="T-hook", kind=Kind.HOOK, install=install),
            declare("touch"),
        )
        with pytest.raises(PatchError, match=r"T-hook cannot be installed.*no such hook") as raised:
            book.apply(plan)
        assert isinstance(raised.value.__cause__, OSError)
        after = slots(pool)
        assert all(after[name] is before[name] for name in before)
        states = [state_of(book, finding) for finding in plan.findings]
        assert states == [State.INERT, State.INERT, State.FAILED, State.INERT]
        (failed,) = [f for f in map(book.bring_up_to_date, plan.findings) if f.reason]
        assert failed.reason == "OSError: no such hook"

    def test_a_plan_that_does_not_fit_touches_nothing(
        self, plan_patches: PlanPatches, book: PatchBook, pool: ModuleType
    ) -> None:
        before = slots(pool)
        with pytest.raises(PatchError, match="does not fit"):
            book.apply(plan_patches(declare("Pool.free"), declare("Pool.gone")))
        after = slots(pool)
        assert all(after[name] is before[name] for name in before)


def test_a_hook_may_fail_at_first_is_used_once_and_undone(
    plan_patches: PlanPatches, book: PatchBook
) -> None:
    undone: list[str] = []
    install = mock.Mock(side_effect=[OSError("not yet"), *[lambda: undone.append("hook")] * 2])
    plan = plan_patches(declare("calls", kind=Kind.HOOK, install=install))
    with pytest.raises(PatchError, match="not yet"):
        book.apply(plan)
    assert [book.apply(plan), book.apply(plan)] == [("T-calls",), ()]
    assert install.call_count == 2
    assert state_of(book, plan.findings[0]) is State.APPLIED
    assert book.revert(FEATURE) == {"T-calls": State.INERT}
    assert undone == ["hook"]
    assert book.apply(plan)


def test_a_wrapper_gets_upstreams_arguments_by_their_names(
    plan_patches: PlanPatches, book: PatchBook, pool: ModuleType
) -> None:
    calls: list[Any] = []

    def wrapper(wrapped: Any, instance: Any, blocks: list[int], prepend: bool = False) -> Any:
        calls.append((blocks, prepend))
        return wrapped(blocks, prepend)

    book.apply(plan_patches(declare("Pool.free", wrapper=wrapper)))
    instance = pool.Pool()
    instance.free([1], True)
    instance.free(prepend=True, blocks=[2])
    instance.free([3])
    assert calls == [([1], True), ([2], True), ([3], False)]
    with pytest.raises(TypeError, match="unexpected keyword argument 'front'"):
        instance.free([4], front=True)


class TestWhenImported:
    """Targets whose module upstream imports later, or never."""

    @pytest.fixture(autouse=True)
    def not_imported(self, plan_patches: PlanPatches, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, MODULE, raising=False)

    def test_it_waits_and_is_wrapped_by_the_import(
        self, plan_patches: PlanPatches, book: PatchBook
    ) -> None:
        calls: list[str] = []
        plan = plan_patches(declare("touch", wrapper=record(calls), when_imported=True))
        (finding,) = plan.findings
        assert book.apply(plan) == ("T-touch",)
        assert book.apply(plan) == ()
        assert MODULE not in sys.modules, "planning or installing has imported the module"
        assert state_of(book, finding) is State.WAITING
        pool = importlib.import_module(MODULE)
        assert state_of(book, finding) is State.APPLIED
        assert CALLS["touch"](pool) and calls
        assert book.revert(FEATURE) == {"T-touch": State.INERT}
        assert not isinstance(vars(pool)["touch"], wrapt.FunctionWrapper)

    def test_what_was_taken_back_is_not_wrapped_any_more(
        self, plan_patches: PlanPatches, book: PatchBook
    ) -> None:
        plan = plan_patches(declare("touch", when_imported=True))
        book.apply(plan)
        assert book.revert(FEATURE) == {"T-touch": State.INERT}
        pool = importlib.import_module(MODULE)
        assert not isinstance(vars(pool)["touch"], wrapt.FunctionWrapper)
        assert state_of(book, plan.findings[0]) is State.INERT

    def test_a_module_that_is_there_is_wrapped_at_once(
        self, plan_patches: PlanPatches, book: PatchBook
    ) -> None:
        importlib.import_module(MODULE)
        plan = plan_patches(declare("touch", when_imported=True))
        book.apply(plan)
        assert state_of(book, plan.findings[0]) is State.APPLIED

    def test_another_source_is_drift(self, plan_patches: PlanPatches) -> None:
        (finding,) = plan_patches(declare("gone", when_imported=True)).findings
        assert finding.state is State.DRIFTED
        assert MODULE not in sys.modules
