# SPDX-License-Identifier: Apache-2.0
"""The names of what rooms above the connector add to it, as vLLM's factory has those of connectors.

Such a class is imported when a connector is made that needs it. To register it costs nothing.
"""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Where a class is."""

    module: str
    name: str


_extensions: dict[str, Place] = {}
_secondary_tiers: list[Place] = []


def register_extension(key: str, module: str, name: str) -> None:
    """Have connectors know an extension. Idempotent.

    Args:
        key: In ``kv_connector_extra_config``.
        module: That has the class.
        name: Of the class, a ``connector.extension.ConnectorExtension``.
    """
    _extensions[key] = Place(module, name)


def registered_extensions() -> list[Place]:
    """Each extension that was registered."""
    return list(_extensions.values())


def register_secondary_tier(module: str, name: str) -> None:
    """Have connectors know the secondary tier that the option ``shared_tier`` asks for. Idempotent.

    Args:
        module: That has the class.
        name: Of the class, a ``connector.secondary_tier.SecondaryTier``.
    """
    _secondary_tiers[:] = [Place(module, name)]


def registered_secondary_tier() -> Place | None:
    """The secondary tier that was registered last; None if none was."""
    return _secondary_tiers[-1] if _secondary_tiers else None
