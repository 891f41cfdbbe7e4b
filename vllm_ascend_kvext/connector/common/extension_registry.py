# SPDX-License-Identifier: Apache-2.0
"""The names of extensions, as vLLM's factory has the names of connectors.

An extension is imported when a connector is made. To register it costs nothing.
"""

from __future__ import annotations

_places: dict[str, tuple[str, str]] = {}


def register_extension(key: str, module: str, name: str) -> None:
    """Have connectors know an extension. Idempotent.

    Args:
        key: In ``kv_connector_extra_config``.
        module: That has the class.
        name: Of the class, a ``connector.extension.ConnectorExtension``.
    """
    _places[key] = module, name


def registered_extensions() -> list[tuple[str, str]]:
    """Module and class of each extension that was registered."""
    return list(_places.values())
