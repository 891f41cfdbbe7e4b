# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""An extension of the connector: one option, and a part on each side.

The connector itself knows no extension. Packages above it register theirs by name, see
``extension_registry``. So the connector can be read, changed and run without them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from vllm_ascend_kvext.connector.common.extension_registry import registered_extensions
from vllm_ascend_kvext.connector.common.messages import WorkerLayout
from vllm_ascend_kvext.connector.common.options import ConnectorOptions, parse_options
from vllm_ascend_kvext.connector.scheduler.extension import SchedulerExtension
from vllm_ascend_kvext.connector.worker.extension import WorkerExtension
from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.store.entries import Entry

if TYPE_CHECKING:
    from vllm_ascend_kvext.connector.scheduler.parts import SchedulerParts
    from vllm_ascend_kvext.counted import MetricTable


class ConnectorExtension(ABC):
    """An extension that the configuration of one connector asks for.

    Args:
        value: The value of its key in ``kv_connector_extra_config``.
        options: The options of the other keys.

    Raises:
        SettingsError: If the value is wrong, or does not suit the other keys.

    Attributes:
        key: Its key in ``kv_connector_extra_config``.
        metrics: The metrics of all its counters.
    """

    key: ClassVar[str]
    metrics: ClassVar[MetricTable]

    @abstractmethod
    def __init__(self, value: Any, options: ConnectorOptions) -> None: ...

    @abstractmethod
    def read_model(self, model_config: Any) -> None:
        """Read what the scheduler side needs of vLLM's ``ModelConfig``, once, at the start.

        Raises:
            SettingsError: If an option does not suit the model.
        """

    @abstractmethod
    def scheduler_side(
        self,
        parts: SchedulerParts,
        workers: Sequence[WorkerLayout],
        on_used: Callable[[Entry], None],
    ) -> SchedulerExtension | None:
        """Make its part of a scheduler side; None if there can be none. The log has the reason.

        Args:
            workers: The layouts of the workers, by rank.
            on_used: The extension calls it with each entry of its own that is used. A shared tier
                is told of the use.
        """

    @abstractmethod
    def worker_side(self, vllm_config: Any) -> WorkerExtension:
        """Make its part of a worker side.

        Args:
            vllm_config: vLLM's ``VllmConfig``, as the worker has it.
        """


def known_extensions() -> list[type[ConnectorExtension]]:
    """All extensions that connectors of this process know."""
    return [getattr(import_module(module), name) for module, name in registered_extensions()]


def parse_configuration(
    extra_config: Mapping[str, Any] | None, world_size: int
) -> tuple[ConnectorOptions, ConnectorExtension | None]:
    """The options of a connector, and the extension that its configuration asks for.

    Args:
        extra_config: ``kv_connector_extra_config``; None if there is none.
        world_size: Workers of the engine.

    Raises:
        SettingsError: See `parse_options` and `ConnectorExtension`.
    """
    extensions = {extension.key: extension for extension in known_extensions()}
    options = parse_options(extra_config, world_size, extensions)
    asked = {key: (extra_config or {}).get(key) for key in extensions}
    found = [extensions[key](value, options) for key, value in asked.items() if value is not None]
    assert len(found) <= 1, "messages carry the extras of one extension"
    return options, found[0] if found else None


def read_configuration(
    kv_role: str | None, extra_config: Mapping[str, Any] | None, world_size: int
) -> tuple[ConnectorOptions, ConnectorExtension | None]:
    """The options of one connector, and its extension.

    Args:
        world_size: Workers of the engine.

    Raises:
        SettingsError: If the role is another one than ``kv_both``. See also `parse_configuration`.
    """
    if kv_role != "kv_both":
        raise SettingsError(
            f"KvextConnector: expected kv_role kv_both, found {kv_role}: it "
            "stores and loads for its own engine only; set kv_role to kv_both"
        )
    return parse_configuration(extra_config, world_size)
