# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Stores the fingerprints of upstream's functions for each supported release.

The command ``python -m vllm_ascend_kvext fingerprint --write`` generates ``fingerprints.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version

STORE_FILE = Path(__file__).with_name("fingerprints.json")

Fingerprints = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class FingerprintStore:
    """Fingerprints as ``{"vllm": {"0.23.0": {"module:qualname": fingerprint}}}``."""

    distributions: Mapping[str, Mapping[str, Fingerprints]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path = STORE_FILE) -> FingerprintStore:
        return cls(json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {})

    def save(self, path: Path = STORE_FILE) -> None:
        text = json.dumps(self.distributions, indent=2, sort_keys=True)
        path.write_text(text + "\n", encoding="utf-8")

    def versions(self, distribution: str) -> tuple[str, ...]:
        """The stored versions, newest first."""
        stored = self.distributions.get(distribution, {})
        return tuple(sorted(stored, key=Version, reverse=True))

    def has_release(self, distribution: str, version: str) -> bool:
        """Whether a version with the same release number is stored."""
        return any(_same_release(version, stored) for stored in self.versions(distribution))

    def expected(self, distribution: str, version: str, name: str) -> frozenset[str]:
        """The fingerprints that fit an installed version.

        Versions with the same release number (0.23.0, 0.23.0.post1, a local build) share their
        fingerprints, because a fingerprint depends on the source only.
        """
        return frozenset(
            fingerprints[name]
            for stored, fingerprints in self.distributions.get(distribution, {}).items()
            if name in fingerprints and _same_release(version, stored)
        )

    def replacing(
        self, distribution: str, version: str, fingerprints: Fingerprints
    ) -> FingerprintStore:
        """A copy of the store in which one version has these fingerprints."""
        versions = {**self.distributions.get(distribution, {}), version: dict(fingerprints)}
        return FingerprintStore({**self.distributions, distribution: versions})


def _same_release(one: str, other: str) -> bool:
    try:
        first = Version(one)
        second = Version(other)
    except InvalidVersion:
        return False
    return (first.major, first.minor, first.micro) == (second.major, second.minor, second.micro)
