# SPDX-License-Identifier: Apache-2.0
"""What a patch is: a declaration, not code that runs.

Knows nothing of vLLM; the ledger of all patches is ``vllm_ascend_kvext.patches.PATCHES``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Wrapper = Callable[..., Any]
"""``(wrapped, instance, ...) -> result``, where upstream's own parameters follow by their names.

``wrapped`` is what lies below, bound already. ``instance`` is the object, for a classmethod the
class, for a function of a module None.
"""

Install = Callable[[], Callable[[], None]]
"""Uses an official hook of upstream and returns the function that undoes it."""


class Kind(enum.Enum):
    """How a patch takes effect, in order of preference."""

    HOOK = "hook"
    WRAP = "wrap"
    REPLACE = "replace"


@dataclass(frozen=True, slots=True)
class Feature:
    """Patches that make sense together only.

    Attributes:
        name: What `Patch.feature` names.
        default_on: Whether it is installed without being asked for.
        requires: Features that are installed with it, whoever asked for it.
    """

    name: str
    default_on: bool = False
    requires: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One change to upstream: where, what, since when, and until when.

    Attributes:
        id: Stable name, for example ``KVX-101``; never reused.
        target: ``module:qualname`` of the upstream attribute.
        kind: Official hook, wrapper (calls upstream), or replacement (need not call it).
        feature: The feature this patch belongs to; a feature applies as a whole or not at all.
        vllm: Closed version ranges (PEP 440) of vLLM that have this target; elsewhere the
            patch is not part of the feature.
        why: The upstream behaviour that makes the patch necessary.
        retire_when: The condition under which the patch can be deleted.
        wrapper: For ``WRAP`` and ``REPLACE``.
        install: For ``HOOK``.
        undo: Takes back what the wrapper has set on upstream's objects that are in use.
        relies_on: Further ``module:qualname`` of upstream functions whose behaviour the wrapper
            counts on. They are fingerprinted like the target itself.
        ascend: The same for functions of vLLM-Ascend, which are compared where it is installed.
            A target or a function relied on that vLLM-Ascend has replaced by one of them fits.
        lmcache: Functions of LMCache whose behaviour is counted on. They are compared by the patch
            itself, when LMCache is used: planning does not look at what may never be.
    """

    id: str
    target: str
    kind: Kind
    feature: str
    vllm: tuple[str, ...]
    why: str
    retire_when: str
    wrapper: Wrapper | None = None
    install: Install | None = None
    undo: Callable[[], None] | None = None
    relies_on: tuple[str, ...] = ()
    ascend: tuple[str, ...] = ()
    lmcache: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.kind is Kind.HOOK) != (self.install is not None) or (self.kind is Kind.HOOK) == (
            self.wrapper is not None
        ):
            raise ValueError(
                f"{self.id}: a {self.kind.value} patch needs "
                f"{'install' if self.kind is Kind.HOOK else 'wrapper'} and nothing else"
            )

    @property
    def is_for_vllm_ascend(self) -> bool:
        """Whether the target is vLLM-Ascend's own, and with it all that is fingerprinted."""
        return self.target.startswith("vllm_ascend.")

    @property
    def fingerprinted(self) -> tuple[str, ...]:
        """The functions of vLLM that have to be the ones this patch was written against.

        The target of a hook need not be a function; to exist is enough.
        """
        target = () if self.kind is Kind.HOOK else (self.target,)
        return target + self.relies_on
