# SPDX-License-Identifier: Apache-2.0
"""Every environment variable of this package: its default, its values and what they do.

The fields of `Settings` are the one declaration, see ``declared``. Knows nothing of vLLM: whether a
retention interval suits a model is decided at engine start, where the unit of its prefix-cache hits
is known. Knows no feature either: which of them a name means, `activation` looks up.
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
LMCACHE_KEYS_VARIABLE = f"{OWN_PREFIX}LMCACHE_KEYS"
RETENTION_INTERVAL_VARIABLE = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"


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


class Retention(enum.Enum):
    """Who decides which boundaries stay in the prefix cache."""

    INTERVAL = "interval"
    ADAPTIVE = "adaptive"


_RETENTION_FEATURE = "retention"
_FAST_PREFIX_CACHE_FEATURE = "fast-prefix-cache"

HOW_TO_ASK = {
    _RETENTION_FEATURE: f"{RETENTION_VARIABLE}={Retention.ADAPTIVE.value}",
    _FAST_PREFIX_CACHE_FEATURE: f"{FAST_PREFIX_CACHE_VARIABLE}={Switch.ON.value}",
}
"""For each feature that is off unless it is asked for: a setting that asks for it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The variables as one process found them."""

    mode: Annotated[Mode, MODE_VARIABLE] = Mode.SAFE
    """`off`: vLLM runs untouched. `safe`: a patch that does not fit the installed vLLM is left out
    with one warning, unless its feature was asked for. `strict`: it stops vLLM."""

    disabled: Annotated[frozenset[str], DISABLE_VARIABLE] = frozenset()
    """Repairs of upstream defects to leave out, separated by commas: {repairs}. `connector` leaves
    out KvextConnector: vLLM does not know it then. `lmcache` leaves LMCacheMPConnector as LMCache
    has it. Unset: all of them are in effect."""

    retention: Annotated[Retention, RETENTION_VARIABLE] = Retention.INTERVAL
    """`interval`: the interval below decides alone. `adaptive`: what requests resume from, share
    and name decides which blocks of sliding-window and state groups stay in the prefix cache, and
    what gives way when it is full. An interval then adds a grid, that of vLLM's configuration,
    too."""

    retention_interval: Annotated[str | None, RETENTION_INTERVAL_VARIABLE] = None
    """Which blocks of sliding-window and state groups are the last to leave the prefix cache. Unset
    or blank: vLLM decides, since 0.30 by its `--prefix-cache-retention-interval`. `0`: those before
    the last positions a request can be resumed at. `N`: also those before every N-th token. Since
    vLLM 0.30 this package alone reads it: AscendStore of vLLM-Ascend 0.30 stores as if it were
    unset."""

    fast_prefix_cache: Annotated[Switch, FAST_PREFIX_CACHE_VARIABLE] = Switch.AUTO
    """`1`: the scheduler's prefix-cache functions are replaced by ones that decide the same in less
    time. `0`: upstream's run. `auto`: with retention."""

    is_bundled: Annotated[bool, BUNDLE_VARIABLE] = True
    """`1`: one call moves all groups and planes of a request. `0`: one call per plane, with the
    same result."""

    uses_ascend_kernel: Annotated[bool, ASCEND_KERNEL_VARIABLE] = False
    """Experimental: it has never run on an NPU. `1`: small scattered runs are moved by the AscendC
    kernel, where the package was built with it. `0`: by the DMA engines."""

    lmcache_keys: Annotated[Switch, LMCACHE_KEYS_VARIABLE] = Switch.AUTO
    """With LMCacheMPConnector. `1`: the names of stored objects say how the engine lays out its KV,
    so that engines with other groups, dtypes, block sizes or parallel sizes never read each
    other's. `auto`: the same for models with several KV cache groups; with one group names are
    LMCache's. `0`: names are LMCache's always, which is safe only where all engines of a server are
    alike."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read and validate the variables.

        With mode ``off`` no other variable is looked at. `activation.read_settings` looks at the
        names of features besides.

        Raises:
            SettingsError: If a variable has a value that is not one of its own, or a
                ``VLLM_ASCEND_KVEXT_*`` variable is not one of `Settings`.
        """
        mode = _read("mode", environ)
        if mode is Mode.OFF:
            return cls(mode=mode)
        _refuse_unknown_variables(environ)
        return cls(**{key: _read(key, environ) for key in _VARIABLES})

    @property
    def requests(self) -> dict[str, str]:
        """The features that the user asked for, each with the variable that says so."""
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
        """What goes with the features asked for, where it fits."""
        if self.fast_prefix_cache is Switch.AUTO and _RETENTION_FEATURE in self.requests:
            return frozenset({_FAST_PREFIX_CACHE_FEATURE})
        return frozenset()

    def refuse_wrong_interval(self) -> None:
        """Raise `SettingsError` for a retention interval that is no integer, or negative."""
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
    """The value of one field of `Settings`; `SettingsError` if it is not one of its own."""
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


# Those that are asked for while an engine runs.
Environ = Mapping[str, str]
parse_retention: Callable[[Environ], Retention] = partial(_read, "retention")
parse_retention_interval: Callable[[Environ], str | None] = partial(_read, "retention_interval")
parse_is_bundled: Callable[[Environ], bool] = partial(_read, "is_bundled")
parse_uses_ascend_kernel: Callable[[Environ], bool] = partial(_read, "uses_ascend_kernel")
parse_lmcache_keys: Callable[[Environ], Switch] = partial(_read, "lmcache_keys")


def _word(environ: Mapping[str, str], name: str, default: str, words: Collection[str]) -> str:
    """What a variable has: one of some words, or nothing."""
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
