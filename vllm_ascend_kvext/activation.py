# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Activates the package when vLLM calls the plugin: checks what fits, then installs what is wanted.

The module knows no single patch; `vllm_ascend_kvext.patches` declares them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from vllm_ascend_kvext import __version__, compat
from vllm_ascend_kvext.compat import Upstream
from vllm_ascend_kvext.declared import did_you_mean
from vllm_ascend_kvext.errors import KvextError, PatchError, SettingsError
from vllm_ascend_kvext.features import DEFAULTS, FEATURES, with_requirements
from vllm_ascend_kvext.patches import PATCHES
from vllm_ascend_kvext.patching.install import BOOK
from vllm_ascend_kvext.patching.plan import FeaturePlan, Finding, digest, plan_features
from vllm_ascend_kvext.patching.store import FingerprintStore
from vllm_ascend_kvext.settings import (
    DISABLE_VARIABLE,
    MODE_VARIABLE,
    RETENTION_INTERVAL_VARIABLE,
    Mode,
    Settings,
    own_variables,
)

# vLLM drops the records of loggers outside its own namespace, so the name begins with "vllm.".
logger = logging.getLogger("vllm.ascend_kvext")

_REMEDY = (
    "`python -m vllm_ascend_kvext status` shows every patch; "
    f"{MODE_VARIABLE}={Mode.OFF.value} turns the package off."
)


def register() -> None:
    """Activate according to the environment; see `vllm_ascend_kvext.register`."""
    settings = read_settings(os.environ)
    try:
        _introduce({name: partial(os.environ.get, name) for name in own_variables(os.environ)})
        install(survey(settings))
    except KvextError:
        raise
    except Exception:
        if settings.mode is Mode.STRICT or settings.requests:
            raise
        logger.warning(
            "vllm-ascend-kvext leaves vLLM untouched: it failed unexpectedly. "
            "`python -m vllm_ascend_kvext status` shows where."
        )
        logger.debug("The unexpected failure:", exc_info=True)


def read_settings(environ: Mapping[str, str]) -> Settings:
    """The settings of a process with these environment variables.

    Raises:
        SettingsError: See `Settings.from_environ`. Also if a feature that is to be left out is not
            known, cannot be left out, or is required by a feature that is asked for.
    """
    settings = Settings.from_environ(environ)
    known = [feature.name for feature in DEFAULTS]
    for name in sorted(settings.disabled.difference(known)):
        raise SettingsError(
            f"{DISABLE_VARIABLE}={environ[DISABLE_VARIABLE]!r}: {name!r} is not one of them: "
            f"expected some of {', '.join(known)}, separated by commas.{did_you_mean(name, known)}"
        )
    for feature, variable in settings.requests.items():
        missing = sorted(with_requirements([feature], FEATURES) & settings.disabled)
        if missing:
            raise SettingsError(
                f"{DISABLE_VARIABLE} leaves out {', '.join(missing)}, on which the feature "
                f"{feature!r} is built, and {variable} asks for that. Take it off the list, or "
                f"unset {variable}."
            )
    return settings


@dataclass(frozen=True, slots=True)
class Activation:
    """The settings, the installed upstream, and the plans of features.

    There are no plans in mode ``off``, with an unsupported upstream, and if no feature is wanted.
    """

    settings: Settings
    upstream: Upstream
    why_unsupported: str
    plans: tuple[FeaturePlan, ...] = ()

    @property
    def misfits(self) -> tuple[FeaturePlan, ...]:
        """The plans that do not fit, except plans of features that the user has disabled."""
        asked_for = self.settings.requests
        dismissed = self.settings.disabled
        return tuple(
            plan
            for plan in self.plans
            if (plan.misfits and plan.feature not in dismissed)
            or (not plan.fitting and plan.feature in asked_for)
        )


def wanted_features(settings: Settings) -> tuple[str, ...]:
    """The features that these settings bring if everything fits, in the order of installation.

    They are the requested features, the features that come with these, the features that are on by
    default, and the features that any of these require.
    """
    defaults = {declared.name for declared in FEATURES if declared.default_on}
    asked_for = settings.requests.keys() | settings.implied_features
    wanted = with_requirements(asked_for | (defaults - settings.disabled), FEATURES)
    return tuple(declared.name for declared in FEATURES if declared.name in wanted)


def survey(settings: Settings, *, plan_everything: bool = False) -> Activation:
    """Find out what is installed, and plan the wanted features. vLLM is not changed.

    If vLLM-Ascend is in use, its own global patches are applied first, as its plugins would do
    anyway. Patches of this package must wrap the functions that vLLM-Ascend puts there, and must
    not be replaced by them.

    Args:
        settings: The settings of this process.
        plan_everything: Whether to plan all features, wanted or not. Mode ``strict`` always does.

    Raises:
        PatchError: If the patches of vLLM-Ascend fail.
    """
    upstream = compat.detect(os.environ)
    activation = Activation(settings, upstream, compat.why_unsupported(upstream))
    if settings.mode is Mode.OFF or activation.why_unsupported:
        return activation
    plan_everything |= settings.mode is Mode.STRICT
    features = [each.name for each in FEATURES] if plan_everything else wanted_features(settings)
    if not features:
        return activation
    _let_vllm_ascend_go_first(upstream, os.environ)
    plans = plan_features(features, PATCHES, upstream, FingerprintStore.load())
    return replace(activation, plans=plans)


