# SPDX-License-Identifier: Apache-2.0
"""What runs: stock vLLM, its own retention, or this package's, each with its settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

INTERVAL_VARIABLE = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"
RETENTION = "retention"
POLICY_VARIABLE = "VLLM_ASCEND_KVEXT_RETENTION"


KINDS = {"dense": None, "stock": None, "v032": None, "interval": "interval", "adaptive": "adaptive"}
"""The policy of this package that a kind of variant stands for, if any."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One column.

    Attributes:
        name: As on the command line.
        kind: A key of `KINDS`.
        interval_tokens: Of whichever retention it is; None leaves it unset.
    """

    name: str
    kind: str
    interval_tokens: int | None

    @classmethod
    def parse(cls, name: str) -> Variant:
        """``dense``, ``stock:N``, ``v032:N``, ``v032:dense``, ``interval:N``, ``adaptive[:N]``.

        Raises:
            ValueError: If it is none of these.
        """
        kind, _, value = name.partition(":")
        wanted = {"dense": not value, "adaptive": not value or value.isdecimal()}
        wanted["v032"] = value == "dense" or value.isdecimal()
        if kind not in KINDS or not wanted.get(kind, value.isdecimal()):
            raise ValueError(
                f"variant {name!r}: expected dense, stock:N, v032:N, v032:dense, interval:N, "
                "adaptive or adaptive:N with N in tokens"
            )
        return cls(name, kind, int(value) if value.isdecimal() else None)

    @property
    def policy(self) -> str | None:
        """This package's policy, or None for vLLM on its own."""
        return KINDS[self.kind]


def package_features() -> tuple[str, ...]:
    """What a user gets with the environment as it is, in the order of installation."""
    from vllm_ascend_kvext.features import FEATURES
    from vllm_ascend_kvext.settings import Settings

    settings = Settings.from_environ(os.environ)
    wanted = settings.requested_features | settings.implied_features
    return tuple(
        feature.name for feature in FEATURES if feature.default_on or feature.name in wanted
    )


@contextmanager
def entered(variant: Variant) -> Iterator[None]:
    """Make this process that of a variant, for a while."""
    before = {name: os.environ.pop(name, None) for name in (INTERVAL_VARIABLE, POLICY_VARIABLE)}
    if variant.interval_tokens is not None and variant.kind != "v032":
        os.environ[INTERVAL_VARIABLE] = str(variant.interval_tokens)
    if variant.policy is not None:
        os.environ[POLICY_VARIABLE] = variant.policy
    features = package_features() if variant.policy is not None else ()
    try:
        for feature in features:
            _install(feature)
        yield
    finally:
        for feature in reversed(features):
            _activation().revert_feature(feature)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _install(feature: str) -> None:
    """As vLLM would get it: what nobody asked for may be left out, retention may not."""
    from vllm_ascend_kvext.errors import PatchError

    try:
        _activation().apply_feature(feature)
    except PatchError as error:
        if feature == RETENTION:
            raise
        print(f"left out: {error}", file=sys.stderr)


def _activation() -> ModuleType:
    """Imported late: stock vLLM runs where this package is not installed."""
    from vllm_ascend_kvext import activation

    return activation
