# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Declares every environment variable of this package: its default, its values and their effect.

The fields of `Settings` are the only declaration, see ``declared``. The module knows nothing of
vLLM. Whether a retention interval suits a model is checked when the engine starts, because the unit
of the model's prefix-cache hits is known there. The module knows no feature either: `activation`
checks the names of features.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from vllm_ascend_kvext.declared import declared, did_you_mean
from vllm_ascend_kvext.errors import SettingsError

OWN_PREFIX = "VLLM_ASCEND_KVEXT_"
MODE_VARIABLE = f"{OWN_PREFIX}MODE"
DISABLE_VARIABLE = f"{OWN_PREFIX}DISABLE"
RETENTION_VARIABLE = f"{OWN_PREFIX}RETENTION"
FAST_PREFIX_CACHE_VARIABLE = f"{OWN_PREFIX}FAST_PREFIX_CACHE"
BUNDLE_VARIABLE = f"{OWN_PREFIX}BUNDLE"
ASCEND_KERNEL_VARIABLE = f"{OWN_PREFIX}ASCEND_KERNEL"
RETENTION_INTERVAL_VARIABLE = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"


class Mode(enum.Enum):
    """What happens when a patch does not fit the installed upstream."""

    OFF = "off"
    SAFE = "safe"
    STRICT = "strict"


class Switch(enum.Enum):
    """The values of a feature that other features switch on, unless the user decides."""

    OFF = "0"
    ON = "1"
    AUTO = "auto"


class Retention(enum.Enum):
    """Which policy decides what stays in the prefix cache."""

    INTERVAL = "interval"
    ADAPTIVE = "adaptive"


_RETENTION_FEATURE = "retention"
_FAST_PREFIX_CACHE_FEATURE = "fast-prefix-cache"

HOW_TO_ASK = {
    _RETENTION_FEATURE: f"{RETENTION_VARIABLE}={Retention.ADAPTIVE.value}",
    _FAST_PREFIX_CACHE_FEATURE: f"{FAST_PREFIX_CACHE_VARIABLE}={Switch.ON.value}",
}
"""Maps the name of each feature that is off by default to a setting that requests it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The values of the variables in one process."""

    mode: Annotated[Mode, MODE_VARIABLE] = Mode.SAFE
    """`off`: vLLM runs untouched. `safe`: a patch that does not fit the installed vLLM is left out
    with one warning, unless its feature was asked for. `strict`: it stops vLLM."""

    disabled: Annotated[frozenset[str], DISABLE_VARIABLE] = frozenset()
    """Repairs of upstream defects to leave out, separated by commas: {repairs}. `connector` leaves
    out KvextConnector, so vLLM does not know it. `lmcache` leaves LMCacheMPConnector as LMCache
    has it. Unset: all of them are in effect."""

    retention: Annotated[Retention, RETENTION_VARIABLE] = Retention.INTERVAL
    """`interval`: only the interval below decides. `adaptive`: the boundaries that requests resume
    from, share and name decide which blocks of sliding-window and state groups stay in the prefix
    cache, and which are evicted when it is full. An interval then adds a grid of boundaries; the
    interval of vLLM's configuration counts, too."""

    retention_interval: Annotated[str | None, RETENTION_INTERVAL_VARIABLE] = None
    """Which blocks of sliding-window and state groups stay longest in the prefix cache. Unset or
    blank: vLLM decides, since 0.30 by its `--prefix-cache-retention-interval`. `0`: the blocks
    before the last positions at which a request can resume. `N`: also the blocks before every N-th
    token. Since vLLM 0.30 only this package reads the variable; AscendStore of vLLM-Ascend 0.30
    stores as if it were unset."""

    fast_prefix_cache: Annotated[Switch, FAST_PREFIX_CACHE_VARIABLE] = Switch.AUTO
    """`1`: the scheduler's prefix-cache functions are replaced by faster ones that make the same
    decisions. `0`: upstream's functions run. `auto`: as `1` with retention, and as `0` without."""

    is_bundled: Annotated[bool, BUNDLE_VARIABLE] = True
    """`1`: one call moves all groups and planes of a request. `0`: one call per plane, with the
    same result."""

    uses_ascend_kernel: Annotated[bool, ASCEND_KERNEL_VARIABLE] = False
    """Experimental: the kernel has never run on an NPU. `1`: the AscendC kernel moves small
    scattered runs, if the package was built with it. `0`: the DMA engines move them."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read and validate the variables.

        In mode ``off`` no other variable is read. `activation.read_settings` also checks the names
        of features.

        Raises:
            SettingsError: If a variable has a wrong value, or if a ``VLLM_ASCEND_KVEXT_*`` variable
                is unknown.
        """
        mode = _read("mode", environ)
        if mode is Mode.OFF:
            return cls(mode=mode)
        _refuse_unknown_variables(environ)
        return cls(**{key: _read(key, environ) for key in _VARIABLES})

    @property
    def requests(self) -> dict[str, str]:
        """The features that the user requests, each with the variable that requests it."""
        requests = {}
        if self.retention is Retention.ADAPTIVE:
            requests[_RETENTION_FEATURE] = RETENTION_VARIABLE
        elif self.retention_interval is not None:
            requests[_RETENTION_FEATURE] = RETENTION_INTERVAL_VARIABLE
        if self.fast_prefix_cache is Switch.ON:
            requests[_FAST_PREFIX_CACHE_FEATURE] = FAST_PREFIX_CACHE_VARIABLE
        return requests

    @property
    def implied_features(self) -> frozenset[str]:
        """The features that come with the requested features, if they fit."""
        if self.fast_prefix_cache is Switch.AUTO and _RETENTION_FEATURE in self.requests:
            return frozenset({_FAST_PREFIX_CACHE_FEATURE})
        return frozenset()

    def refuse_wrong_interval(self) -> None:
        """Raise `SettingsError` if the retention interval is no integer, or is negative."""
        text = self.retention_interval
        try:
            problem = "negative" if text is not None and int(text) < 0 else ""
        except ValueError:
            problem = "not an integer"
        if problem:
            raise SettingsError(
                f"{RETENTION_INTERVAL_VARIABLE}={text!r} is {problem}. Expected 0, or a multiple "
                f"of the number of tokens at which the model's prefix cache can hit; that number "
                f"is in the log of an engine that starts with 0. Unset the variable to keep "
                f"all blocks."
            )


