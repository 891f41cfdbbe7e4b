# SPDX-License-Identifier: Apache-2.0
"""Every environment variable of this package: typed, documented, validated once.

Knows nothing of vLLM: whether a retention interval suits a model is decided at engine start,
where the unit of its prefix-cache hits is known.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.features import (
    CONNECTOR,
    DEFAULTS,
    FAST_PREFIX_CACHE,
    FEATURES,
    LMCACHE,
    REPAIRS,
    with_requirements,
)

OWN_PREFIX = "VLLM_ASCEND_KVEXT_"
MODE_VARIABLE = f"{OWN_PREFIX}MODE"
DISABLE_VARIABLE = f"{OWN_PREFIX}DISABLE"
RETENTION_VARIABLE = f"{OWN_PREFIX}RETENTION"
FAST_PREFIX_CACHE_VARIABLE = f"{OWN_PREFIX}FAST_PREFIX_CACHE"
BUNDLE_VARIABLE = f"{OWN_PREFIX}BUNDLE"
ASCEND_KERNEL_VARIABLE = f"{OWN_PREFIX}ASCEND_KERNEL"
HOLE_REUSE_VARIABLE = f"{OWN_PREFIX}HOLE_REUSE"
LMCACHE_KEYS_VARIABLE = f"{OWN_PREFIX}LMCACHE_KEYS"
BUNDLE_ALIAS = "LMCACHE_ASCEND_BUNDLE_MULTI_SPEC"
RETENTION_INTERVAL_VARIABLE = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"


ChoiceT = TypeVar("ChoiceT", bound=enum.Enum)


class Mode(enum.Enum):
    """What happens when a patch does not fit the installed upstream."""

    OFF = "off"
    SAFE = "safe"
    STRICT = "strict"


class Switch(enum.Enum):
    """A feature that is implied by others, unless the user says what is to be."""

    OFF = "0"
    ON = "1"
    AUTO = "auto"


class Bundle(enum.Enum):
    """How many calls move the planes of a request."""

    ONE_PER_PLANE = "0"
    ONE = "1"


class AscendKernel(enum.Enum):
    """Whether small scattered runs are moved by the AscendC kernel."""

    OFF = "0"
    ON = "1"


class HoleReuse(enum.Enum):
    """Whether KvextConnector loads what is stored behind a missing chunk."""

    OFF = "0"
    ON = "1"


class Retention(enum.Enum):
    """Who decides which boundaries stay in the prefix cache."""

    INTERVAL = "interval"
    ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True)
class Variable:
    """One row of the table of variables.

    Attributes:
        name: The environment variable.
        default: What holds while it is unset, in words.
        doc: Its values and their effect, one paragraph of Markdown.
    """

    name: str
    default: str
    doc: str


VARIABLES = (
    Variable(
        name=MODE_VARIABLE,
        default=Mode.SAFE.value,
        doc="`off`: vLLM runs untouched. `safe`: a patch that does not fit the installed vLLM is "
        "left out with one warning, unless its feature was asked for. `strict`: it stops vLLM.",
    ),
    Variable(
        name=DISABLE_VARIABLE,
        default="unset",
        doc="Repairs of upstream defects to leave out, separated by commas: "
        + ", ".join(f"`{repair.name}`" for repair in REPAIRS)
        + f". `{CONNECTOR.name}` leaves out KvextConnector: vLLM does not know it then. "
        f"`{LMCACHE.name}` leaves LMCacheMPConnector as LMCache has it. Unset: all of them are in "
        "effect.",
    ),
    Variable(
        name=RETENTION_VARIABLE,
        default=Retention.INTERVAL.value,
        doc="`interval`: the interval below decides alone. `adaptive`: what requests resume from, "
        "share and name decides which blocks of sliding-window and state groups stay in the prefix "
        "cache, and what gives way when it is full. An interval then adds a grid.",
    ),
    Variable(
        name=RETENTION_INTERVAL_VARIABLE,
        default="unset",
        doc="Which blocks of sliding-window and state groups stay in the prefix cache. Unset or "
        "blank: all of them. `0`: those behind the last positions a request can be resumed at. "
        "`N`: also those behind every N-th token.",
    ),
    Variable(
        name=FAST_PREFIX_CACHE_VARIABLE,
        default="auto",
        doc="`1`: the scheduler's prefix-cache functions are replaced by ones that decide the same "
        "in less time. `0`: upstream's run. `auto`: with retention.",
    ),
    Variable(
        name=BUNDLE_VARIABLE,
        default=Bundle.ONE.value,
        doc="`1`: one call moves all groups and planes of a request. `0`: one call per plane, with "
        f"the same result. While it is unset, `{BUNDLE_ALIAS}` is read.",
    ),
    Variable(
        name=ASCEND_KERNEL_VARIABLE,
        default=AscendKernel.OFF.value,
        doc="Experimental: it has never run on an NPU. `1`: small scattered runs are moved by the "
        "AscendC kernel, where the package was built with it. `0`: by the DMA engines.",
    ),
    Variable(
        name=HOLE_REUSE_VARIABLE,
        default=HoleReuse.ON.value,
        doc="With KvextConnector. `1`: where a chunk is missing in host memory, what is stored "
        "behind it is loaded, and the missing tokens alone are computed. `0`: everything behind it "
        "is computed. The option `hole_reuse` of the connector comes first.",
    ),
    Variable(
        name=LMCACHE_KEYS_VARIABLE,
        default=Switch.AUTO.value,
        doc="With LMCacheMPConnector. `1`: the names of stored objects say how the engine lays out "
        "its KV, so that engines with other groups, dtypes, block sizes or parallel sizes never "
        "read each other's. `auto`: the same for models with several KV cache groups; with one "
        "group names are LMCache's. `0`: names are LMCache's always, which is safe only where all "
        "engines of a server are alike.",
    ),
)


HOW_TO_ASK = {
    "retention": f"{RETENTION_VARIABLE}={Retention.ADAPTIVE.value}",
    FAST_PREFIX_CACHE.name: f"{FAST_PREFIX_CACHE_VARIABLE}={Switch.ON.value}",
}
"""For each feature that is off unless it is asked for: a setting that asks for it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The variables as one process found them.

    Attributes:
        mode: Value of ``VLLM_ASCEND_KVEXT_MODE``.
        retention_interval: Text of ``VLLM_PREFIX_CACHE_RETENTION_INTERVAL``; None if unset or
            blank.
        retention: Value of ``VLLM_ASCEND_KVEXT_RETENTION``.
        disabled: The features named by ``VLLM_ASCEND_KVEXT_DISABLE``.
        fast_prefix_cache: Value of ``VLLM_ASCEND_KVEXT_FAST_PREFIX_CACHE``.
        is_bundled: Value of ``VLLM_ASCEND_KVEXT_BUNDLE`` or its alias.
        uses_ascend_kernel: Value of ``VLLM_ASCEND_KVEXT_ASCEND_KERNEL``.
        reuses_holes: Value of ``VLLM_ASCEND_KVEXT_HOLE_REUSE``.
        lmcache_keys: Value of ``VLLM_ASCEND_KVEXT_LMCACHE_KEYS``.
    """

    mode: Mode = Mode.SAFE
    retention_interval: str | None = None
    retention: Retention = Retention.INTERVAL
    disabled: frozenset[str] = frozenset()
    fast_prefix_cache: Switch = Switch.AUTO
    is_bundled: bool = True
    uses_ascend_kernel: bool = False
    reuses_holes: bool = True
    lmcache_keys: Switch = Switch.AUTO

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read and validate the variables.

        With mode ``off`` no other variable is looked at.

        Raises:
            SettingsError: If the mode is not one of `Mode`, a ``VLLM_ASCEND_KVEXT_*`` variable is
                not in `VARIABLES`, a name to disable is not that of a repair, or a feature that is
                asked for is built on a repair that is disabled.
        """
        mode = _parse_choice(environ, MODE_VARIABLE, Mode.SAFE)
        if mode is Mode.OFF:
            return cls(mode=mode)
        _refuse_unknown_variables(environ)
        settings = cls(
            mode=mode,
            retention_interval=parse_retention_interval(environ),
            retention=parse_retention(environ),
            disabled=_parse_disabled(environ.get(DISABLE_VARIABLE, "")),
            fast_prefix_cache=_parse_choice(environ, FAST_PREFIX_CACHE_VARIABLE, Switch.AUTO),
            is_bundled=parse_is_bundled(environ),
            uses_ascend_kernel=parse_uses_ascend_kernel(environ),
            reuses_holes=parse_reuses_holes(environ),
            lmcache_keys=parse_lmcache_keys(environ),
        )
        settings._refuse_contradictions()
        return settings

    @property
    def requests(self) -> dict[str, str]:
        """The features that the user asked for, each with the variable that says so."""
        requests = {}
        if self.retention is Retention.ADAPTIVE:
            requests["retention"] = RETENTION_VARIABLE
        elif self.retention_interval is not None:
            requests["retention"] = RETENTION_INTERVAL_VARIABLE
        if self.fast_prefix_cache is Switch.ON:
            requests[FAST_PREFIX_CACHE.name] = FAST_PREFIX_CACHE_VARIABLE
        return requests

    @property
    def implied_features(self) -> frozenset[str]:
        """What goes with the features asked for, where it fits."""
        if self.fast_prefix_cache is Switch.AUTO and "retention" in self.requests:
            return frozenset({FAST_PREFIX_CACHE.name})
        return frozenset()

    @property
    def requested_features(self) -> frozenset[str]:
        """The features that the user asked for."""
        return frozenset(self.requests)

    def refuse_wrong_interval(self) -> None:
        """Refuse a retention interval that is wrong for every model.

        Which intervals suit a model is decided at engine start, where the unit of its prefix-cache
        hits is known.

        Raises:
            SettingsError: If it is no integer, or negative.
        """
        text = self.retention_interval
        if text is None:
            return
        try:
            problem = "negative" if int(text) < 0 else ""
        except ValueError:
            problem = "not an integer"
        if problem:
            raise SettingsError(
                f"{RETENTION_INTERVAL_VARIABLE}={text!r} is {problem}. Expected 0, or a multiple "
                f"of the number of tokens at which the model's prefix cache can hit; that number "
                f"is in the log of an engine that starts with 0. Unset the variable to keep "
                f"all blocks."
            )

    def _refuse_contradictions(self) -> None:
        for feature, variable in self.requests.items():
            missing = sorted(with_requirements([feature], FEATURES) & self.disabled)
            if missing:
                raise SettingsError(
                    f"{DISABLE_VARIABLE} leaves out {', '.join(missing)}, on which the feature "
                    f"{feature!r} is built, and {variable} asks for that. Take it off the list, or "
                    f"unset {variable}."
                )