def install(activation: Activation) -> None:
    """Install the wanted features.

    Raises:
        SettingsError: If the retention interval is wrong for every model.
        PatchError: If a requested feature does not fit, or, in mode ``strict``, if any feature does
            not fit. Features that were installed before stay. No patch of the failed feature is in
            place.
    """
    settings = activation.settings
    if settings.mode is Mode.OFF:
        return
    if activation.why_unsupported:
        _report_unsupported(activation)
        return
    settings.refuse_wrong_interval()
    if settings.retention_interval is None:
        # To this package a blank value means unset. vLLM 0.23.0 would try to read it as an integer.
        os.environ.pop(RETENTION_INTERVAL_VARIABLE, None)
    else:
        introduce_interval()
    refused = activation.misfits
    asked_for = with_requirements(settings.requests, FEATURES)
    fatal = [plan for plan in refused if settings.mode is Mode.STRICT or plan.feature in asked_for]
    if fatal:
        raise PatchError(_explain(fatal, activation))
    if refused:
        logger.warning("%s", _explain(refused, activation))
    wanted = wanted_features(settings)
    num_patches = 0
    features: list[str] = []
    for plan in activation.plans:
        if plan.fits and plan.feature in wanted and (applied := BOOK.apply(plan)):
            num_patches += len(applied)
            features.append(plan.feature)
    if features:
        logger.info(
            "vllm-ascend-kvext %s: %d patch(es) applied to %s (plan %s) for %s.",
            __version__,
            num_patches,
            activation.upstream,
            digest(activation.plans),
            ", ".join(features),
        )


def current_findings(activation: Activation) -> tuple[Finding, ...]:
    """The current state of every planned patch, installed or not."""
    return tuple(
        BOOK.bring_up_to_date(finding) for plan in activation.plans for finding in plan.findings
    )


def _explain(plans: Iterable[FeaturePlan], activation: Activation) -> str:
    """A text with every patch of these features that does not fit, and the remedy."""
    lines = []
    for plan in plans:
        request = activation.settings.requests.get(plan.feature)
        lines.append(
            f"vllm-ascend-kvext does not install the feature {plan.feature!r}: it does not fit "
            f"{activation.upstream}.{f' It was requested with {request}.' if request else ''}"
        )
        for finding in plan.misfits or plan.findings:
            patch = finding.patch
            lines.append(f"  {patch.id} {finding.state.name} {patch.target}: {finding.reason}")
    lines.append(f"Remedy: install {compat.supported_versions()} as published. {_REMEDY}")
    return "\n".join(lines)


def _report_unsupported(activation: Activation) -> None:
    settings = activation.settings
    message = f"vllm-ascend-kvext leaves vLLM untouched: {activation.why_unsupported}."
    if settings.mode is Mode.STRICT:
        raise PatchError(f"{message} {_REMEDY}")
    if settings.requests and activation.upstream.vllm is None:
        raise PatchError(f"{message} {', '.join(settings.requests.values())} asks for a feature.")
    for feature, variable in settings.requests.items():
        if not _knows(variable):
            raise PatchError(
                f"{message} {feature.capitalize()} was requested with {variable}, which this vLLM "
                f"does not know. Unset it. {_REMEDY}"
            )
        message += f" {variable} is set and known to this vLLM, whose own implementation obeys it."
    logger.warning("%s", message)


def _knows(variable: str) -> bool:
    # This package has added its own variables to vLLM's variables: see `_introduce`.
    if variable in own_variables(os.environ) or compat.package_folder("vllm") is None:
        return False
    from vllm import envs

    return variable in envs.environment_variables


def introduce_interval() -> None:
    """Keep vLLM 0.30, which does not know the retention interval, from warning about it.

    The added reader reports the variable as not set. vLLM-Ascend 0.30 still asks for the variable.
    vLLM-Ascend would check the value against a unit that may differ from the unit of its hits.
    Retention reads the environment itself.
    """
    _introduce({RETENTION_INTERVAL_VARIABLE: lambda: None})


def _introduce(readers: Mapping[str, Callable[[], str | None]]) -> None:
    """Keep vLLM from warning about unknown variables. A variable that vLLM knows stays as it is."""
    if not readers or compat.package_folder("vllm") is None:
        return
    from vllm import envs

    for name, read in readers.items():
        envs.environment_variables.setdefault(name, read)


def _let_vllm_ascend_go_first(upstream: Upstream, environ: Mapping[str, str]) -> None:
    allowed_plugins = environ.get("VLLM_PLUGINS")
    if upstream.vllm_ascend is None or not upstream.has_torch_npu:
        return
    if allowed_plugins is not None and "ascend" not in allowed_plugins.split(","):
        return
    import vllm_ascend

    try:
        vllm_ascend._ensure_global_patch()
    except Exception as error:
        raise PatchError(
            f"vLLM-Ascend {upstream.vllm_ascend} cannot apply its own patches, which have to be in "
            f"place before ours: {type(error).__name__}: {error}. {_REMEDY}"
        ) from error
