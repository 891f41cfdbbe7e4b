# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The names of the classes that packages above the connector add to it.

vLLM's factory keeps the names of connectors in the same way. A class is imported only when a
connector that needs it is made. To register a class costs nothing.
"""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """The module and the name of a class."""

    module: str
    name: str


_extensions: dict[str, Place] = {}
_secondary_tiers: list[Place] = []


def register_extension(key: str, module: str, name: str) -> None:
    """Make an extension known to connectors. Idempotent.

    Args:
        key: The extension's key in ``kv_connector_extra_config``.
        module: The module that has the class.
        name: The name of the class, a ``connector.extension.ConnectorExtension``.
    """
    _extensions[key] = Place(module, name)


def registered_extensions() -> list[Place]:
    """Each extension that was registered."""
    return list(_extensions.values())


def register_secondary_tier(module: str, name: str) -> None:
    """Make the secondary tier that the option ``shared_tier`` asks for known. Idempotent.

    Args:
        module: The module that has the class.
        name: The name of the class, a ``connector.secondary_tier.SecondaryTier``.
    """
    _secondary_tiers[:] = [Place(module, name)]


def registered_secondary_tier() -> Place | None:
    """The secondary tier that was registered last; None if none was."""
    return _secondary_tiers[-1] if _secondary_tiers else None
