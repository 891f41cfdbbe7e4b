# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import wrapt
from small_upstream import FEATURE, MODULE, PlanPatches, declare, record, record_foreign

from vllm_ascend_kvext.errors import PatchError
from vllm_ascend_kvext.patching.declaration import Kind, Patch
from vllm_ascend_kvext.patching.install import PatchBook
from vllm_ascend_kvext.patching.plan import State

MISSING = object()


@pytest.fixture
def book() -> PatchBook:
    return PatchBook()


@pytest.fixture
def pool(plan_patches: PlanPatches) -> ModuleType:
    return importlib.import_module(MODULE)


def slots(pool: ModuleType) -> dict[str, Any]:
    """The attributes that the tests patch, as they lie in ``vars()``."""
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
    before, stock = slots(pool), CALLS[target](pool)
    for _ in range(2):
        assert book.apply(plan) == (f"T-{target}",)
        assert book.state(plan.findings[0]) is State.APPLIED
        assert slots(pool)[target] is not before[target]
        assert CALLS[target](pool) == stock
        assert calls, "the wrapper was called"
        assert book.revert(FEATURE) == {f"T-{target}": State.INERT}
        assert book.state(plan.findings[0]) is State.INERT
        after = slots(pool)
        assert all(after[name] is before[name] for name in before)
        calls.clear()
        assert CALLS[target](pool) == stock
        assert not calls


def test_only_the_class_that_is_named_is_patched(
    plan_patches: PlanPatches, book: PatchBook, pool: ModuleType
) -> None:
    calls: list[str] = []
    book.apply(plan_patches(declare("SmallPool.inherited", wrapper=record(calls))))
    pool.Pool().inherited(1)
    assert not calls
    pool.SmallPool().inherited(1)
    assert calls == ["ours"]


def test_second_apply_is_no_second_wrapper(
    plan_patches: PlanPatches, book: PatchBook, pool: ModuleType
) -> None:
    calls: list[str] = []
    patch = declare("Pool.free", wrapper=record(calls))
    book.apply(plan_patches(patch))
    installed = vars(pool.Pool)["free"]
    assert book.apply(plan_patches(patch)) == ()
    assert vars(pool.Pool)["free"] is installed
    pool.Pool().free([])
    assert calls == ["ours"]


def test_apply_puts_back_a_wrapper_that_someone_removed(
    plan_patches: PlanPatches, book: PatchBook, pool: ModuleType
) -> None:
    original = vars(pool.Pool)["free"]
    patch = declare("Pool.free")
    plan = plan_patches(patch)
    book.apply(plan)
    pool.Pool.free = original
    assert book.state(plan.findings[0]) is State.SHADOWED
    assert book.apply(plan_patches(patch)) == (patch.id,)
    assert book.state(plan.findings[0]) is State.APPLIED
    book.revert(FEATURE)
    assert vars(pool.Pool)["free"] is original


def test_revert_under_a_foreign_wrapper_switches_off(
    plan_patches: PlanPatches, book: PatchBook, pool: ModuleType
) -> None:
    calls: list[str] = []
    original = vars(pool.Pool)["free"]
    patch = declare("Pool.free", wrapper=record(calls))
    plan = plan_patches(patch)
    book.apply(plan)
    ours = vars(pool.Pool)["free"]
    foreign = wrapt.FunctionWrapper(ours, record_foreign(calls))
    pool.Pool.free = foreign
    assert book.state(plan.findings[0]) is State.APPLIED, "it still runs, below the other"

    assert book.revert(FEATURE) == {patch.id: State.SHADOWED}
    assert book.state(plan.findings[0]) is State.SHADOWED
    assert vars(pool.Pool)["free"] is foreign, "what others did is theirs to undo"
    pool.Pool().free([])
    assert calls == ["foreign"]

    calls.clear()
    assert book.apply(plan_patches(patch)) == (patch.id,)
    pool.Pool().free([])
    assert calls == ["foreign", "ours"], "switched on again, not wrapped twice"

    pool.Pool.free = ours  # the other one leaves
    assert book.revert(FEATURE) == {patch.id: State.INERT}
    assert vars(pool.Pool)["free"] is original


def test_replaced_by_a_foreign_function_is_shadowed(
    plan_patches: PlanPatches, book: PatchBook, pool: ModuleType
) -> None:
    plan = plan_patches(declare("Pool.free"))
    book.apply(plan)
    pool.Pool.free = lambda self, blocks: None
    assert book.state(plan.findings[0]) is State.SHADOWED


def test_two_patches_of_one_target_leave_in_reverse_order(
    plan_patches: PlanPatches, book: PatchBook, pool: ModuleType
) -> None:
    calls: list[str] = []
    original = vars(pool.Pool)["free"]
    book.apply(
        plan_patches(
            declare("Pool.free", id="T-1", wrapper=record(calls, "first")),
            declare("Pool.free", id="T-2", wrapper=record(calls, "second")),
        )
    )
    pool.Pool().free([])
    assert calls == ["second", "first"]
    assert list(book.revert(FEATURE).items()) == [("T-2", State.INERT), ("T-1", State.INERT)]
    assert vars(pool.Pool)["free"] is original