_VARIABLES = {each.key: each for each in declared(Settings)}
VARIABLE_NAMES = tuple(each.note for each in _VARIABLES.values())


def own_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` that only this package knows, with their values."""
    return {
        name: environ[name]
        for name in VARIABLE_NAMES
        if name.startswith(OWN_PREFIX) and name in environ
    }


def _read(key: str, environ: Mapping[str, str]) -> Any:
    """The value of one field of `Settings`; raises `SettingsError` if the value is wrong."""
    _, kind, name, default = _VARIABLES[key]
    if key == "disabled":
        names = environ.get(name, "").split(",")
        return frozenset(each.strip() for each in names if each.strip())
    if key == "retention_interval":
        text = environ.get(name, "")
        return text if text.strip() else None
    if kind is not bool:
        return kind(_word(environ, name, default.value, [each.value for each in kind]))
    return _word(environ, name, "1" if default else "0", ["0", "1"]) == "1"


# The variables that are read while an engine runs.
Environ = Mapping[str, str]
parse_retention: Callable[[Environ], Retention] = partial(_read, "retention")
parse_retention_interval: Callable[[Environ], str | None] = partial(_read, "retention_interval")
parse_is_bundled: Callable[[Environ], bool] = partial(_read, "is_bundled")
parse_uses_ascend_kernel: Callable[[Environ], bool] = partial(_read, "uses_ascend_kernel")


def _word(environ: Mapping[str, str], name: str, default: str, words: Collection[str]) -> str:
    """The value of a variable that has one of some words; the default if it is blank."""
    text = environ.get(name, "")
    word = text.strip().lower() or default
    if word not in words:
        raise SettingsError(
            f"{name}={text!r} is not one of its values: expected {', '.join(words)}."
            f"{did_you_mean(word, words)}"
        )
    return word


def _refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    for name in sorted(environ):
        if name.startswith(OWN_PREFIX) and name not in VARIABLE_NAMES:
            raise SettingsError(
                f"Unknown environment variable {name}: expected one of {', '.join(VARIABLE_NAMES)}."
                f"{did_you_mean(name, VARIABLE_NAMES)} Correct or unset it."
            )
