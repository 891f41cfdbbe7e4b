# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Phase one: checks whether every patch of a feature fits the installed upstream.

This phase changes nothing.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial

from vllm_ascend_kvext.compat import VLLM, VLLM_ASCEND, Upstream, package_folder, version_in
from vllm_ascend_kvext.errors import FingerprintError, PatchError
from vllm_ascend_kvext.patching.declaration import Patch
from vllm_ascend_kvext.patching.fingerprint import (
    fingerprint_live,
    fingerprint_source,
    forget_sources,
)
from vllm_ascend_kvext.patching.store import FingerprintStore
from vllm_ascend_kvext.patching.target import MissingTargetError, describe, resolve, wrapper_chain


class State(enum.Enum):
    """The state of a patch in this process."""

    APPLIED = "applied"
    """The patch is in effect."""
    WAITING = "waiting"
    """The patch comes into effect when upstream imports the target's module."""
    INERT = "inert"
    """The patch fits, and is not installed."""
    SKIPPED_VERSION = "skipped_version"
    """The patch is not part of its feature in this version of upstream."""
    DRIFTED = "drifted"
    """A function differs from the version that the patch was written against."""
    MISSING_TARGET = "missing_target"
    """Upstream has no attribute of that name."""
    SHADOWED = "shadowed"
    """Other code has put its own function in front of ours, or in its place."""
    FAILED = "failed"
    """Installing the patch raised an error, and its whole feature was taken back."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What the check of one patch has found.

    Attributes:
        state: INERT if the patch fits, otherwise why it does not.
        reason: Why the patch does not fit: where, what was expected, and what was found.
        fingerprints: The fingerprints of the functions that fit, in the order of the declaration.
    """

    patch: Patch
    state: State
    reason: str = ""
    fingerprints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FeaturePlan:
    """The findings for all patches of one feature."""

    feature: str
    findings: tuple[Finding, ...]

    @property
    def fitting(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.state is State.INERT)

    @property
    def misfits(self) -> tuple[Finding, ...]:
        """The findings that keep the feature from being installed."""
        skipped = (State.INERT, State.SKIPPED_VERSION)
        return tuple(finding for finding in self.findings if finding.state not in skipped)

    @property
    def fits(self) -> bool:
        return bool(self.fitting) and not self.misfits


def plan_features(
    features: Iterable[str],
    ledger: Collection[Patch],
    upstream: Upstream,
    store: FingerprintStore,
) -> tuple[FeaturePlan, ...]:
    """Check all patches of some features. The check imports the modules of their targets."""
    check = _Check(upstream, store)
    try:
        return tuple(
            FeaturePlan(name, tuple(check(patch) for patch in ledger if patch.feature == name))
            for name in features
        )
    finally:
        forget_sources()


def digest(plans: Iterable[FeaturePlan]) -> str:
    """A short name of some plans. It is equal in all processes that have equal plans."""
    lines = sorted(
        f"{finding.patch.id} {finding.state.value} {' '.join(finding.fingerprints)}"
        for plan in plans
        for finding in plan.findings
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


class _DriftError(PatchError):
    """A function differs from the version that the patch was written against."""


def _require_known(name: str, expected: frozenset[str], take: Callable[[], str], place: str) -> str:
    """Compute the fingerprint of a function; raise `_DriftError` if it is not an expected one."""
    try:
        fingerprint = take()
        found = f"{fingerprint} ({place})"
    except FingerprintError as error:
        fingerprint = ""
        found = f"{place}: {error}"
    if fingerprint not in expected:
        wanted = " or ".join(sorted(expected))
        wanted = wanted or "a fingerprint of this version, and none is stored"
        raise _DriftError(f"{name}: expected {wanted}; found {found}")
    return fingerprint


@dataclass(frozen=True, slots=True)
class _Check:
    upstream: Upstream
    store: FingerprintStore

    def __call__(self, patch: Patch) -> Finding:
        version = self.upstream.vllm or ""
        if not any(version_in(version, versions) for versions in patch.vllm):
            return Finding(patch, State.SKIPPED_VERSION, f"for vLLM {' or '.join(patch.vllm)} only")
        # Without torch_npu, vLLM-Ascend cannot be imported, and is not in use.
        if patch.is_for_vllm_ascend and not (
            self.upstream.vllm_ascend and self.upstream.has_torch_npu
        ):
            return Finding(patch, State.SKIPPED_VERSION, "for vLLM-Ascend only")
        try:
            if patch.when_imported:
                fingerprints = [self._of_source(name) for name in patch.fingerprinted]
            else:
                resolve(patch.target)
                fingerprints = [self._live(name, patch) for name in patch.fingerprinted]
            fingerprints += [self._of_vllm_ascend(name) for name in patch.ascend]
        except MissingTargetError as error:
            return Finding(patch, State.MISSING_TARGET, str(error))
        except _DriftError as error:
            return Finding(patch, State.DRIFTED, str(error))
        return Finding(patch, State.INERT, fingerprints=tuple(fingerprints))

    def _live(self, name: str, patch: Patch) -> str:
        """Check the function in place: it is vLLM's, or a replacement by vLLM-Ascend."""
        expected = self._expected(name)
        for replacement in patch.ascend:
            expected |= self._expected(replacement)
        fingerprints = []
        function = resolve(name).found
        while function is not None:
            function = wrapper_chain(function)[-1]
            take = partial(fingerprint_live, function)
            fingerprints.append(_require_known(name, expected, take, describe(function)))
            # A function whose fingerprint is known may itself wrap a function. Check this function,
            # too.
            function = getattr(function, "__func__", function)
            function = getattr(function, "__wrapped__", None)
        return " ".join(fingerprints)

    def _of_source(self, name: str) -> str:
        """Check the function in the installed source file."""
        package = name.partition(".")[0]
        folder = package_folder(package)
        if folder is None:
            raise MissingTargetError(f"{package} is not installed.")
        take = partial(fingerprint_source, folder.parent, name)
        return _require_known(name, self._expected(name), take, f"in {folder}")

    def _of_vllm_ascend(self, name: str) -> str:
        """Check a function of vLLM-Ascend. It may be absent if the stored release lacks it, too.

        The method reads the file, and does not import it. An import would apply the patches of
        vLLM-Ascend.
        """
        folder = package_folder("vllm_ascend")
        if self.upstream.vllm_ascend is None or folder is None:
            return ""
        if not self._expected(name):
            try:
                fingerprint_source(folder.parent, name)
            except FingerprintError:
                return ""
        return self._of_source(name)

    def _expected(self, name: str) -> frozenset[str]:
        if name.startswith("vllm_ascend."):
            return self.store.expected(VLLM_ASCEND, self.upstream.vllm_ascend or "", name)
        return self.store.expected(VLLM, self.upstream.vllm or "", name)
