# SPDX-License-Identifier: Apache-2.0
"""What a patch is: a declaration, not code that runs.

Knows nothing of vLLM; the ledger of all patches is ``vllm_ascend_kvext.patches.PATCHES``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_ascend_kvext.supported import SUPPORTED

Wrapper = Callable[..., Any]
"""``(wrapped, instance, ...) -> result``, where upstream's own parameters follow by their names.

``wrapped`` is what lies below, bound already. ``instance`` is the object, for a classmethod the
class, for a function of a module None.
"""

Install = Callable[[], Callable[[], None]]
"""Uses an official hook of upstream and returns the function that undoes it."""


ALL_SUPPORTED = tuple(release.vllm for release in SUPPORTED)

BEFORE_0_30 = ("==0.23.0.*",)
"""The supported vLLM before 0.30: for what 0.30 has mended, or has in another form."""

SINCE_0_30 = tuple(each for each in ALL_SUPPORTED if each not in BEFORE_0_30)
"""The supported vLLM from 0.30 on: for the other form."""


class Kind(enum.Enum):
    """How a patch takes effect, in order of preference; a replacement need not call upstream."""

    HOOK = "hook"
    WRAP = "wrap"
    REPLACE = "replace"


@dataclass(frozen=True, slots=True)
class Feature:
    """Patches that make sense together only, and the features that are installed with them."""

    name: str
    default_on: bool = False
    requires: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One change to upstream: where, what, since when, and until when.

    Attributes:
        id: Stable name, for example ``KVX-101``; never reused.
        target: ``module:qualname`` of the upstream attribute.
        feature: A feature applies as a whole or not at all.
        why: The upstream behaviour that makes the patch necessary.
        retire_when: The condition under which the patch can be deleted.
        vllm: Closed version ranges of vLLM in which the patch is part of its feature: all that are
            supported, unless they differ in it.
        wrapper: For ``WRAP`` and ``REPLACE``.
        install: For ``HOOK``.
        undo: Takes back what the wrapper has set on upstream's objects that are in use.
        relies_on: Further ``module:qualname`` of upstream functions whose behaviour the wrapper
            counts on. They are fingerprinted like the target itself.
        ascend: The same for functions of vLLM-Ascend, which are compared where it is installed.
            A target or a function relied on that vLLM-Ascend has replaced by one of them fits.
        when_imported: Whether planning leaves the target's module alone: an import would cost time,
            or come before upstream's own. The source of what is fingerprinted is compared then, and
            the target is wrapped as soon as upstream imports its module.
        lmcache: Functions of LMCache whose behaviour is counted on. They are compared by the patch
            itself, when LMCache is used: planning does not look at what may never be.
    """

    id: str
    target: str
    kind: Kind = Kind.WRAP
    feature: str
    why: str
    retire_when: str
    vllm: tuple[str, ...] = ALL_SUPPORTED
    wrapper: Wrapper | None = None
    install: Install | None = None
    undo: Callable[[], None] | None = None
    relies_on: tuple[str, ...] = ()
    ascend: tuple[str, ...] = ()
    when_imported: bool = False
    lmcache: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        needed = ("install",) if self.kind is Kind.HOOK else ("wrapper",)
        given = tuple(name for name in ("install", "wrapper") if getattr(self, name) is not None)
        if given != needed:
            raise ValueError(f"{self.id}: a {self.kind.value} patch needs {needed[0]} and no other")

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
