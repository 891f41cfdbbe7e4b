# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The variants: stock vLLM, its own retention, or this package's, each with its settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from vllm_ascend_kvext.activation import survey
from vllm_ascend_kvext.features import FEATURES
from vllm_ascend_kvext.patching.install import BOOK
from vllm_ascend_kvext.settings import Mode, Settings

INTERVAL_VARIABLE = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"
POLICY_VARIABLE = "VLLM_ASCEND_KVEXT_RETENTION"
RETENTION = "retention"

KINDS = {"dense": None, "stock": None, "interval": "interval", "adaptive": "adaptive"}
"""By kind of variant, the policy of this package; None for vLLM alone."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One column of the table.

    Attributes:
        name: The name on the command line.
        kind: A key of `KINDS`.
        interval_tokens: The interval of its retention; None leaves it unset.
    """

    name: str
    kind: str
    interval_tokens: int | None

    @classmethod
    def parse(cls, name: str) -> Variant:
        """Parse ``dense``, ``stock[:N]``, ``interval:N`` or ``adaptive[:N]``.

        Raises:
            ValueError: If the name is none of these.
        """
        kind, _, value = name.partition(":")
        may_lack_interval = kind in ("stock", "adaptive") and not value
        is_known = not value if kind == "dense" else value.isdecimal() or may_lack_interval
        if kind not in KINDS or not is_known:
            raise ValueError(
                f"variant {name!r}: expected dense, stock, stock:N, interval:N, adaptive or "
                "adaptive:N with N in tokens"
            )
        return cls(name, kind, int(value) if value.isdecimal() else None)

    @property
    def policy(self) -> str | None:
        """The policy of this package; None for vLLM alone."""
        return KINDS[self.kind]

    @property
    def has_match_unit(self) -> bool:
        """Whether hits end inside blocks where the layout has a match unit.

        ``dense`` has none, and ``stock`` without an interval is dense caching that has one.
        """
        return self.kind != "dense"


@contextmanager
def entered(variant: Variant) -> Iterator[None]:
    """Install a variant in this process, inside the block."""
    with _environ(variant.policy, variant.interval_tokens):
        if variant.policy is None:
            yield
            return
        with _features():
            yield


@contextmanager
def installed(policy: str | None) -> Iterator[None]:
    """Install this package as for a user, inside the block, with or without a retention policy."""
    with _environ(policy, None), _features():
        yield


@contextmanager
def _environ(policy: str | None, interval_tokens: int | None) -> Iterator[None]:
    with mock.patch.dict(os.environ):
        for name, value in ((POLICY_VARIABLE, policy), (INTERVAL_VARIABLE, interval_tokens)):
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = str(value)
        yield


@contextmanager
def _features() -> Iterator[None]:
    """Install the features that the environment brings, inside the block, in their order."""
    settings = Settings.from_environ(os.environ)
    wanted = settings.requests.keys() | settings.implied_features
    names = [each.name for each in FEATURES if each.default_on or each.name in wanted]
    plans = {plan.feature: plan for plan in survey(Settings(mode=Mode.STRICT)).plans}
    try:
        for name in names:
            # As in vLLM, a feature that was not requested may be left out. Retention may not.
            if plans[name].fits or name == RETENTION:
                BOOK.apply(plans[name])
            elif plans[name].misfits:
                print(f"left out: {plans[name].misfits}", file=sys.stderr)
        yield
    finally:
        for name in reversed(names):
            BOOK.revert(name)
