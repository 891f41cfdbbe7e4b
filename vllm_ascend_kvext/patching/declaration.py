# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Declares what a patch is. A patch is data, and not code that runs.

The module knows nothing of vLLM. All patches are listed in ``vllm_ascend_kvext.patches.PATCHES``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_ascend_kvext.supported import SUPPORTED

Wrapper = Callable[..., Any]
"""``(wrapped, instance, ...) -> result``. Upstream's own parameters follow under their own names.

``wrapped`` is the wrapped function, which is already bound. ``instance`` is the object of a method,
the class of a classmethod, and None for a function of a module.
"""

Install = Callable[[], Callable[[], None]]
"""A function that installs an official hook of upstream, and returns a function that undoes it."""


ALL_SUPPORTED = tuple(release.vllm for release in SUPPORTED)

BEFORE_0_30 = ("==0.23.0.*",)
"""The supported versions of vLLM before 0.30, for patches that 0.30 does not need in this form."""

SINCE_0_30 = tuple(each for each in ALL_SUPPORTED if each not in BEFORE_0_30)
"""The supported versions of vLLM since 0.30, for patches that only 0.30 needs in this form."""


class Kind(enum.Enum):
    """How a patch takes effect, in order of preference.

    A wrapper calls upstream's function. A replacement need not call it.
    """

    HOOK = "hook"
    WRAP = "wrap"
    REPLACE = "replace"


@dataclass(frozen=True, slots=True)
class Feature:
    """The name of patches that are installed together.

    Attributes:
        default_on: Whether the feature is installed without being asked for.
        requires: The features that are installed with it.
    """

    name: str
    default_on: bool = False
    requires: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One change to upstream: where, what, why, and until when.

    Attributes:
        id: A stable name, for example ``KVX-101``. It is never reused.
        target: ``module:qualname`` of the upstream attribute.
        feature: The feature that the patch is part of. A feature is installed as a whole or not at
            all.
        why: The upstream behaviour that makes the patch necessary.
        retire_when: The condition under which the patch can be deleted.
        vllm: Closed version ranges of vLLM in which the patch is part of its feature. The default
            is all supported versions; a patch for some of them names these.
        wrapper: For ``WRAP`` and ``REPLACE``.
        install: For ``HOOK``.
        undo: Removes what the wrapper has set on objects of upstream that are still in use.
        relies_on: Further ``module:qualname`` of upstream functions on whose behaviour the wrapper
            relies. They are fingerprinted like the target.
        ascend: Functions of vLLM-Ascend on which the wrapper relies. They are compared if
            vLLM-Ascend is installed. If one of them has replaced the target, or a function of
            ``relies_on``, the patch still fits.
        when_imported: Whether planning does not import the target's module, because an import would
            take long, or would come before upstream's own import. Then the source files are
            compared, and the target is wrapped as soon as upstream imports its module.
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

    def __post_init__(self) -> None:
        needed = ("install",) if self.kind is Kind.HOOK else ("wrapper",)
        given = tuple(name for name in ("install", "wrapper") if getattr(self, name) is not None)
        if given != needed:
            raise ValueError(f"{self.id}: a {self.kind.value} patch needs {needed[0]} and no other")

    @property
    def is_for_vllm_ascend(self) -> bool:
        """Whether the target, and so every fingerprinted function, belongs to vLLM-Ascend."""
        return self.target.startswith("vllm_ascend.")

    @property
    def fingerprinted(self) -> tuple[str, ...]:
        """The functions of upstream whose source must be as it was when this patch was written.

        The target of a hook is not among them. It need not be a function; it only has to exist.
        """
        target = () if self.kind is Kind.HOOK else (self.target,)
        return target + self.relies_on