def own_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` that only this package knows, with their values."""
    names = (variable.name for variable in VARIABLES)
    return {
        name: environ[name] for name in names if name.startswith(OWN_PREFIX) and name in environ
    }


def parse_retention(environ: Mapping[str, str]) -> Retention:
    """The value of ``VLLM_ASCEND_KVEXT_RETENTION``.

    Raises:
        SettingsError: If it is not one of `Retention`.
    """
    return _parse_choice(environ, RETENTION_VARIABLE, Retention.INTERVAL)


def parse_retention_interval(environ: Mapping[str, str]) -> str | None:
    """The text of ``VLLM_PREFIX_CACHE_RETENTION_INTERVAL``; None where it is unset or blank."""
    text = environ.get(RETENTION_INTERVAL_VARIABLE, "")
    return text if text.strip() else None


def parse_is_bundled(environ: Mapping[str, str]) -> bool:
    """The value of ``VLLM_ASCEND_KVEXT_BUNDLE``, or of its alias while that is unset.

    Raises:
        SettingsError: If it is neither 0 nor 1; the alias may also be true or false.
    """
    if BUNDLE_VARIABLE not in environ and BUNDLE_ALIAS not in environ:
        return True  # Asked once per transfer.
    text = environ.get(BUNDLE_ALIAS, "").strip().lower()
    digit = {"true": "1", "false": "0"}.get(text, text)
    alias = _parse_choice({BUNDLE_ALIAS: digit}, BUNDLE_ALIAS, Bundle.ONE)
    return _parse_choice(environ, BUNDLE_VARIABLE, alias) is Bundle.ONE


def parse_uses_ascend_kernel(environ: Mapping[str, str]) -> bool:
    """The value of ``VLLM_ASCEND_KVEXT_ASCEND_KERNEL``.

    Raises:
        SettingsError: If it is neither 0 nor 1.
    """
    return _parse_choice(environ, ASCEND_KERNEL_VARIABLE, AscendKernel.OFF) is AscendKernel.ON


def parse_reuses_holes(environ: Mapping[str, str]) -> bool:
    """The value of ``VLLM_ASCEND_KVEXT_HOLE_REUSE``.

    Raises:
        SettingsError: If it is neither 0 nor 1.
    """
    return _parse_choice(environ, HOLE_REUSE_VARIABLE, HoleReuse.ON) is HoleReuse.ON


def parse_lmcache_keys(environ: Mapping[str, str]) -> Switch:
    """The value of ``VLLM_ASCEND_KVEXT_LMCACHE_KEYS``.

    Raises:
        SettingsError: If it is not one of `Switch`.
    """
    return _parse_choice(environ, LMCACHE_KEYS_VARIABLE, Switch.AUTO)


def _parse_choice(environ: Mapping[str, str], name: str, default: ChoiceT) -> ChoiceT:
    text = environ.get(name, "")
    value = text.strip().lower()
    if not value:
        return default
    choices = [choice.value for choice in type(default)]
    if value not in choices:
        raise SettingsError(
            f"{name}={text!r} is not one of its values: expected {', '.join(choices)}."
            f"{_did_you_mean(value, choices)}"
        )
    return type(default)(value)


def _parse_disabled(text: str) -> frozenset[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [feature.name for feature in DEFAULTS]
    for name in names:
        if name not in known:
            raise SettingsError(
                f"{DISABLE_VARIABLE}={text!r}: {name!r} is not one of them: expected some of "
                f"{', '.join(known)}, separated by commas.{_did_you_mean(name, known)}"
            )
    return frozenset(names)


def _refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    known = [variable.name for variable in VARIABLES]
    for name in sorted(environ):
        if name.startswith(OWN_PREFIX) and name not in known:
            raise SettingsError(
                f"Unknown environment variable {name}: expected one of {', '.join(known)}."
                f"{_did_you_mean(name, known)} Correct or unset it."
            )


def _did_you_mean(text: str, candidates: list[str]) -> str:
    nearest = difflib.get_close_matches(text, candidates, n=1)
    return f" Did you mean {nearest[0]}?" if nearest else ""
