# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Phase two: installs a feature as a whole or not at all, and takes it back.

wrapt makes the wrappers, and this module keeps the records. The module reads from the attribute
itself whether a wrapper is in place, so other patches of the same attribute do not confuse it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import wrapt

from vllm_ascend_kvext.errors import PatchError
from vllm_ascend_kvext.patching.declaration import Patch, Wrapper
from vllm_ascend_kvext.patching.plan import FeaturePlan, Finding, State
from vllm_ascend_kvext.patching.target import Target, resolve, wrapper_chain


@dataclass(slots=True)
class _Wrapping:
    """A wrapper of this package in an attribute of upstream, and what the attribute was before.

    While the wrapper is off, it only calls the wrapped function.
    """

    patch: Patch
    target: Target
    # A subclass of FunctionWrapper would double the cost of each call.
    wrapper: wrapt.FunctionWrapper[..., Any] = field(init=False)
    # wrapt's own switch is a function that every call would have to call.
    is_on: bool = True

    @property
    def is_reachable(self) -> bool:
        """Whether a call of the attribute reaches the wrapper, as far as the chain can be seen."""
        return any(layer is self.wrapper for layer in wrapper_chain(self.target.current))

    def state(self) -> State:
        return State.APPLIED if self.is_reachable and self.is_on else State.SHADOWED

    def revert(self) -> State:
        """Restore the attribute. If another wrapper lies over ours, switch ours off only."""
        self.is_on = False
        if self.patch.undo is not None:
            self.patch.undo()
        if self.target.current is not self.wrapper:
            return State.SHADOWED
        if self.target.was_local:
            setattr(self.target.parent, self.target.attribute, self.target.found)
        else:
            delattr(self.target.parent, self.target.attribute)
        return State.INERT


@dataclass(frozen=True, slots=True)
class _Hooking:
    """A hook of upstream that is installed, or a wrapper that waits for an import.

    Attributes:
        undo: Takes the hook back; None for a wrapper that waits until upstream imports its target.
    """

    patch: Patch
    undo: Callable[[], None] | None = None

    def state(self) -> State:
        return State.WAITING if self.undo is None else State.APPLIED

    def revert(self) -> State:
        if self.undo is not None:
            self.undo()
        return State.INERT


class PatchBook:
    """Records which patches are installed in this process."""

    def __init__(self) -> None:
        # Maps the id of a patch to the reason why its last installation failed.
        self._failures: dict[str, str] = {}
        self._entries: dict[str, _Wrapping | _Hooking] = {}
        self._lock = threading.RLock()

    def apply(self, plan: FeaturePlan) -> tuple[str, ...]:
        """Install a feature. The call is atomic: if it raises, no patch of the feature is in place.

        Returns:
            The ids of the patches that were not in effect before. A second call returns none.

        Raises:
            PatchError: If the plan does not fit, or installing a patch raises.
        """
        if not plan.fits:
            raise PatchError(f"The feature {plan.feature!r} does not fit; see its plan.")
        with self._lock:
            installed: list[str] = []
            for finding in plan.fitting:
                patch = finding.patch
                self._failures.pop(patch.id, None)
                try:
                    if self._install(patch):
                        installed.append(patch.id)
                except Exception as error:
                    for patch_id in reversed(installed):
                        self._revert(patch_id)
                    self._failures[patch.id] = f"{type(error).__name__}: {error}"
                    raise PatchError(
                        f"{patch.id} cannot be installed at {patch.target}: "
                        f"{self._failures[patch.id]}. Nothing of {plan.feature!r} is in place."
                    ) from error
            return tuple(installed)

    def revert(self, feature: str) -> dict[str, State]:
        """Take back a feature, last patch first.

        Returns:
            One state per patch. INERT: the attribute is what it was before. SHADOWED: another
            wrapper lies over ours, so ours stays in place and is off. If that wrapper belongs to
            this package, ours is removed as soon as a later revert removes that wrapper.
        """
        with self._lock:
            ids = [id for id, entry in self._entries.items() if entry.patch.feature == feature]
            states = {patch_id: self._revert(patch_id) for patch_id in reversed(ids)}
            for patch_id, entry in reversed(list(self._entries.items())):
                if isinstance(entry, _Wrapping) and not entry.is_on:
                    self._revert(patch_id)
            return states

    def bring_up_to_date(self, finding: Finding) -> Finding:
        """A finding of the plan, with the state of its patch at this moment."""
        failure = self._failures.get(finding.patch.id)
        if failure is not None:
            return replace(finding, state=State.FAILED, reason=failure)
        entry = self._entries.get(finding.patch.id)
        return finding if entry is None else replace(finding, state=entry.state())

    def _install(self, patch: Patch) -> bool:
        entry = self._entries.get(patch.id)
        if isinstance(entry, _Hooking):
            return False
        if isinstance(entry, _Wrapping) and entry.is_reachable:
            was_on = entry.is_on
            entry.is_on = True
            return not was_on
        if patch.install is not None:
            self._entries[patch.id] = _Hooking(patch, undo=patch.install())
        elif patch.wrapper is not None and patch.when_imported:
            waiting = _Hooking(patch)
            self._entries[patch.id] = waiting
            end_waiting = partial(self._end_waiting, waiting, patch.wrapper)
            # wrapt calls it at once if the module has been imported already.
            wrapt.register_post_import_hook(end_waiting, patch.target.partition(":")[0])
        elif patch.wrapper is not None:
            self._entries[patch.id] = _wrap(patch, patch.wrapper)
        return True

    def _end_waiting(self, waiting: _Hooking, wrapper: Wrapper, _module: object) -> None:
        # A patch that was taken back meanwhile is not installed. This method must not take the
        # lock, because a thread that holds the lock may be waiting for the import.
        if self._entries.get(waiting.patch.id) is waiting:
            self._entries[waiting.patch.id] = _wrap(waiting.patch, wrapper)

    def _revert(self, patch_id: str) -> State:
        state = self._entries[patch_id].revert()
        if state is State.INERT:
            del self._entries[patch_id]
        return state


def _wrap(patch: Patch, wrapper: Wrapper) -> _Wrapping:
    # The target is resolved again, because an earlier patch may have wrapped the same target.
    target = resolve(patch.target)
    wrapping = _Wrapping(patch, target)

    # wrapt calls a wrapper in this form. The last line lets Python bind the arguments by name.
    def call(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if not wrapping.is_on:
            return wrapped(*args, **kwargs)
        return wrapper(wrapped, instance, *args, **kwargs)

    wrapping.wrapper = wrapt.FunctionWrapper(target.found, call)
    setattr(target.parent, target.attribute, wrapping.wrapper)
    return wrapping


BOOK = PatchBook()
"""The records of this process."""
