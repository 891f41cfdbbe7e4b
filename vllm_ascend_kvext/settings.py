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

from vllm_ascend_kvext.errors import SettingsError

OWN_PREFIX = "VLLM_ASCEND_KVEXT_"
MODE_VARIABLE = f"{OWN_PREFIX}MODE"
RETENTION_INTERVAL_VARIABLE = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"


class Mode(enum.Enum):
    """What happens when a patch does not fit the installed upstream."""

    OFF = "off"
    SAFE = "safe"
    STRICT = "strict"


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
        name=RETENTION_INTERVAL_VARIABLE,
        default="unset",
        doc="Which blocks of sliding-window groups stay in the prefix cache. Unset: all of them. "
        "`0`: those behind the last positions a request can be resumed at. `N`: also those "
        "behind every N-th token.",
    ),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The variables as one process found them.

    Attributes:
        mode: Value of ``VLLM_ASCEND_KVEXT_MODE``.
        retention_interval: Raw text of ``VLLM_PREFIX_CACHE_RETENTION_INTERVAL``; None if unset.
    """

    mode: Mode = Mode.SAFE
    retention_interval: str | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read and validate the variables.

        With mode ``off`` no other variable is looked at.

        Raises:
            SettingsError: If the mode is not one of `Mode`, or a ``VLLM_ASCEND_KVEXT_*`` variable
                is not in `VARIABLES`.
        """
        mode = _parse_mode(environ.get(MODE_VARIABLE, ""))
        if mode is Mode.OFF:
            return cls(mode=mode)
        _refuse_unknown_variables(environ)
        return cls(mode=mode, retention_interval=environ.get(RETENTION_INTERVAL_VARIABLE))

    @property
    def requests(self) -> dict[str, str]:
        """The features that the user asked for, each with the variable that says so."""
        if self.retention_interval is not None and self.retention_interval.strip():
            return {"retention": RETENTION_INTERVAL_VARIABLE}
        return {}

    @property
    def requested_features(self) -> frozenset[str]:
        """The features that the user asked for."""
        return frozenset(self.requests)


def own_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` that only this package knows, with their values."""
    names = (variable.name for variable in VARIABLES)
    return {
        name: environ[name] for name in names if name.startswith(OWN_PREFIX) and name in environ
    }


def _parse_mode(text: str) -> Mode:
    value = text.strip().lower()
    if not value:
        return Mode.SAFE
    modes = [mode.value for mode in Mode]
    if value not in modes:
        raise SettingsError(
            f"{MODE_VARIABLE}={text!r} is not a mode: expected one of {', '.join(modes)}."
            f"{_did_you_mean(value, modes)}"
        )
    return Mode(value)


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