class TestAtomicity:
    def failing_hook(self) -> Patch:
        def install() -> Callable[[], None]:
            raise OSError("no such hook")

        return declare("calls", id="T-hook", kind=Kind.HOOK, install=install)

    def test_if_one_fails_those_before_it_are_taken_back(
        self, plan_patches: PlanPatches, book: PatchBook, pool: ModuleType
    ) -> None:
        before = slots(pool)
        plan = plan_patches(
            declare("Pool.free"),
            declare("SmallPool.inherited"),
            self.failing_hook(),
            declare("touch"),
        )
        with pytest.raises(PatchError, match=r"T-hook cannot be installed.*no such hook") as raised:
            book.apply(plan)
        assert isinstance(raised.value.__cause__, OSError)
        after = slots(pool)
        assert all(after[name] is before[name] for name in before)
        states = [book.state(finding) for finding in plan.findings]
        assert states == [State.INERT, State.INERT, State.FAILED, State.INERT]
        (failed,) = [f for f in map(book.bring_up_to_date, plan.findings) if f.reason]
        assert failed.reason == "OSError: no such hook"

    def test_what_was_applied_before_stays(
        self, plan_patches: PlanPatches, book: PatchBook, pool: ModuleType
    ) -> None:
        early = declare("Pool.free")
        book.apply(plan_patches(early))
        with pytest.raises(PatchError):
            book.apply(plan_patches(early, declare("touch"), self.failing_hook()))
        assert book.state(plan_patches(early).findings[0]) is State.APPLIED

    def test_a_failure_is_forgotten_once_it_works(
        self, plan_patches: PlanPatches, book: PatchBook
    ) -> None:
        attempts: list[int] = []

        def install() -> Callable[[], None]:
            attempts.append(1)
            if len(attempts) == 1:
                raise OSError("not yet")
            return attempts.clear

        plan = plan_patches(declare("calls", kind=Kind.HOOK, install=install))
        with pytest.raises(PatchError, match="not yet"):
            book.apply(plan)
        assert book.apply(plan)
        assert book.state(plan.findings[0]) is State.APPLIED

    def test_a_plan_that_does_not_fit_touches_nothing(
        self, plan_patches: PlanPatches, book: PatchBook, pool: ModuleType
    ) -> None:
        before = slots(pool)
        with pytest.raises(PatchError, match="does not fit"):
            book.apply(plan_patches(declare("Pool.free"), declare("Pool.gone")))
        after = slots(pool)
        assert all(after[name] is before[name] for name in before)


def test_hook_is_used_once_and_undone(plan_patches: PlanPatches, book: PatchBook) -> None:
    registry: list[str] = []

    def install() -> Callable[[], None]:
        registry.append("entry")
        return registry.clear

    plan = plan_patches(declare("calls", kind=Kind.HOOK, install=install))
    assert book.apply(plan)
    assert book.apply(plan) == ()
    assert registry == ["entry"]
    assert book.state(plan.findings[0]) is State.APPLIED
    assert book.revert(FEATURE) == {"T-calls": State.INERT}
    assert registry == []
    assert book.apply(plan)


def test_revert_is_for_one_feature(
    plan_patches: PlanPatches, book: PatchBook, pool: ModuleType
) -> None:
    book.apply(plan_patches(declare("Pool.free")))
    assert book.revert("other") == {}
    assert book.revert(FEATURE)
    assert book.revert(FEATURE) == {}


STEPS = ("import", "apply", "foreign", "revert")


@pytest.mark.parametrize("order", list(itertools.permutations(STEPS)), ids="-".join)
def test_any_order_of_import_apply_foreign_patch_and_revert(
    plan_patches: PlanPatches, book: PatchBook, order: tuple[str, ...]
) -> None:
    """Every order of plugins: who imports first, who patches first, who reverts when."""
    calls: list[str] = []
    patch = declare("Pool.free", wrapper=record(calls))
    imported: list[Any] = []
    found: dict[str, Any] = {}

    def importing() -> None:
        imported.append(importlib.import_module(MODULE).Pool)

    def applying() -> None:
        plan = plan_patches(patch)
        found["original"] = vars(importlib.import_module(MODULE).Pool)["free"]
        assert book.apply(plan) == (patch.id,)

    def patching_elsewhere() -> None:
        cls = importlib.import_module(MODULE).Pool
        cls.free = wrapt.FunctionWrapper(vars(cls)["free"], record_foreign(calls))

    def reverting() -> None:
        found["states"] = book.revert(FEATURE)

    steps = dict(zip(STEPS, (importing, applying, patching_elsewhere, reverting), strict=True))
    for step in order:
        steps[step]()

    (cls,) = imported
    assert cls().free([1]) == ([1], False)
    is_applied = order.index("revert") < order.index("apply")
    is_covered = order.index("apply") < order.index("foreign") < order.index("revert")
    assert calls.count("ours") == is_applied
    assert calls.count("foreign") == 1
    assert importlib.import_module(MODULE).calls == ["free"]
    if is_applied:
        assert found["states"] == {}
    elif is_covered:
        assert found["states"] == {patch.id: State.SHADOWED}
    else:
        assert found["states"] == {patch.id: State.INERT}
        if order.index("foreign") < order.index("apply"):
            assert vars(cls)["free"] is found["original"]


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
